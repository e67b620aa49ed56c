"""Runs and verdicts on a toy package: warm agrees with cold, caches, restarts, what counts as a change."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from envs.coding import pristine
from envs.coding.pristine import PackageError, Pristine
from envs.coding.verification import Verifier
from gagar_jax.types import Status
from tests.envs import toy_package
from tests.envs.toy_package import BUG, CLAMP, CORE, FILES, NAME, edit, task

WORDS = "src/toy/words.py"
pytestmark = pytest.mark.confined


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "packages"
    toy_package.write(folder)
    return folder


@pytest.fixture(scope="module")
def verifier(packages: Path) -> Iterator[Verifier]:
    with Verifier(packages, confinement="auto", timeout_s=20) as made:
        yield made


def test_the_suite_passes(verifier: Verifier) -> None:
    report = verifier.suite(NAME)
    assert report.complete, report.why
    assert report.path == "cold"
    assert len(report.results) == 18
    assert {t for t, outcome in report.results.items() if outcome != "passed"} == {
        "tests/test_words.py::test_skipped"
    }


def test_maps_functions_to_the_tests_that_run_them(verifier: Verifier) -> None:
    account = {f"tests/test_core.py::{name}" for name in ("test_deposit", "test_deposit_refuses")}
    # A module's fixture calls clamp, and runs for whichever test comes first: it belongs to all of them.
    assert verifier.mapped_tests(NAME, CORE, "clamp") >= {*CLAMP, *account}
    assert verifier.mapped_tests(NAME, CORE, "twice") == {
        f"tests/test_core.py::TestTwice::{name}" for name in ("test_twice", "test_factor")
    }
    assert verifier.mapped_tests(NAME, CORE, "Savings.deposit") == {"tests/test_core.py::test_savings"}
    assert verifier.mapped_tests(NAME, CORE, "make_adder") == {"tests/test_core.py::test_adder"}
    assert verifier.mapped_tests(NAME, WORDS, "unused") == frozenset()


# What changes, and the path it must take.
MUTANTS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "plain function": (BUG, "warm"),
    "nothing but a comment": (
        edit(CORE, "    return value\n\n\n@func", "    # why\n    return value\n\n\n@func"),
        "warm",
    ),
    "cached function": (edit(CORE, "fib(n - 1) + fib(n - 2)", "fib(n - 1) + fib(n - 1)"), "warm"),
    "decorated function": (edit(CORE, "value * factor", "value * 3"), "warm"),
    "closure": (edit(CORE, "return value + n", "return value - n"), "warm"),
    "generator": (edit(CORE, "n -= 1", "n -= 2"), "warm"),
    "property": (edit(CORE, "return self._balance", "return self._balance + 1"), "warm"),
    "property setter": (edit(CORE, "self._balance = value", "self._balance = -value"), "warm"),
    "method": (edit(CORE, "if amount <= 0:", "if amount < 0:"), "warm"),
    "method with super": (edit(CORE, "super().deposit(amount * 2)", "super().deposit(amount)"), "warm"),
    "helper, earlier lines moved": (
        {CORE: b"\n\n# moved\n" + FILES[CORE].replace("return high", "return value").encode()},
        "warm",
    ),
    "new imports inside, longer": (
        edit(
            CORE,
            "    if value < low:",
            "    import math\n    low = math.ceil(low + 0.5)\n    if value < low:",
        ),
        "warm",
    ),
    "raises": (
        edit(CORE, "    if value < low:", "    raise RuntimeError('no')\n    if value < low:"),
        "warm",
    ),
    "two files": ({**BUG, **edit(WORDS, '"es"', '"ez"')}, "warm"),
    "does not parse": (edit(CORE, "if value < low:", "if value < low"), "warm"),
    "unmapped function": (edit(WORDS, "return word\n", "return word * 2\n"), "warm"),
    "runs at import": (edit(CORE, "return LIMIT // 2", "return LIMIT // 3"), "cold"),
    "decorator runs at import": (edit(CORE, "return function(*args, **kwargs)", "return None"), "cold"),
    "constant": (edit(CORE, "LIMIT = 100", "LIMIT = 10"), "cold"),
    "default": (edit(CORE, "factor=2", "factor=3"), "cold"),
    "no longer a generator": (
        edit(CORE, "        yield n\n        n -= 1", "        n -= 1\n    return [1]"),
        "cold",
    ),
    "no closure left": (edit(CORE, "super().deposit(amount * 2)", "None"), "cold"),
    "new file": (
        {"src/toy/extra.py": b"def low(v): return 7\n"}
        | edit(
            CORE, "        return low\n", "        from toy.extra import low as f\n        return f(value)\n"
        ),
        "cold",
    ),
    "deleted file": ({WORDS: None}, "cold"),
    "import fails": ({CORE: b"import nonsense\n" + FILES[CORE].encode()}, "cold"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_warm_agrees_with_cold(verifier: Verifier, name: str) -> None:
    changed, path = MUTANTS[name]
    warm, cold = verifier.run(NAME, changed, None), verifier.suite(NAME, changed)
    assert warm.path == path
    assert not warm.fault
    before = verifier.run(NAME, {}, None).results
    # A suite that cannot be loaded, or a file of it, has no tests: all of them are errors.
    now = {test: cold.results.get(test, "error") for test in before}
    assert {
        test: warm.results.get(test, before[test] if warm.complete else "error") for test in before
    } == now
    if name not in ("nothing but a comment", "unmapped function"):
        assert now != before


def test_runs_the_tests_asked_for_and_no_other(verifier: Verifier) -> None:
    report = verifier.run(NAME, BUG, [CLAMP[0], CLAMP[4]])
    assert report.results == {CLAMP[0]: "passed", CLAMP[4]: "failed"}
    assert "assert 0 == 10" in report.details[CLAMP[4]]
    missing = verifier.run(NAME, BUG, [CLAMP[0], "tests/test_core.py::test_no", "../x.py::test_y", "-x"])
    assert missing.path == "cold"
    assert missing.results.pop(CLAMP[0]) == "passed"
    assert set(missing.results.values()) == {"error"}


def test_verdicts(verifier: Verifier) -> None:
    mended, bug = verifier.judge(task(), {}), verifier.judge(task(), BUG)
    assert (mended.status, mended.reason, mended.failed_tests) == (Status.PASSED, "", ())
    assert bug.status is Status.FAILED
    assert bug.failed_tests == (CLAMP[4],)
    assert bug.reason.startswith("1 of 1 tests that must be fixed do not pass")
    again = verifier.judge(task(), dict(BUG))
    assert again.cached
    assert (again.status, again.reason, again.path) == (bug.status, bug.reason, "cached")


@pytest.mark.parametrize(
    "elsewhere",
    [edit(CORE, "value * factor", "value * 3"), edit(CORE, "LIMIT = 100", "LIMIT = 10")],
    ids=("warm", "cold"),
)
def test_breaking_another_function_fails(verifier: Verifier, elsewhere: dict[str, bytes | None]) -> None:
    verdict = verifier.judge(task(), elsewhere)
    assert verdict.status is Status.FAILED
    assert verdict.reason.startswith("1 tests that passed before do not") or "2 tests" in verdict.reason


MENDED_BUT: dict[str, dict[str, bytes | None]] = {
    "another module does not parse": {WORDS: b"def plural(word:\n"},
    "another module is gone": {WORDS: None},
    "another module raises": {WORDS: b"raise RuntimeError\n" + FILES[WORDS].encode()},
    "a neighbour has another name": edit(WORDS, "def plural(", "def plurals("),
    "what a test file imports is gone": {
        CORE: FILES[CORE].replace("class Savings(", "class Saving(").encode(),
    },
    "a test ends its file": {WORDS: b"import pytest\npytest.skip('no', allow_module_level=True)\n"},
}


@pytest.mark.parametrize("name", MENDED_BUT)
@pytest.mark.parametrize("imported", [True, False], ids=("imported", "not_imported"))
def test_tests_that_are_no_longer_there_do_not_pass(tmp_path: Path, name: str, imported: bool) -> None:
    """The task's own tests pass; those of a file that cannot be loaded, or has fewer tests, do not."""
    files = dict(FILES)
    if not imported:  # the package gets along without the module, and only a test file needs it
        init = "src/toy/__init__.py"
        files[init] = files[init].replace("from toy import words\n", "")
        files["tests/test_words.py"] = files["tests/test_words.py"].replace(
            "from toy import words", "import toy.words as words"
        )
        files["tests/test_clamp.py"] = (
            "from toy import clamp\n\n\ndef test_one():\n    assert clamp(11, 0, 10) == 10\n"
        )
    toy_package.write(tmp_path / "packages", files)
    record = (
        task()
        if imported
        else task() | {"FAIL_TO_PASS": ["tests/test_clamp.py::test_one"], "PASS_TO_PASS": []}
    )
    with Verifier(tmp_path / "packages", confinement="auto") as verifier:
        verdict = verifier.judge(record, MENDED_BUT[name])
        assert verdict.status is Status.FAILED, verdict
        assert verdict.reason
        assert verifier.judge(record, {CORE: FILES[CORE].encode() + b"NEW = 1\n"}).status is Status.PASSED


def test_what_is_so_on_the_correct_sources_too_is_excused(tmp_path: Path) -> None:
    """Ids that differ from run to run, and a test file that never loads: no patch is to blame for them."""
    odd = """\
import pytest

@pytest.mark.parametrize("value", [1], ids=[f"at {id(object())} {__import__('os').urandom(4).hex()}"])
def test_odd(value):
    assert value
"""
    toy_package.write(tmp_path / "packages", FILES | {"tests/test_odd.py": odd})
    with Verifier(tmp_path / "packages", confinement="auto") as verifier:
        for line in (b"NEW = 1\n", b"NEW = 2\n"):
            verdict = verifier.judge(task(), {CORE: FILES[CORE].encode() + line})
            assert (verdict.status, verdict.path) == (Status.PASSED, "cold"), verdict
        assert verifier.stats()["cold"]["count"] == 2 * 2 + 1  # the correct sources are run once


def test_tests_that_cannot_be_repeated_have_twins_that_leave_them_alone(tmp_path: Path) -> None:
    once = """\
import toy
SEEN = []

def test_once():
    SEEN.append(1)
    assert toy.clamp(11, 0, 10) == 10 and len(SEEN) == 1
"""
    toy_package.write(tmp_path / "packages", FILES | {"tests/test_once.py": once})
    record = task() | {"FAIL_TO_PASS": ["tests/test_once.py::test_once"], "PASS_TO_PASS": CLAMP}
    with Verifier(tmp_path / "packages", confinement="auto") as verifier:
        for n in range(4):
            comment = edit(CORE, "    return value\n\n\n@func", f"    return value  # {n}\n\n\n@func")
            assert verifier.judge(record, comment).status is Status.PASSED
        assert verifier.judge(record, {CORE: FILES[CORE].encode() + b"NEW = 1\n"}).status is Status.PASSED
        facts = verifier._pool.facts(verifier.package(NAME))
        assert "tests/test_once.py::test_once" not in facts.repeatable
        assert facts.repeatable.issuperset(CLAMP)


def test_endless_loops_end_soon(verifier: Verifier) -> None:
    started = time.monotonic()
    report = verifier.run(
        NAME, edit(CORE, "    if value < low:", "    while True: pass\n    if value < low:"), [CLAMP[4]]
    )
    assert not report.complete
    assert "processor time" in report.why
    assert not report.fault
    assert time.monotonic() - started < 15


def test_runs_leave_nothing_behind(verifier: Verifier) -> None:
    leave = """    import os, toy
    path = "/tmp/left"
    assert not os.path.exists(path) and not hasattr(toy, "left")
    open(path, "w").close(); open("/dev/shm/left", "w").close(); toy.left = True; os.environ["LEFT"] = "1"
    if value < low:"""
    for round_ in range(3):
        changed = edit(CORE, "    if value < low:", leave + f"  # {round_}")
        assert verifier.run(NAME, changed, [CLAMP[4]]).results == {CLAMP[4]: "passed"}


def test_a_killed_server_is_replaced(packages: Path) -> None:
    with Verifier(packages, confinement="auto", servers=1) as verifier:
        assert verifier.judge(task(), {}).status is Status.PASSED
        (pid,) = verifier._pool.pids()
        os.kill(pid, signal.SIGKILL)
        verdict = verifier.judge(task(), BUG)
        assert verdict.status is Status.FAILED
        assert verdict.path == "warm"
        stats = verifier.stats()
        assert (stats["server_restarts"], stats["retries"], stats["faults"]) == (1, 1, 0)


def test_a_broken_sandbox_is_invalid_and_not_kept(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Verifier(packages, confinement="auto", servers=1) as verifier:

        def full_disk(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Pristine, "write", full_disk)
            verdict = verifier.judge(task(), edit(CORE, "LIMIT = 100", "LIMIT = 99"))
        assert verdict.status is Status.INVALID
        assert "No space left" in verdict.reason
        assert verifier.stats()["faults"] == 1
        assert verifier.judge(task(), edit(CORE, "LIMIT = 100", "LIMIT = 99")).status is Status.FAILED


def test_many_threads(packages: Path) -> None:
    with Verifier(packages, confinement="auto", servers=2) as verifier:
        changes = [edit(CORE, "value * factor", f"value * factor + {n % 3}") for n in range(12)]
        with ThreadPoolExecutor(6) as pool:
            verdicts = list(pool.map(lambda changed: verifier.judge(task(), changed), changes))
        assert [v.status for v in verdicts] == [Status.PASSED, Status.FAILED, Status.FAILED] * 4
        stats = verifier.stats()
        assert stats["warm"]["count"] == 6  # each patch is judged once, in two runs, however many ask at once
        assert stats["cached"]["count"] == 9
        assert len(verifier._pool.pids()) <= 2


def test_a_suite_that_cannot_start_says_so(tmp_path: Path) -> None:
    toy_package.write(tmp_path / "packages", FILES | {"tests/conftest.py": "import nonsense\n"})
    with Verifier(tmp_path / "packages", confinement="auto") as verifier:
        report = verifier.suite(NAME)
        assert not report.complete
        assert "pytest status" in report.why
        assert verifier.judge(task(), BUG).status is Status.FAILED
        assert any(cause.startswith("no server") for cause in verifier.stats()["needs_cold"])


def test_bad_packages_are_named(packages: Path, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"nothing/package\.json: no such package; build the tasks again"):
        Pristine.load(packages, "nothing")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/package.json").write_text(json.dumps({"sources": ["src"]}))
    with pytest.raises(PackageError, match=r"not a package description \(KeyError\('import_roots'\)"):
        Pristine.load(tmp_path, NAME)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        (CORE, True),
        ("src/toy/new.py", True),
        ("src/toy/data.json", True),
        ("tests/test_core.py", False),
        ("src/toy/tests/helper.py", False),
        ("src/toy/test_new.py", False),
        ("src/toy/conftest.py", False),
        ("conftest.py", False),
        ("pytest.ini", False),
        ("setup.cfg", False),
        ("src/toy/pyproject.toml", False),
        ("src/sitecustomize.py", False),
        ("src/toy/sitecustomize.py", False),
        ("src/pytest.py", False),
        ("src/json.py", False),
        ("src/evil.pth", False),
        ("src/toy/core.cpython-311-x86_64-linux-gnu.so", False),
        ("src/toy/__pycache__/core.cpython-311.pyc", False),
        ("src/toy.egg-info/entry_points.txt", False),
        ("src/toy/../../tests/test_core.py", False),
        ("/src/toy/core.py", False),
        ("src/toy//core.py", False),
        ("", False),
    ],
)
def test_what_counts_as_a_change(packages: Path, path: str, counts: bool) -> None:
    assert Pristine.load(packages, NAME).counts(path) is counts


def test_changes_follow_no_links(packages: Path, tmp_path: Path) -> None:
    source = Pristine.load(packages, NAME)
    tree = tmp_path / "tree"
    source.write(tree, BUG)
    assert pristine.changes(source, tree) == BUG
    (tree / CORE).unlink()
    (tree / CORE).symlink_to(source.folder / CORE)
    (tree / WORDS).unlink()
    os.mkfifo(tree / WORDS)
    (tree / "src/toy/more").symlink_to("/etc")
    assert pristine.changes(source, tree) == {CORE: None, WORDS: None}
