"""Building task folders: what is admitted is really a bug that tests see, and bad input is isolated."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from envs.coding import admission, build, catalogue, sdist
from envs.coding.build import BuildError
from envs.coding.tasks import load_package, load_tasks
from envs.coding.verification import Verifier
from envs.coding.workspace import Templates
from tests.envs import tiny
from tests.envs.tiny import build_tasks, make_sdist, tiny_tasks

pytestmark = pytest.mark.confined


def test_every_task_fails_and_passes_as_its_record_says() -> None:
    folder = tiny_tasks()
    records = load_tasks(folder)
    assert len(records) >= 12
    tree = load_package(folder, "tiny")
    with Verifier(folder / "packages", confinement="auto") as verifier:
        for task in records[::4]:
            report = verifier.suite("tiny", {task["path"]: tree.broken(task)})
            failed = sorted(test for test, result in report.results.items() if result != "passed")
            assert failed == task["FAIL_TO_PASS"], task["instance_id"]
            assert all(report.results[test] == "passed" for test in task["PASS_TO_PASS"])


def test_functions_that_no_test_runs_get_no_task() -> None:
    assert "untested" not in {task["qualname"] for task in load_tasks(tiny_tasks())}
    manifest = json.loads((tiny_tasks() / "manifest.json").read_text())
    assert manifest["functions_left_out"]["no test runs it"] == 1
    assert manifest["packages"]["tiny"] | {"sha256": ""} == {
        "version": "1.0",
        "sha256": "",
        "licence": "MIT",
        "suite_tests": 5,
        "tasks": manifest["tasks"],
        "left_out_because": None,
    }
    assert manifest["whole_suite_cold"] == {"tasks": 1, "disagree": []}


def test_patches_apply_with_git(tmp_path: Path) -> None:
    tree = load_package(tiny_tasks(), "tiny")
    for task in load_tasks(tiny_tasks())[:5]:
        file = tmp_path / task["path"]
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(tree.broken(task))
        for patch, expected in (
            (task["patch"], tree.files[task["path"]]),
            (task["bug_patch"], tree.broken(task)),
        ):
            subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True)
            assert file.read_bytes() == expected


def test_a_file_without_a_last_newline_gives_a_patch_git_takes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2")
    patch = admission.unified_diff("a.py", "x = 1\ny = 2", "x = 1\ny = 3\n")
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 3\n"


def test_splits_never_share_a_mutant_and_keep_functions_whole() -> None:
    records = load_tasks(tiny_tasks())
    tree = load_package(tiny_tasks(), "tiny")
    texts: dict[bytes, str] = {}
    for task in records:
        assert texts.setdefault(tree.broken(task), task["split"]) == task["split"]
    unseen = {task["qualname"] for task in records if task["split"] == "unseen_function"}
    assert len(unseen) == 1
    assert not unseen & {task["qualname"] for task in records if task["split"] != "unseen_function"}
    assert {task["split"] for task in records} == {"train", "unseen_mutant", "unseen_function"}


def test_the_same_settings_give_the_same_bytes(tmp_path: Path) -> None:
    again = build_tasks(tmp_path / "tasks", [make_sdist(tmp_path / "sdists")], tmp_path / "sdists", workers=1)
    assert (again / "tasks.jsonl").read_bytes() == (tiny_tasks() / "tasks.jsonl").read_bytes()


def test_a_finished_folder_is_returned_and_others_are_not_touched(tmp_path: Path) -> None:
    assert build.build(tiny.settings(tiny_tasks()), confinement="auto", progress=tiny.quiet) == tiny_tasks()
    (tmp_path / "mine").write_text("x")
    with pytest.raises(BuildError, match="no task folder"):
        build.build(tiny.settings(tmp_path), confinement="auto", progress=tiny.quiet)
    assert (tmp_path / "mine").read_text() == "x"


def test_unusable_packages_are_isolated_and_the_rest_goes_on(tmp_path: Path) -> None:
    sdists = tmp_path / "sdists"
    good = make_sdist(sdists)
    failing = make_sdist(
        sdists, "failing", tiny.FILES | {"tests/test_tiny.py": "def test_no():\n    assert False\n"}
    )
    torn = make_sdist(sdists, "torn")
    damaged = sdists / "torn-1.0.tar.gz"
    damaged.write_bytes(damaged.read_bytes()[:200])
    torn = catalogue.dataclasses.replace(torn, sha256=tiny.hashlib.sha256(damaged.read_bytes()).hexdigest())
    renamed = {
        path: text.replace("clamp", "limit").replace("count_above", "over")
        for path, text in tiny.FILES.items()
    }
    other = make_sdist(sdists, "other", renamed)
    folder = build_tasks(tmp_path / "tasks", [good, failing, torn, other], sdists, max_tasks=20, functions=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    causes = {name: about["left_out_because"] for name, about in manifest["packages"].items()}
    assert causes["tiny"] is None
    assert "does not pass as it comes" in causes["failing"]
    assert "does not unpack" in causes["torn"]
    assert {task["package"] for task in load_tasks(folder)} == {"tiny", "other"}
    assert not (folder / "packages/torn").exists()


def test_too_few_usable_packages_is_an_error_with_the_causes(tmp_path: Path) -> None:
    bad = make_sdist(
        tmp_path / "sdists", "bad", {"PKG-INFO": "", "tests/test_a.py": "import nothing_like_it\n"}
    )
    with pytest.raises(BuildError, match=r"fewer than half.*bad: its suite does not pass"):
        build_tasks(tmp_path / "tasks", [bad], tmp_path / "sdists")
    assert not (tmp_path / "tasks").exists()


def test_a_wrong_hash_is_not_accepted(tmp_path: Path) -> None:
    package = make_sdist(tmp_path)
    assert sdist.archive(package, tmp_path) == tmp_path / "tiny-1.0.tar.gz"
    assert sdist.archive(catalogue.dataclasses.replace(package, sha256="0" * 64), tmp_path) is None


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("tiny-1.0/../../evil.py", tarfile.REGTYPE, "holds the path"),
        ("/tiny-1.0/a.py", tarfile.REGTYPE, "holds the path"),
        ("tiny-1.0/link", tarfile.SYMTYPE, "link or a device"),
        ("tiny-1.0/hard", tarfile.LNKTYPE, "link or a device"),
        ("tiny-1.0/fifo", tarfile.FIFOTYPE, "link or a device"),
        ("other/a.py", tarfile.REGTYPE, "2 entries at its top"),
    ],
)
def test_unsafe_archives_are_refused(tmp_path: Path, name: str, kind: bytes, message: str) -> None:
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as bundle:
        for entry, entry_kind in (("tiny-1.0/ok.py", tarfile.REGTYPE), (name, kind)):
            member = tarfile.TarInfo(entry)
            member.type, member.linkname = entry_kind, "/etc/passwd"
            bundle.addfile(member, io.BytesIO(b""))
    target = tmp_path / "out" / "x"
    with pytest.raises(sdist.SdistError, match=message):
        sdist.unpack(path, target)
    assert not (tmp_path / "evil.py").exists()


def test_unknown_package_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(catalogue.UnknownPackage, match=r"unknown nope; the catalogue has toolz"):
        catalogue.select(("nope",))


def test_recipe_hash_changes_with_what_matters_only(tmp_path: Path) -> None:
    base = build.default_dir(tiny.settings(tmp_path))
    assert build.default_dir(tiny.settings(tmp_path / "x", workers=7)) == base
    assert build.default_dir(tiny.settings(tmp_path, seed=1)) != base


def test_base_commit_is_what_git_makes_of_the_tree() -> None:
    task = load_tasks(tiny_tasks())[0]
    templates = Templates(tiny_tasks())
    try:
        workspace = templates.get(task).workspace()
        run = ["git", "-C", workspace.root]
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        assert head.strip() == task["base_commit"]
        status = subprocess.run([*run, "status", "--porcelain"], capture_output=True, text=True, check=True)
        assert status.stdout == ""
        log = subprocess.run(
            [*run, "rev-list", "--all", "--count"], capture_output=True, text=True, check=True
        )
        assert log.stdout.strip() == "1"
        assert subprocess.run([*run, "fsck", "--strict"], capture_output=True).returncode == 0
    finally:
        templates.close()


def test_the_fixed_file_is_not_among_the_objects() -> None:
    task = load_tasks(tiny_tasks())[0]
    fixed = load_package(tiny_tasks(), "tiny").files[task["path"]]
    templates = Templates(tiny_tasks())
    try:
        workspace = templates.get(task).workspace()
        run = ["git", "-C", workspace.root]
        blob = subprocess.run(
            [*run, "hash-object", "--stdin"], input=fixed, capture_output=True, check=True
        ).stdout
        objects = subprocess.run(
            [*run, "cat-file", "--batch-check", "--batch-all-objects"], capture_output=True, check=True
        ).stdout
        assert blob.strip() not in objects
        assert b"commit" in objects
    finally:
        templates.close()


def test_a_killed_build_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    admit = admission.admit

    def killed_at_the_third(tree: Any, candidate: admission.Candidate, *rest: Any, **settings: Any) -> Any:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(candidate.key)
        return admit(tree, candidate, *rest, **settings)

    monkeypatch.setattr(admission, "admit", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        build_tasks(tmp_path / "tasks", [make_sdist(tmp_path / "sdists")], tmp_path / "sdists", workers=1)
    assert not (tmp_path / "tasks").exists()
    monkeypatch.setattr(admission, "admit", lambda *a, **k: tried.append(a[1].key) or admit(*a, **k))
    (tmp_path / "tasks.building" / "sdists").rename(tmp_path / "sdists")
    folder = build_tasks(tmp_path / "tasks", [make_sdist(tmp_path / "other")], tmp_path / "sdists", workers=1)
    assert len(tried) == len(set(tried)), "a function was tried again"
    assert (folder / "tasks.jsonl").read_bytes() == (tiny_tasks() / "tasks.jsonl").read_bytes()


def test_builders_of_one_folder_wait_for_each_other(tmp_path: Path) -> None:
    folder, changes = tmp_path / "tasks", {"max_tasks": 4}
    package = make_sdist(tmp_path / "sdists")
    first = threading.Thread(
        target=build_tasks, args=(folder, [package], tmp_path / "sdists"), kwargs=changes
    )
    first.start()
    while not folder.with_name("tasks.lock").exists():
        time.sleep(0.005)
    said: list[str] = []
    built = build.build(
        tiny.settings(folder, **changes), confinement="auto", progress=lambda *a: said.append(a[2])
    )
    first.join()
    assert built == folder
    assert said == ["waiting for another build of the same tasks"]
    assert len(load_tasks(folder)) == 4


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "write_jsonl", full)
    with pytest.raises(BuildError, match=r"No space left on device\. What is finished stays there"):
        build_tasks(tmp_path / "tasks", [make_sdist(tmp_path / "sdists")], tmp_path / "sdists", max_tasks=2)
    assert (tmp_path / "tasks.building").is_dir()
