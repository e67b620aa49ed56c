"""Working copies: a fresh git repository with one commit a task, and byte-exact capture of what changed.

What the agent may do with a working copy is in `tools.py`. Nothing here runs code of a package, and git
runs without user, system or in-tree settings, hooks or filters, on an index and objects of our own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envs.coding.tasks import PackageTree, TaskError, load_package

MTIME = 1_600_000_000
"""Seconds. Every file of a fresh working copy carries it, so that what was written since stands out."""

_COMMIT_DATE = "2020-09-13T12:26:40+00:00"
_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = false
\tautocrlf = false
\tcheckStat = minimal
\ttrustctime = false
"""
_ATTRIBUTES = "* -text -ident -filter -working-tree-encoding !eol !diff !merge\n"
_PATCH_CACHE = 4096  # patches kept: members of a group often write the same fix


class WorkspacePathError(Exception):
    """A path leaves the working copy, goes through a link or into `.git`, or is not a plain file."""


def scratch_folder() -> str:
    """Where working copies are made: memory if there is a roomy tmpfs, else the temporary folder."""
    shm = "/dev/shm"
    with contextlib.suppress(OSError):
        room = os.statvfs(shm)
        if os.access(shm, os.W_OK) and room.f_bavail * room.f_frsize >= 2**29:
            return shm
    return tempfile.gettempdir()


@functools.cache
def _git_environment() -> dict[str, str]:
    who = {"NAME": "gagar", "EMAIL": "gagar@localhost", "DATE": _COMMIT_DATE}
    people = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    quiet = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1"}
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        **quiet,
        **people,
    }


def git(
    arguments: list[str], *, git_dir: str, work_tree: str = "/", index: str = "", stdin: bytes = b""
) -> bytes:
    """Runs git plumbing and returns its output.

    Raises:
      OSError: git is missing or failed; the message carries what it said.
    """
    command = ["git", f"--git-dir={git_dir}", f"--work-tree={work_tree}", "-c", "core.hooksPath=/dev/null"]
    command += [
        "-c",
        "core.attributesFile=/dev/null",
        "-c",
        "core.excludesFile=/dev/null",
        "-c",
        "core.quotePath=true",
    ]
    environment = _git_environment() | ({"GIT_INDEX_FILE": index} if index else {})
    done = subprocess.run(
        [*command, *arguments], env=environment, input=stdin, capture_output=True, cwd=work_tree
    )
    if done.returncode:
        raise OSError(
            f"git {' '.join(arguments[:2])} failed with {done.returncode}: "
            + done.stderr.decode(errors="replace")[:300]
        )
    return done.stdout


class Templates:
    """Repositories to copy working copies from, made once a task and kept in a scratch folder.

    Thread-safe. `close` removes everything.
    """

    def __init__(self, tasks_dir: Path):
        self.tasks_dir = Path(tasks_dir)
        self.root = tempfile.mkdtemp(prefix="gagar-work-", dir=scratch_folder())
        self._lock = threading.RLock()
        self._packages: dict[str, PackageTree] = {}
        self._templates: dict[str, Template] = {}
        self._stores: dict[str, str] = {}
        self._patches: OrderedDict[str, bytes] = OrderedDict()
        self._names = itertools.count()

    def package(self, name: str) -> PackageTree:
        """The package's pristine tree.

        Raises:
          TaskError: the task folder lacks it.
        """
        with self._lock:
            if name not in self._packages:
                self._packages[name] = load_package(self.tasks_dir, name)
            return self._packages[name]

    def get(self, task: dict[str, Any]) -> Template:
        """The template of a task; made on first use.

        Raises:
          TaskError: the tree does not give the commit that the record names.
          OSError: git or the disk failed.
        """
        with self._lock:
            template = self._templates.get(task["instance_id"])
            if template is None:
                template = Template(self, task)
                expected = task.get("base_commit") or template.commit
                if template.commit != expected:
                    raise TaskError(
                        f"{self.tasks_dir}: {task['instance_id']}: packages/{task['package']} gives commit "
                        f"{template.commit}, the record says {expected}. Build the tasks again."
                    )
                self._templates[task["instance_id"]] = template
            return template

    def folder(self, kind: str) -> str:
        """A new empty folder."""
        path = f"{self.root}/{kind}{next(self._names)}"
        os.makedirs(path)
        return path

    def store(self, package: PackageTree) -> str:
        """A git folder whose index holds the pristine package. It stays here; copies get packs of it."""
        with self._lock:
            if package.name not in self._stores:
                git_dir, tree = self.folder("store"), self.folder("tree")
                _skeleton(git_dir)
                _write_tree(tree, package.files)
                git(["add", "--force", "--all", "."], git_dir=git_dir, work_tree=tree)
                shutil.rmtree(tree)
                self._stores[package.name] = git_dir
            return self._stores[package.name]

    def pack_without(self, package: PackageTree, path: str) -> str:
        """A folder with a pack of all files but one: the fixed text of that one must not be reachable."""
        key = f"{package.name}\0{path}"
        with self._lock:
            if key not in self._stores:
                store, folder = self.store(package), self.folder("pack")
                listing = git(["ls-files", "--stage", "-z"], git_dir=store).decode().split("\0")[:-1]
                fields = [(entry.split(" ")[1], entry.split("\t", 1)[1]) for entry in listing]
                hidden = {blob for blob, name in fields if name == path}
                wanted = "".join(f"{blob}\n" for blob in sorted({blob for blob, _ in fields} - hidden))
                git(["pack-objects", "--quiet", f"{folder}/pack"], git_dir=store, stdin=wanted.encode())
                self._stores[key] = folder
            return self._stores[key]

    def patch(self, key: str, make: Callable[[], bytes]) -> bytes:
        """A patch by the hash of base and changes, made at most once while it is remembered."""
        with self._lock:
            if key in self._patches:
                self._patches.move_to_end(key)
                return self._patches[key]
        patch = make()
        with self._lock:
            self._patches[key] = patch
            while len(self._patches) > _PATCH_CACHE:
                self._patches.popitem(last=False)
        return patch

    def close(self) -> None:
        """Removes every template and every working copy that is still there."""
        shutil.rmtree(self.root, ignore_errors=True)


class Template:
    """One task's repository: a commit of the package with the bug in it, and no other object."""

    def __init__(self, templates: Templates, task: dict[str, Any]):
        self.templates = templates
        self.package = templates.package(task["package"])
        self.bug_path: str = task["path"]
        self.files = self.package.files | {self.bug_path: self.package.broken(task)}
        self.git_dir = templates.folder("git")
        _skeleton(self.git_dir)
        pack = templates.pack_without(self.package, self.bug_path)
        for name in os.listdir(pack):
            os.link(f"{pack}/{name}", f"{self.git_dir}/objects/pack/{name}")
        shutil.copyfile(f"{templates.store(self.package)}/index", f"{self.git_dir}/index")
        run = functools.partial(git, git_dir=self.git_dir)
        blob = (
            run(["hash-object", "-w", "--no-filters", "--stdin"], stdin=self.files[self.bug_path])
            .decode()
            .strip()
        )
        run(["update-index", "--cacheinfo", f"100644,{blob},{self.bug_path}"])
        tree = run(["write-tree"]).decode().strip()
        self.commit = run(["commit-tree", tree, "-m", "base"]).decode().strip()
        Path(self.git_dir, "refs/heads/main").write_text(self.commit + "\n")
        self.repository = {
            str(path.relative_to(self.git_dir)): path.read_bytes()
            for path in sorted(Path(self.git_dir).rglob("*"))
            if path.is_file()
        }

    def workspace(self) -> Workspace:
        """A fresh working copy.

        Raises:
          OSError: the disk failed.
        """
        return Workspace(self, self.templates.folder("copy"))


class Workspace:
    """One working copy on disk. Text goes in and out by path; links and `.git` are out of reach."""

    def __init__(self, template: Template, root: str):
        self.template = template
        self.root = root
        _write_tree(f"{root}/.git", template.repository)
        os.makedirs(f"{root}/.git/refs/tags", exist_ok=True)
        _write_tree(root, template.files)

    def _resolve(self, path: str) -> str:
        parts = path.split("/")
        if not path or path.startswith("/") or {"", ".", ".."} & set(parts) or "\0" in path:
            raise WorkspacePathError(f"no such path: {path}")
        if any(part.lower() == ".git" for part in parts):
            raise WorkspacePathError("paths in .git are off limits")
        for depth in range(1, len(parts) + 1):
            if os.path.islink("/".join([self.root, *parts[:depth]])):
                raise WorkspacePathError(f"{path} goes through a link")
        return "/".join([self.root, *parts])

    def read(self, path: str) -> str | None:
        """A file's text with its own line ends; None where there is no such file.

        Raises:
          WorkspacePathError: not a path of a text file in the working copy.
        """
        full = self._resolve(path)
        if not os.path.isfile(full):
            return None
        try:
            with open(full, encoding="utf-8", newline="") as file:
                return file.read()
        except UnicodeDecodeError:
            raise WorkspacePathError(f"{path} is not a text file") from None

    def write(self, path: str, text: str) -> None:
        """Replaces a file's text, byte for byte as given.

        Raises:
          WorkspacePathError: not a path of a plain file in the working copy.
          OSError: the disk failed.
        """
        full = self._resolve(path)
        if os.path.exists(full) and not os.path.isfile(full):
            raise WorkspacePathError(f"{path} is not a file")
        os.makedirs(os.path.dirname(full), exist_ok=True)
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)

    def paths(self) -> list[str]:
        """Every file outside `.git`, sorted."""
        return sorted(path for path, _ in self._walk())

    def _walk(self) -> list[tuple[str, os.stat_result]]:
        found, folders = [], [""]
        while folders:
            folder = folders.pop()
            with os.scandir(f"{self.root}/{folder}") as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if folder or entry.name != ".git":
                            folders.append(f"{folder}{entry.name}/")
                    else:
                        found.append((f"{folder}{entry.name}", entry.stat(follow_symlinks=False)))
        return found

    def changed(self) -> dict[str, bytes | None]:
        """What differs from the base commit: path -> bytes now, None for a file that is gone."""
        base, now = self.template.files, dict(self._walk())
        changed: dict[str, bytes | None] = {path: None for path in base if path not in now}
        for path, stat in now.items():
            if path in base and stat.st_mtime_ns == MTIME * 10**9 and stat.st_size == len(base[path]):
                continue
            with open(f"{self.root}/{path}", "rb") as file:
                data = file.read()
            if base.get(path) != data:
                changed[path] = data
        return dict(sorted(changed.items()))

    def patch(self, changed: Mapping[str, bytes | None]) -> bytes:
        """`git diff --binary` against the one commit, new files included; b"" when nothing changed.

        The repository in the working copy is not consulted: a private index and the template's objects are.

        Raises:
          OSError: git failed.
        """
        if not changed:
            return b""
        digest = hashlib.sha256(self.template.commit.encode())
        for path, data in sorted(changed.items()):
            digest.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
        return self.template.templates.patch(digest.hexdigest(), functools.partial(self._diff, changed))

    def _diff(self, changed: Mapping[str, bytes | None]) -> bytes:
        index = f"{self.root}.index"
        shutil.copyfile(f"{self.template.git_dir}/index", index)
        run = functools.partial(git, git_dir=self.template.git_dir, work_tree=self.root, index=index)
        try:
            if added := [path for path in changed if path not in self.template.files]:
                listed = ["--pathspec-from-file=-", "--pathspec-file-nul"]
                run(
                    ["--literal-pathspecs", "add", "--force", "--intent-to-add", *listed],
                    stdin="\0".join(added).encode(),
                )
            plain = ["--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--full-index"]
            return run(["diff", "--binary", *plain])
        finally:
            os.unlink(index)

    def close(self) -> None:
        """Removes the working copy."""
        shutil.rmtree(self.root, ignore_errors=True)


def _skeleton(git_dir: str) -> None:
    """What `git init` makes, without templates and hooks, plus attributes that outrank any in the tree."""
    for folder in ("objects/pack", "objects/info", "refs/heads", "refs/tags", "info"):
        os.makedirs(f"{git_dir}/{folder}", exist_ok=True)
    for name, text in (
        ("HEAD", "ref: refs/heads/main\n"),
        ("config", _CONFIG),
        ("info/attributes", _ATTRIBUTES),
    ):
        Path(git_dir, name).write_text(text)


def _write_tree(root: str, files: Mapping[str, bytes]) -> None:
    for folder in sorted({os.path.dirname(path) for path in files}):
        os.makedirs(f"{root}/{folder}", exist_ok=True)
    for path, data in files.items():
        descriptor = os.open(f"{root}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(descriptor, data) if len(data) < 2**20 else _write_all(descriptor, data)
            os.utime(descriptor, (MTIME, MTIME))
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
