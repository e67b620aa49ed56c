"""Confined commands: no network, an own view of the file system, limits, and the whole tree killed.

Three kinds, chosen by `detect`:

    bubblewrap   namespaces by `bwrap`, plus a seccomp filter (`envs.seccomp`)
    namespaces   the same view built with util-linux (`unshare`, `mount`, `pivot_root`); no seccomp
    none         a plain process with limits; its descendants are found and killed; nothing is hidden

Inside the first two: /usr and the interpreter read-only (its installed packages hidden), a writable
`WORK`, small tmpfs on /tmp and /dev/shm, an own /proc, loopback only, an empty environment, an
unprivileged uid of its own when started as root, no capabilities, no new privileges.

Not protected against: a hole in the kernel; side channels (time, load, /proc/meminfo); what the
mounted folders themselves hold; memory by several processes together (the limit is per process, so
the bound is `processes` x `memory_bytes`); with `none`, anything a process of the same user may do,
and a daemon that has also changed its environment. Linux only.

What lives elsewhere: what is run and how its result is believed (`envs.coding.verification`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal

from envs import seccomp
from gagar_jax.types import UserError

logger = logging.getLogger(__name__)

Kind = Literal["bubblewrap", "namespaces", "none"]
WORK = "/work"
"""Where the writable folder of a confined command lies, as the command sees it."""

_TMPFS_BYTES = 256 << 20
_MARKER = "GAGAR_SANDBOX_RUN"
_TOOLS = {"bubblewrap": ("bwrap", "setpriv", "prlimit"), "none": ("prlimit",)}
_TOOLS["namespaces"] = ("unshare", "mount", "umount", "pivot_root", "setpriv", "prlimit", "sh")


class ConfinementError(UserError):
    """No way to confine a command here; the message says what is missing and the remedy."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of one confined command. `cpu_s`, `memory_bytes` and `file_bytes` hold per process."""

    wall_s: float = 30.0
    cpu_s: int | None = 30
    memory_bytes: int = 2 << 30
    processes: int = 64
    file_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    """Bytes of stdout and of stderr; a command that writes more is killed and `truncated` is set."""


@dataclasses.dataclass(frozen=True)
class Completed:
    """How a confined command ended. `returncode` is negative for a signal sent from outside."""

    returncode: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    wall_s: float


# ---- the view of the file system, as a list of mounts both mechanisms render


@dataclasses.dataclass(frozen=True)
class _Mount:
    kind: Literal["ro", "rw", "tmpfs", "symlink"]
    inside: str
    source: str = ""  # host path; the link's target for symlink


def interpreter() -> str:
    """The real interpreter behind the running one (not the virtual environment's link to it)."""
    return os.path.realpath(sys.executable)


def _system_mounts() -> Iterator[_Mount]:
    yield _Mount("ro", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            yield _Mount("symlink", str(path), os.readlink(path))
        elif path.is_dir():
            yield _Mount("ro", str(path), str(path))
    if Path("/etc/ld.so.cache").exists():
        yield _Mount("ro", "/etc/ld.so.cache", "/etc/ld.so.cache")
    base = os.path.realpath(sys.base_prefix)
    if not Path(base).is_relative_to("/usr"):
        yield _Mount("ro", base, base)
    # An installed copy of a package under test would be the answer to every task on it.
    for prefix in sorted({base, "/usr", "/usr/local"}):
        for folder in sorted(Path(prefix, "lib").glob("python3*/*-packages")):
            yield _Mount("tmpfs", str(folder))


def _mounts(work: Path | None, readonly: Mapping[str, Path]) -> list[_Mount]:
    mounts = [*_system_mounts(), _Mount("tmpfs", "/tmp"), _Mount("tmpfs", "/dev/shm")]
    mounts += [_Mount("ro", inside, str(host.resolve(strict=True))) for inside, host in readonly.items()]
    if work is not None:
        mounts.append(_Mount("rw", WORK, str(work.resolve(strict=True))))
    return mounts


def _bubblewrap_argv(mounts: Sequence[_Mount], env: Mapping[str, str], cwd: str, seccomp_fd: int) -> list[str]:
    argv = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    argv += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    if os.geteuid() != 0:
        argv.append("--unshare-user")
    argv += [part for key, value in env.items() for part in ("--setenv", key, value)]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    made: set[str] = set()
    for mount in mounts:
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
    if seccomp_fd >= 0:
        argv += ["--seccomp", str(seccomp_fd)]
    return [*argv, "--chdir", cwd, "--"]


def _namespaces_script(mounts: Sequence[_Mount], root: str, cwd: str) -> str:
    """A shell script that builds the view under `root`, moves into it and runs "$@" as its child.

    The shell stays as process 1: changing the uid clears the parent-death signal, so the process
    that dies with `unshare` must be one that keeps its uid.
    """
    lines = ['set -eu; PATH="$PATH:/usr/sbin:/sbin"']
    lines += [f"mount -t tmpfs -o mode=0755,size=16m tmpfs {shlex.quote(root)}", f"cd {shlex.quote(root)}"]
    lines += ["mkdir -p proc dev old", "mount -t proc proc proc", "ip link set lo up 2>/dev/null || true"]
    for name in ("null", "zero", "full", "random", "urandom"):
        lines += [f"touch dev/{name}", f"mount --bind /dev/{name} dev/{name}"]
    lines += ["ln -s /proc/self/fd dev/fd"]
    for mount in mounts:
        inside, source = shlex.quote(mount.inside.lstrip("/")), shlex.quote(mount.source)
        if mount.kind == "symlink":
            lines.append(f"ln -s {source} {inside}")
            continue
        if mount.kind == "tmpfs":
            lines.append(f"mkdir -p {inside} 2>/dev/null; mount -t tmpfs -o mode=1777,size={_TMPFS_BYTES} t {inside}")
            continue
        if Path(mount.source).is_dir():
            lines.append(f"mkdir -p {inside}")
        else:
            lines.append(f"mkdir -p $(dirname {inside}); touch {inside}")
        lines.append(f"mount --rbind {source} {inside}")
        if mount.kind == "ro":
            lines.append(f"mount -o remount,bind,ro {inside}")
    lines += ["pivot_root . old", "umount -l /old", "rmdir /old", "mount -o remount,ro /", f"cd {shlex.quote(cwd)}"]
    return "\n".join([*lines, 'set +e; "$@"; exit $?'])


_slots = itertools.count()


def _unprivileged_uid() -> int:
    """A uid no other confined command of this process has now, so that process limits stay apart."""
    return 20_000 + (os.getpid() * 97 + next(_slots)) % 40_000


def _give(folder: Path, uid: int) -> None:
    for parent, names, files in os.walk(folder):
        for name in (*names, *files):
            os.chown(os.path.join(parent, name), uid, uid, follow_symlinks=False)
    os.chown(folder, uid, uid)


def _limit_argv(limits: Limits) -> list[str]:
    argv = ["prlimit", f"--as={limits.memory_bytes}", f"--fsize={limits.file_bytes}", "--nofile=256", "--core=0"]
    if limits.cpu_s is not None:
        argv.append(f"--cpu={limits.cpu_s}")
    return [*argv, f"--nproc={limits.processes}"]


# ---- the public face


class Sandbox:
    """Starts confined commands of one kind. Thread-safe.

    Args:
      kind: what `detect` returned.
    """

    def __init__(self, kind: Kind) -> None:
        if kind not in _TOOLS:
            raise ValueError(f"Sandbox kind must be one of {sorted(_TOOLS)}, not {kind!r}: resolve it with detect()")
        self.kind = kind
        self._root = tempfile.mkdtemp(prefix="gagar-root-")  # where `namespaces` mounts, unseen by the host
        # A process that dies with its parent dies with the *thread* that started it, so long-lived
        # ones are started from a thread that lives as long as this object.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawner")

    def close(self) -> None:
        """Ends the thread that started long-lived commands, and with it what they left running."""
        self._spawner.shutdown()
        shutil.rmtree(self._root, ignore_errors=True)

    def place(self, inside: str, host: Path) -> str:
        """The path under which a command sees `host` if it is mounted at `inside`."""
        return str(host.resolve()) if self.kind == "none" else inside

    def run(
        self,
        argv: Sequence[str],
        *,
        work: Path,
        readonly: Mapping[str, Path] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008  frozen
    ) -> Completed:
        """Runs a command to its end, and kills everything it started.

        Args:
          argv: the command; paths as seen inside (`WORK`, keys of `readonly`; see `place`).
          work: writable folder, mounted at `WORK` and the command's current folder. Run as root,
            its owner becomes the unprivileged user of this run.
          readonly: path inside → host path, mounted read-only.
          env: added to a minimal environment; nothing is inherited.
          stdin: what the command reads.
          limits: its bounds.

        Raises:
          OSError: the command could not be started (no such tool, no memory, disk full).
        """
        process = self._start(argv, work, readonly or {}, env or {}, limits, subprocess.PIPE)
        started = time.monotonic()
        try:
            out, err, why = _communicate(process.popen, stdin, limits, started)
        finally:
            process.kill()
        returncode = process.popen.wait()
        wall_s = time.monotonic() - started
        return Completed(returncode, out, err, why == "timed out", why == "truncated", wall_s)

    def popen(
        self,
        argv: Sequence[str],
        *,
        work: Path | None = None,
        readonly: Mapping[str, Path] | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
        stderr: IO[bytes] | int = subprocess.DEVNULL,
    ) -> Process:
        """Starts a long-lived command with pipes on stdin and stdout; the caller bounds its time and output."""
        start = functools.partial(self._start, argv, work, readonly or {}, env or {}, limits, stderr)
        return self._spawner.submit(start).result()

    def _start(
        self,
        argv: Sequence[str],
        work: Path | None,
        readonly: Mapping[str, Path],
        env: Mapping[str, str],
        limits: Limits,
        stderr: IO[bytes] | int,
    ) -> Process:
        token = uuid.uuid4().hex
        full_env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        full_env |= {"TZ": "UTC", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", **env, _MARKER: token}
        command = [*_limit_argv(limits), *argv]
        scratch = tempfile.mkdtemp(prefix="gagar-tmp-") if self.kind == "none" else None
        cwd: str | Path = "/"
        with contextlib.ExitStack() as stack:
            pass_fds: tuple[int, ...] = ()
            if scratch is not None:
                full_env |= {"HOME": scratch, "TMPDIR": scratch}
                cwd = work or scratch
            else:
                command = [*self._drop_argv(work), *command]
                mounts, inside = _mounts(work, readonly), WORK if work is not None else "/tmp"
            if self.kind == "bubblewrap":
                filter_fd = stack.enter_context(_seccomp_file())
                pass_fds = (filter_fd,) if filter_fd >= 0 else ()
                command = [*_bubblewrap_argv(mounts, full_env, inside, filter_fd), *command]
            elif self.kind == "namespaces":
                script = _namespaces_script(mounts, self._root, inside)
                user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
                command = [
                    *("setpriv", "--pdeathsig", "KILL", "unshare", *user, "--mount", "--pid", "--net", "--ipc"),
                    *("--uts", "--fork", "--kill-child=KILL", "--propagation", "private"),
                    *("sh", "-c", script, "sh", *command),
                ]
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=cwd,
                env=full_env,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        return Process(popen, token, scratch)

    def _drop_argv(self, work: Path | None) -> list[str]:
        drop = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        if os.geteuid() != 0:
            # bwrap has dropped every capability already, the bounding set's included.
            return [] if self.kind == "bubblewrap" else drop
        uid = _unprivileged_uid()
        if work is not None:
            _give(work, uid)
        return [*drop, "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]


@dataclasses.dataclass(frozen=True)
class Process:
    """A started confined command."""

    popen: subprocess.Popen[bytes]
    token: str  # in the environment of every descendant
    scratch: str | None  # its private TMPDIR, for kind none

    def kill(self) -> None:
        """Kills the command and every descendant, reaps it, and closes its pipes."""
        # Ending the outermost process ends the pid namespace. Without one (kind none) the group goes,
        # then whatever left the group and still carries the marker.
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent input of a command that is dead
                    pipe.close()
        if self.scratch is not None:
            _kill_marked(self.token)
            shutil.rmtree(self.scratch, ignore_errors=True)


def _kill_marked(token: str) -> None:
    marker = f"{_MARKER}={token}".encode()
    for _ in range(100):  # a fork bomb refills while it is being killed
        found = False
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if marker in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)
    logger.warning("descendants of a confined command would not die; its marker is %s", marker.decode())


@contextlib.contextmanager
def _seccomp_file() -> Iterator[int]:
    """A descriptor from which bwrap reads the filter; −1 where there is none for this architecture."""
    program = seccomp.program()
    if program is None:
        yield -1
        return
    fd = os.memfd_create("seccomp")
    try:
        os.write(fd, program)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _communicate(
    process: subprocess.Popen[bytes], stdin: bytes, limits: Limits, started: float
) -> tuple[bytes, bytes, str]:
    """Feeds stdin and reads both outputs until the command ends, takes too long or writes too much.

    The command's end counts, not its pipes': a daemon it left behind may hold them open.
    """
    assert process.stdin and process.stdout and process.stderr
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    pending = memoryview(stdin)
    why, deadline = "", started + limits.wall_s
    with selectors.DefaultSelector() as selector, _pidfd(process.pid) as ended:
        for pipe in (process.stdin, *output):
            os.set_blocking(pipe.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(ended, selectors.EVENT_READ)
        for pipe in output:
            selector.register(pipe, selectors.EVENT_READ)
        over = False
        while not over and not why:
            ready = selector.select(deadline - time.monotonic())
            if not ready or time.monotonic() > deadline:
                why = "timed out"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    pending = _feed(process.stdin, pending)
                    if not pending:
                        selector.unregister(process.stdin)
                elif key.fileobj == ended:
                    over = True
                elif not _take(key.fileobj, output[key.fileobj], limits.output_bytes):  # type: ignore[index,arg-type]
                    selector.unregister(key.fileobj)
            if any(len(buffer) > limits.output_bytes for buffer in output.values()):
                why = "truncated"
        for pipe, buffer in output.items():
            while _take(pipe, buffer, limits.output_bytes):
                pass
    cut = [bytes(buffer[: limits.output_bytes]) for buffer in output.values()]
    if any(len(buffer) > limits.output_bytes for buffer in output.values()):
        why = why or "truncated"
    return cut[0], cut[1], why


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def _feed(pipe: IO[bytes], pending: memoryview) -> memoryview:
    try:
        pending = pending[os.write(pipe.fileno(), pending) :] if pending else pending
    except BlockingIOError:
        return pending
    except BrokenPipeError:  # the command does not want the rest
        pending = pending[len(pending) :]
    if not pending:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    return pending


def _take(pipe: IO[bytes], buffer: bytearray, limit: int) -> bool:
    """Reads once without waiting; False when there is nothing (now or ever) or the limit is passed."""
    try:
        data = os.read(pipe.fileno(), 65536)
    except BlockingIOError:
        return False
    buffer += data
    return bool(data) and len(buffer) <= limit


# ---- which kind works here

_detect_lock = threading.Lock()


def detect(requested: str) -> Kind:
    """The kind of confinement to use, found by confining a trivial command for real.

    Args:
      requested: "auto" (bubblewrap, else namespaces), or one kind by name.

    Raises:
      ConfinementError: what was requested does not work here; says why and what to do.
    """
    if requested not in ("auto", *_TOOLS):
        raise ConfinementError(f"confinement {requested!r} is unknown; use auto, {', '.join(_TOOLS)}")
    failures = []
    candidates: tuple[Kind, ...] = ("bubblewrap", "namespaces") if requested == "auto" else (requested,)  # type: ignore[assignment]
    for kind in candidates:
        with _detect_lock:
            why = _probe(kind)
        if not why:
            return kind
        failures.append(f"{kind}: {why}")
    raise ConfinementError(
        f"cannot confine commands ({'; '.join(failures)}). Install bubblewrap (apt-get install bubblewrap), "
        "allow user namespaces, or accept in words that code written by a model runs unconfined: "
        "--confinement none"
    )


@functools.cache
def _probe(kind: Kind) -> str:
    """Why `kind` does not work here; "" if it does."""
    missing = [tool for tool in _TOOLS[kind] if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found on PATH"
    script = "import os; open('probe', 'w').write('x'); print(os.getuid())"
    sandbox = Sandbox(kind)
    try:
        with tempfile.TemporaryDirectory(prefix="gagar-probe-") as folder:
            done = sandbox.run([interpreter(), "-I", "-c", script], work=Path(folder), limits=Limits(wall_s=20))
    finally:
        sandbox.close()
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return f"exit status {done.returncode}: {lines[-1]}"
