"""What a confined command sees of the file system, as arguments of bwrap and as a script for `unshare`.

Both render the same list of mounts. Starting and ending commands is in `sandbox`.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

WORK = "/work"
"""Where the writable folder of a confined command lies, as the command sees it."""

SBIN = ("/usr/sbin", "/sbin")
_TMPFS_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Mount:
    kind: Literal["ro", "rw", "tmpfs", "symlink"]
    inside: str
    source: str = ""  # host path; the link's target for symlink


def interpreter() -> str:
    """The real interpreter behind the running one (not the virtual environment's link to it)."""
    return os.path.realpath(sys.executable)


def _system_mounts() -> Iterator[Mount]:
    yield Mount("ro", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            yield Mount("symlink", str(path), os.readlink(path))
        elif path.is_dir():
            yield Mount("ro", str(path), str(path))
    if Path("/etc/ld.so.cache").exists():
        yield Mount("ro", "/etc/ld.so.cache", "/etc/ld.so.cache")
    base = os.path.realpath(sys.base_prefix)
    if not Path(base).is_relative_to("/usr"):
        yield Mount("ro", base, base)
    # An installed copy of a package under test would be the answer to every task on it.
    for prefix in sorted({base, "/usr", "/usr/local"}):
        for folder in sorted(Path(prefix, "lib").glob("python3*/*-packages")):
            yield Mount("tmpfs", str(folder))


def mounts(work: Path | None, readonly: Mapping[str, Path]) -> list[Mount]:
    """The whole view: the system, scratch space, `readonly` (path inside → host path) and `work`."""
    view = [*_system_mounts(), Mount("tmpfs", "/tmp"), Mount("tmpfs", "/dev/shm")]
    view += [Mount("ro", inside, str(host.resolve(strict=True))) for inside, host in readonly.items()]
    if work is not None:
        view.append(Mount("rw", WORK, str(work.resolve(strict=True))))
    return view


def bubblewrap_argv(
    view: Sequence[Mount], env: Mapping[str, str], cwd: str, seccomp_fd: int, info_fd: int
) -> list[str]:
    """bwrap and its options, up to where the command goes.

    `seccomp_fd`: where the filter is read from, −1 for none. `info_fd`: where the first process's
    number is written.
    """
    argv = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    argv += [
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "sandbox",
        "--clearenv",
    ]
    if os.geteuid() != 0:
        argv.append("--unshare-user")
    argv += [part for key, value in env.items() for part in ("--setenv", key, value)]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    made: set[str] = set()
    for mount in view:
        # bwrap would make missing parents 0700, closed to the uid the command runs under.
        for parent in reversed(Path(mount.inside).parents):
            if str(parent) not in made and not any(parent.is_relative_to(m) for m in made if m != "/"):
                argv += ["--perms", "0755", "--dir", str(parent)] if str(parent) != "/" else []
        if mount.kind == "tmpfs":
            argv += ["--perms", "1777", "--size", str(_TMPFS_BYTES), "--tmpfs", mount.inside]
        elif mount.kind == "symlink":
            argv += ["--symlink", mount.source, mount.inside]
        else:
            argv += ["--ro-bind" if mount.kind == "ro" else "--bind", mount.source, mount.inside]
            made.add(mount.inside)
    argv += ["--info-fd", str(info_fd)]
    if seccomp_fd >= 0:
        argv += ["--seccomp", str(seccomp_fd)]
    return [*argv, "--chdir", cwd, "--"]


def namespaces_script(view: Sequence[Mount], root: str, cwd: str) -> str:
    """A shell script that builds the view under `root`, moves into it and runs "$@" as its child.

    The shell stays as process 1: changing the uid clears the parent-death signal, so the process
    that dies with `unshare` must be one that keeps its uid.
    """
    lines = [f'set -eu; PATH="$PATH:{":".join(SBIN)}"']
    lines += [f"mount -t tmpfs -o mode=0755,size=16m tmpfs {shlex.quote(root)}", f"cd {shlex.quote(root)}"]
    lines += ["mkdir -p proc dev old", "mount -t proc proc proc", "ip link set lo up 2>/dev/null || true"]
    for name in ("null", "zero", "full", "random", "urandom"):
        lines += [f"touch dev/{name}", f"mount --bind /dev/{name} dev/{name}"]
    lines += ["ln -s /proc/self/fd dev/fd"]
    for mount in view:
        inside, source = shlex.quote(mount.inside.lstrip("/")), shlex.quote(mount.source)
        if mount.kind == "symlink":
            lines.append(f"ln -s {source} {inside}")
            continue
        if mount.kind == "tmpfs":
            lines.append(
                f"mkdir -p {inside} 2>/dev/null; mount -t tmpfs -o mode=1777,size={_TMPFS_BYTES} t {inside}"
            )
            continue
        if Path(mount.source).is_dir():
            lines.append(f"mkdir -p {inside}")
        else:
            lines.append(f"mkdir -p $(dirname {inside}); touch {inside}")
        lines.append(f"mount --rbind {source} {inside}")
        if mount.kind == "ro":
            lines.append(f"mount -o remount,bind,ro {inside}")
    lines += [
        "pivot_root . old",
        "umount -l /old",
        "rmdir /old",
        "mount -o remount,bind,ro /",
        f"cd {shlex.quote(cwd)}",
    ]
    return "\n".join([*lines, 'set +e; "$@"; exit $?'])
