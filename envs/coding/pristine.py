"""The correct sources of a package, and what of an agent's changes to them counts.

A package lies in `PACKAGES/<name>/`: the unpacked source distribution, with a `package.json` at its top
(`import_roots`, `sources`, `tests`, `deselect`; other keys are not read here). Judging starts from these
sources, never from the agent's tree, and takes over only files that the package's own code consists of:
everything that could influence how tests are found, run or reported keeps its pristine content.

What lives elsewhere: running the tests (`verification`, `test_runner`), making packages (`sdist`).
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from gagar_jax.types import UserError

DESCRIPTION = "package.json"
Changes = Mapping[str, bytes | None]
"""Path relative to the package's top → new content, or None for a deleted file."""


class PackageError(UserError):
    """A package's folder cannot be used; names the file and the remedy."""


class ImpossibleChange(ValueError):
    """An agent's changes describe no tree; the fault is theirs."""


_IGNORED_DIRS = {"__pycache__", ".git", ".pytest_cache"}
_TEST_DIRS = {"test", "tests", "testing"}
# Read by pytest or the interpreter wherever they lie, or loaded instead of the source beside them.
_PROTECTED_NAMES = {"conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py", "setup.cfg", "tox.ini"}
_PROTECTED_NAMES |= {
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    DESCRIPTION,
}
_PROTECTED_SUFFIXES = {".pth", ".pyc", ".pyo", ".so", ".pyd", ".egg-link"}
_RUNNER = ("test_runner.py", "warm_server.py", "code_swap.py")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(.*)$")


@dataclasses.dataclass(frozen=True)
class Pristine:
    """One package's correct sources. Paths are relative to `folder`, with forward slashes."""

    name: str
    folder: Path
    import_roots: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    deselect: tuple[str, ...]

    @classmethod
    def load(cls, packages_dir: Path, name: str) -> Pristine:
        """Reads a package's description.

        Raises:
          PackageError: there is no such package, or its description is not usable; names the file.
        """
        path = packages_dir / name / DESCRIPTION
        try:
            record = json.loads(path.read_text())
            lists = {key: tuple(map(str, record[key])) for key in ("import_roots", "sources", "tests")}
            return cls(name, path.parent, deselect=tuple(map(str, record.get("deselect", ()))), **lists)
        except FileNotFoundError:
            raise PackageError(f"{path}: no such package; build the tasks again") from None
        except (KeyError, TypeError, ValueError) as error:
            raise PackageError(
                f"{path}: not a package description ({error!r}); build the tasks again"
            ) from None

    def counts(self, path: str) -> bool:
        """Whether an agent's change to this path takes part in judging; otherwise it is restored."""
        parts = PurePosixPath(path).parts
        if (
            not parts
            or path.startswith("/")
            or ".." in parts
            or "\0" in path
            or str(PurePosixPath(path)) != path
        ):
            return False
        name = parts[-1]
        if not any(_within(path, source) for source in self.sources):
            return False
        if any(_within(path, test) for test in self.tests) or _TEST_DIRS & set(parts[:-1]):
            return False
        if _IGNORED_DIRS & set(parts) or any(part.endswith((".egg-info", ".dist-info")) for part in parts):
            return False
        if name in _PROTECTED_NAMES or PurePosixPath(name).suffix in _PROTECTED_SUFFIXES:
            return False
        return not _is_test_file(name)

    def effective(self, changed: Changes) -> dict[str, bytes | None]:
        """The changes that count, sorted by path, without those that change nothing."""
        return {
            path: content
            for path, content in sorted(changed.items())
            if self.counts(path) and content != self.content(path)
        }

    def content(self, path: str) -> bytes | None:
        """The pristine content of a file, or None where there is no such file."""
        return self._files.get(path)

    @functools.cached_property
    def _files(self) -> dict[str, bytes]:
        return read_tree(self.folder)

    def python_sources(self) -> list[str]:
        """Every Python file whose changes count."""
        return [path for path in self._files if path.endswith(".py") and self.counts(path)]

    def test_files(self) -> list[str]:
        """Every file of the suite whose name says that it holds tests, sorted.

        Raises:
          PackageError: there is none.
        """
        names = [path for path in self._files if any(_within(path, test) for test in self.tests)]
        names = [path for path in names if path in self.tests or _is_test_file(PurePosixPath(path).name)]
        if not names:
            raise PackageError(
                f"{self.folder}: no test file below {', '.join(self.tests)}; build the tasks again"
            )
        return names

    def write(self, target: Path, changed: Changes) -> None:
        """Writes the pristine tree with `changed` applied into `target`, an empty or missing folder.

        Only regular files and folders are made, readable by every user.

        Raises:
          ImpossibleChange: the changes ask for a file inside a file, a name too long, and the like.
          OSError: the machine's fault (disk full, not writable).
        """
        try:
            self._write(target, changed)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG):
                raise ImpossibleChange(f"the changed files cannot exist together: {error.strerror}") from None
            raise

    def _write(self, target: Path, changed: Changes) -> None:
        made: set[Path] = set()
        for path, content in {**self._files, **changed}.items():
            if content is None or path == DESCRIPTION:
                continue
            file = target / path
            if file.parent not in made:
                file.parent.mkdir(parents=True, exist_ok=True)
                made.add(file.parent)
            file.write_bytes(content)
        _open_to_all(target)


def _is_test_file(name: str) -> bool:
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _within(path: str, top: str) -> bool:
    return top == "." or path == top or path.startswith(top.rstrip("/") + "/")


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every regular file under `folder`: relative path → content, sorted by path.

    Symbolic links and special files are not followed and not listed: to judging, a source file that
    an agent replaced by a link is a deleted one. Compiled files and version control are left out.
    """
    found = {}
    for parent, dirs, names in os.walk(folder, followlinks=False):
        dirs[:] = sorted(name for name in dirs if name not in _IGNORED_DIRS)
        for name in names:
            file = Path(parent, name)
            if file.is_file() and not file.is_symlink():
                found[file.relative_to(folder).as_posix()] = file.read_bytes()
    return dict(sorted(found.items()))


def changes(pristine: Pristine, tree: Path) -> dict[str, bytes | None]:
    """How an agent's tree differs from the pristine one (`read_tree`'s view of both)."""
    now, before = read_tree(tree), {p: c for p, c in read_tree(pristine.folder).items() if p != DESCRIPTION}
    changed: dict[str, bytes | None] = {path: now[path] for path in now if now[path] != before.get(path)}
    return changed | {path: None for path in before if path not in now}


def digest(changed: Changes) -> str:
    """A hash of changes: equal exactly when paths and contents are."""
    total = hashlib.sha256()
    for path, content in sorted(changed.items()):
        for part in (path.encode("utf-8", "surrogateescape"), b"" if content is None else b"\1" + content):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


def copy_pytest(target: Path) -> None:
    """Copies the running pytest and what it depends on, and nothing else that is installed.

    Raises:
      OSError: the disk is full or not writable.
    """
    seen: set[str] = set()
    target.mkdir()
    waiting = ["pytest"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for requirement in distribution.requires or ():
            match = _REQUIREMENT.match(requirement)
            if match and ";" not in match[2]:  # markers name extras and platforms that are not ours
                waiting.append(match[1])
        tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.is_dir():
                shutil.copytree(source, target / top)
            elif source.suffix == ".py":
                shutil.copy2(source, target / top)
    _open_to_all(target)


def copy_runner(target: Path) -> None:
    """Copies the scripts that run inside the sandbox, side by side.

    Raises:
      OSError: the disk is full or not writable.
    """
    target.mkdir()
    for name in _RUNNER:
        shutil.copyfile(Path(__file__).with_name(name), target / name)
    _open_to_all(target)


def _open_to_all(target: Path) -> None:
    """Lets the unprivileged user of a sandbox read a tree, whatever the umask was."""
    for folder, _, files in os.walk(target):
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o644)
