"""A task folder on disk: the record of a task, reading and writing `tasks.jsonl`, package trees.

    tasks.jsonl            one record a line, keys as in SWE-bench and SWE-smith
    manifest.json          the recipe, what was admitted and what was rejected, and why
    packages/<name>/       the pristine source tree (sources, tests, licence) of a package; its own
                           package.json says how to import it and run its suite

How the folder comes to be is in `build.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import pydantic

from gagar_jax.types import UserError

Split = Literal["train", "unseen_mutant", "unseen_function"]


class TaskError(UserError):
    """A task folder or a record in it cannot be used. The message names file, line, instance and key."""


class Span(pydantic.BaseModel):
    """Bytes [start, end) of the pristine file that the bug replaces."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    start: int
    end: int
    replacement: str


class Task(pydantic.BaseModel):
    """One task. `patch` is the reference fix against `base_commit`; `bug_patch` is its inverse.

    FAIL_TO_PASS: tests the bug breaks. PASS_TO_PASS: the other tests that run the mutated function and
    pass with the bug; the rest of the suite never reaches it and is judged by package, not listed here.
    line: 1-based line of the bug in the broken file.
    """

    model_config = pydantic.ConfigDict(extra="allow", strict=True)
    instance_id: str = pydantic.Field(min_length=1)
    repo: str
    version: str
    base_commit: str
    patch: str
    bug_patch: str
    problem_statement: str
    FAIL_TO_PASS: list[str] = pydantic.Field(min_length=1)
    PASS_TO_PASS: list[str]
    split: Split
    package: str
    path: str
    qualname: str
    line: int
    operator: str
    mutation: Span


def load_tasks(tasks_dir: Path) -> list[dict[str, Any]]:
    """Every record of a task folder, validated, in file order.

    Raises:
      TaskError: the file is missing or empty, a line is not JSON, a key is missing or has the wrong type,
        an id occurs twice, or a record's package tree is missing.
    """
    path = Path(tasks_dir) / "tasks.jsonl"
    if not path.is_file():
        raise TaskError(
            f"{path}: no such file. Build the tasks with `gagar tasks build`, or correct tasks.dir."
        )
    records: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                record = _parse(line, f"{path}:{number}")
                if record["instance_id"] in seen:
                    first = seen[record["instance_id"]]
                    raise TaskError(f"{path}:{number}: {record['instance_id']!r} is already on line {first}")
                if not (path.parent / "packages" / record["package"]).is_dir():
                    raise TaskError(
                        f"{path}:{number}: {record['instance_id']}: no folder packages/{record['package']}"
                    )
                seen[record["instance_id"]] = number
                records.append(record)
    if not records:
        raise TaskError(f"{path}: holds no task. Build the tasks again with `gagar tasks build`.")
    return records


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise TaskError(f"{where}: a record must be an object, not {type(record).__name__}")
    try:
        Task.model_validate(record)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        problem = "is missing" if first["type"] == "missing" else first["msg"]
        raise TaskError(
            f"{where}: {record.get('instance_id', 'no instance_id')}: key {key!r}: {problem}"
        ) from None
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):  # a few thousand names, each in many records
        record[key] = [sys.intern(test) for test in record[key]]
    return record


def write_jsonl(records: list[dict[str, Any]], path: Path) -> None:
    """Writes records one a line, keys in their order."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


@dataclasses.dataclass(frozen=True)
class PackageTree:
    """A package's pristine tree in memory.

    sources: the .py files bugs may be in. tests: its test files. files: all of the tree, path -> bytes.
    """

    name: str
    files: dict[str, bytes]
    sources: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hash of every path and byte."""
        digest = hashlib.sha256()
        for path, data in sorted(self.files.items()):
            digest.update(f"{path}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()

    def broken(self, task: dict[str, Any]) -> bytes:
        """The task's file with its bug."""
        data, span = self.files[task["path"]], task["mutation"]
        return data[: span["start"]] + span["replacement"].encode() + data[span["end"] :]


def load_package(tasks_dir: Path, name: str) -> PackageTree:
    """Reads `packages/<name>` and its description.

    Raises:
      TaskError: a part of it is missing or unreadable.
    """
    root = Path(tasks_dir) / "packages" / name
    description = root / "package.json"
    try:
        about = json.loads(description.read_text())
        files = {path: (root / path).read_bytes() for path in about["files"]}
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise TaskError(
            f"{description}: the package cannot be read: {error!r}. Build the tasks again."
        ) from error
    python = [path for path in sorted(files) if path.endswith(".py")]
    tests = [path for path in python if is_test(path)]
    roots = tuple(f"{source}/" for source in about["sources"])
    sources = [p for p in python if p not in tests and (p in about["sources"] or p.startswith(roots))]
    return PackageTree(name, files, tuple(sources), tuple(tests))


def is_test(path: str) -> bool:
    """Whether a path is part of a suite, by the naming convention of pytest."""
    *folders, name = path.split("/")
    return name.startswith("test_") or name == "conftest.py" or bool({"test", "tests"} & set(folders))


def test_name(node_id: str) -> str:
    """The bare name of a test: `tests/test_a.py::TestB::test_c[1-2]` -> `test_c`."""
    return node_id.split("[")[0].split("::")[-1]


def counts(records: list[dict[str, Any]], key: str) -> dict[str, int]:
    """How many records there are of each value of a key, sorted by value."""
    return dict(sorted(collections.Counter(record[key] for record in records).items()))
