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
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal

from envs import seccomp
from envs.sandbox_io import MARKER, await_end, child_pidfds, communicate, kill_marked
from envs.sandbox_view import SBIN, WORK, bubblewrap_argv, interpreter, mounts, namespaces_script
from gagar_jax.types import UserError

__all__ = ["WORK", "Completed", "ConfinementError", "Limits", "Process", "Sandbox", "detect", "interpreter"]

Kind = Literal["bubblewrap", "namespaces", "none"]
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


_UNSHARE = ("setpriv", "--pdeathsig", "KILL", "unshare")
_UNSHARE_OPTIONS: tuple[str, ...] = (
    "--mount",
    "--pid",
    "--net",
    "--ipc",
    "--uts",
    "--fork",
    "--kill-child=KILL",
)
_UNSHARE_OPTIONS += ("--propagation", "private")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
_ENVIRONMENT |= {"TZ": "UTC", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
_END_S = 10.0  # how long a killed pid namespace may take to empty

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
    argv = [
        "prlimit",
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        "--nofile=256",
        "--core=0",
    ]
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
            raise ValueError(
                f"Sandbox kind must be one of {sorted(_TOOLS)}, not {kind!r}: resolve it with detect()"
            )
        self.kind = kind
        # Where `namespaces` mounts its view, unseen by the host.
        self._root = tempfile.TemporaryDirectory(prefix="gagar-root-") if kind == "namespaces" else None
        # A process that dies with its parent dies with the *thread* that started it, so long-lived
        # ones are started from a thread that lives as long as this object.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawner")

    def close(self) -> None:
        """Ends the thread that started long-lived commands, and with it what they left running."""
        self._spawner.shutdown()
        if self._root is not None:
            self._root.cleanup()

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
        limits: Limits = Limits(),
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
            out, err, why = communicate(process.popen, stdin, limits.output_bytes, started + limits.wall_s)
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
        limits: Limits = Limits(),
        stderr: IO[bytes] | int = subprocess.DEVNULL,
    ) -> Process:
        """Starts a long-lived command with pipes on stdin and stdout; the caller bounds it."""
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
        scratch = tempfile.mkdtemp(prefix="gagar-tmp-") if self.kind == "none" else None
        full_env = {**_ENVIRONMENT, **env, MARKER: token}
        if scratch is not None:
            full_env |= {"HOME": scratch, "TMPDIR": scratch}
        with contextlib.ExitStack() as stack:
            command, pass_fds, info = self._confine(
                [*_limit_argv(limits), *argv], work, readonly, full_env, stack
            )
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=(work or scratch) if scratch is not None else "/",
                env=full_env,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        return Process(popen, token, scratch, _first_process(info))

    def _confine(
        self,
        command: list[str],
        work: Path | None,
        readonly: Mapping[str, Path],
        env: Mapping[str, str],
        stack: contextlib.ExitStack,
    ) -> tuple[list[str], list[int], int]:
        """The confined form of a command; what it inherits; where bwrap names its first process, or −1.

        `stack` closes what was opened for the command once it has been started.
        """
        if self.kind == "none":
            return command, [], -1
        command = [*self._drop_argv(work), *command]
        view, inside = mounts(work, readonly), WORK if work is not None else "/tmp"
        if self._root is not None:
            user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
            script = namespaces_script(view, self._root.name, inside)
            return [*_UNSHARE, *user, *_UNSHARE_OPTIONS, "sh", "-c", script, "sh", *command], [], -1
        filter_fd = stack.enter_context(_seccomp_file())
        info, info_end = os.pipe()
        stack.callback(os.close, info_end)
        inherited = [fd for fd in (filter_fd, info_end) if fd >= 0]
        return [*bubblewrap_argv(view, env, inside, filter_fd, info_end), *command], inherited, info

    def _drop_argv(self, work: Path | None) -> list[str]:
        drop = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        if os.geteuid() != 0:
            # bwrap has dropped every capability already, the bounding set's included.
            return [] if self.kind == "bubblewrap" else drop
        uid = _unprivileged_uid()
        if work is not None:
            _give(work, uid)
        return [*drop, "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]


@dataclasses.dataclass
class Process:
    """A started confined command."""

    popen: subprocess.Popen[bytes]
    token: str  # in the environment of every descendant
    scratch: str | None  # its private TMPDIR, for kind none
    first: int  # pidfd of the pid namespace's first process, −1 where it is found when it is needed

    def kill(self) -> None:
        """Kills the command and every descendant, waits until they are gone, and closes its pipes."""
        firsts = [self.first] if self.first >= 0 else []
        if self.popen.returncode is None and self.scratch is None and not firsts:
            firsts = child_pidfds(self.popen.pid)
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
        for pidfd in firsts:
            # The first process of a pid namespace ends last, after every other has been reaped.
            await_end(pidfd, _END_S)
        if self.first >= 0:
            self.first = -1
        if self.scratch is not None:
            kill_marked(self.token)
            shutil.rmtree(self.scratch, ignore_errors=True)


def _first_process(info: int) -> int:
    """A pidfd of the process whose number bwrap writes to `info`; −1 if it failed before it had one."""
    if info < 0:
        return -1
    with open(info, "rb") as pipe, contextlib.suppress(ValueError, KeyError, ProcessLookupError):
        return os.pidfd_open(json.loads(pipe.read())["child-pid"])
    return -1


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
    # An ordinary user's PATH often lacks the folders of `pivot_root`; the script adds them.
    path = os.pathsep.join([os.environ.get("PATH", ""), *(SBIN if kind == "namespaces" else ())])
    missing = [tool for tool in _TOOLS[kind] if shutil.which(tool, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not found on PATH"
    script = "import os; open('probe', 'w').write('x'); print(os.getuid())"
    sandbox = Sandbox(kind)
    try:
        with tempfile.TemporaryDirectory(prefix="gagar-probe-") as folder:
            done = sandbox.run(
                [interpreter(), "-I", "-c", script], work=Path(folder), limits=Limits(wall_s=20)
            )
    finally:
        sandbox.close()
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return f"exit status {done.returncode}: {' '.join(lines[-2:])}"
