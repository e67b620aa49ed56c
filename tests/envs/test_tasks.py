"""Task folders: what is written is read back, and every way a record can be wrong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.coding import tasks
from envs.coding.tasks import TaskError
from tests.envs.tiny import tiny_tasks

pytestmark = pytest.mark.confined


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_tasks(), tmp_path / "tasks"))


def rewrite(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = folder / "tasks.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    tasks.write_jsonl(records, path)


def test_round_trip(folder: Path, tmp_path: Path) -> None:
    records = tasks.load_tasks(folder)
    before = (folder / "tasks.jsonl").read_bytes()
    tasks.write_jsonl(records, folder / "tasks.jsonl")
    assert (folder / "tasks.jsonl").read_bytes() == before


@pytest.mark.parametrize("key", ["instance_id", "FAIL_TO_PASS", "split", "mutation", "base_commit"])
def test_a_missing_key_is_named_with_file_line_and_instance(folder: Path, key: str) -> None:
    name = tasks.load_tasks(folder)[1]["instance_id"]
    rewrite(folder, lambda records: records[1].pop(key))
    with pytest.raises(TaskError) as error:
        tasks.load_tasks(folder)
    assert (
        f"tasks.jsonl:2: {'no instance_id' if key == 'instance_id' else name}: key '{key}': is missing"
        in str(error.value)
    )


def test_other_bad_records_are_refused(folder: Path) -> None:
    path = folder / "tasks.jsonl"
    good = path.read_text()
    first = tasks.load_tasks(folder)[0]["instance_id"]
    for text, message in [
        ("{\n", r"tasks.jsonl:1: not JSON"),
        ("[1]\n", r"tasks.jsonl:1: a record must be an object, not list"),
        (good + good.splitlines()[0] + "\n", rf"'{first}' is already on line 1"),
        (good.replace('"split": "train"', '"split": "test"', 1), r"key 'split'"),
        (good.replace('"package": "tiny"', '"package": "gone"', 1), r"no folder packages/gone"),
        ("\n", r"holds no task"),
    ]:
        path.write_text(text)
        with pytest.raises(TaskError, match=message):
            tasks.load_tasks(folder)
    path.unlink()
    with pytest.raises(TaskError, match="gagar tasks build"):
        tasks.load_tasks(folder)


def test_package_tree_has_sources_tests_and_the_bug(folder: Path) -> None:
    tree = tasks.load_package(folder, "tiny")
    assert tree.sources == ("tiny/__init__.py",)
    assert tree.tests == ("tests/test_tiny.py",)
    assert sorted(tree.files) == ["LICENSE", "tests/test_tiny.py", "tiny/__init__.py"]
    for task in tasks.load_tasks(folder):
        assert tree.broken(task) != tree.files[task["path"]]
    (folder / "packages/tiny/tiny/__init__.py").unlink()
    with pytest.raises(TaskError, match="cannot be read"):
        tasks.load_package(folder, "tiny")
