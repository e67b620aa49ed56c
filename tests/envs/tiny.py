"""A package of a page, made into a real source distribution and real tasks, for the tests of `envs`.

Not a test itself. `tiny_tasks` builds once a session; building it needs no network.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any

import pytest

from envs.coding import build, catalogue
from envs.coding.catalogue import Package
from gagar_jax.config import TasksConfig

SOURCE = '''"""A page of arithmetic."""


def clamp(value, low, high):
    """Return value, kept between low and high.

    >>> clamp(5, 0, 3)
    3
    """
    if value < low:
        return low
    if value > high:
        return high
    return value


def count_above(values, limit):
    total = 0
    for value in values:
        if value > limit:
            total += 1
    return total


class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item, times=1):
        for _ in range(times):
            self.items.append(item)
        size = len(self.items)
        return size

    def top(self, default=None):
        if not self.items:
            return default
        return self.items[-1]


def untested(a, b):
    if a > b:
        return a
    return b
'''

TESTS = """from tiny import Stack, clamp, count_above


def test_clamp():
    assert clamp(5, 0, 3) == 3
    assert clamp(-1, 0, 3) == 0
    assert clamp(2, 0, 3) == 2


def test_clamp_edge():
    assert clamp(0, 0, 3) == 0


def test_count_above():
    assert count_above([1, 2, 3, 4], 2) == 2


def test_push():
    assert Stack().push("a", 2) == 2


def test_top():
    stack = Stack()
    assert stack.top("none") == "none"
    stack.push(1)
    stack.push(2)
    assert stack.top() == 2
"""

FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "LICENSE": "MIT\n",
    "README.md": "not wanted in a working copy\n",
    "tiny/__init__.py": SOURCE,
    "tests/test_tiny.py": TESTS,
}


def _write_members(packed: IO[bytes], name: str, files: dict[str, str]) -> None:
    with tarfile.open(fileobj=packed, mode="w") as bundle:
        for file, text in files.items():
            member = tarfile.TarInfo(f"{name}-1.0/{file}")
            member.size = len(text.encode())
            bundle.addfile(member, io.BytesIO(text.encode()))


def make_sdist(folder: Path, name: str = "tiny", files: dict[str, str] | None = None) -> Package:
    """Writes `name-1.0.tar.gz` into the folder, and returns its catalogue entry."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0.tar.gz"
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:  # equal bytes
        _write_members(packed, name, files or FILES)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(name, "1.0", digest, "MIT", sources=("tiny",), tests=("tests",))


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A dumped `TasksConfig` for a task folder `folder`."""
    values = {"dir": folder, "max_tasks": 30, "functions": 4, "unseen_functions": 0.25} | changes
    return TasksConfig(**values).model_dump(mode="json")


def quiet(done: int, total: int, message: str) -> None:
    assert 0 <= done <= max(total, done)


def build_tasks(folder: Path, packages: list[Package], sdists: Path, **changes: Any) -> Path:
    """`build.build` with a catalogue of our own, whose archives are there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "CATALOGUE", {package.name: package for package in packages})
        work = folder.with_name(f"{folder.name}.building")
        (work / "packages").mkdir(parents=True, exist_ok=True)
        task_settings = settings(folder, **changes)
        (work / "recipe.json").write_text(json.dumps(build.recipe(task_settings)))
        sdists.rename(work / "sdists")
        return build.build(task_settings, confinement="auto", progress=quiet)


@functools.cache
def tiny_tasks() -> Path:
    """The task folder of the tiny package. Lives as long as the test process."""
    root = Path(tempfile.mkdtemp(prefix="gagar-tiny-"))
    return build_tasks(root / "tasks", [make_sdist(root / "sdists")], root / "sdists")
