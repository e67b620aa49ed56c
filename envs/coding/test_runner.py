"""Runs tests inside the sandbox and reports one line per test; standard library and pytest only.

As a script it is the *cold* run: it reads one request from stdin, forks a child that imports and tests
the tree as it lies on disk, and answers on stdout. `warm_server` uses the same parts to test a change
without importing anything again.

Who may be believed. The parent never imports the code under test; it relays what the child wrote to a
socket, how the child ended, and whether all its descendants are dead. The child is a process in which
that code runs, so its lines are only claims. They are believed by the host
(`envs.coding.verification`) when each carries the run's token, they follow the plan, the tests of known
outcome came out as they must, and the child ended normally after its end line.

Tests of known outcome are canaries, with names of their own, and, in a run that a verdict needs, twins: a
test that must be fixed runs several times under its own name and node id, as the same kind of item in the
same place; one of these runs is the real one, and the others call the test and then fail. The host draws
which is which, so a lie that is told by name, node id, file, or by what the test calls makes a twin pass.

Not protected against, all of it within a few lines for who has read this file:

- lies told apart from the twins: by the code object or traceback of what is run (a twin's has a frame of
  this file), by the order of the copies in the host's request, or by guessing which copy is the real one
  (one chance in four for a single test, one in 2**n for n tests);
- a test that does not pass several times in a row on the correct sources, or takes long, or is of a package
  without a warm server: its twins only fail, without calling it, and lack its class and fixtures;
- cold, pytest changed at import so that it collects or rewrites one file otherwise, by the file's path;
- lies about tests that need no fixing: they have no twins;
- the token found in memory, and every line forged in order; and results that are right by construction
  (an object equal to everything). The latter is what graders are for.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

CHANNEL_BYTES = 64 << 20  # most a child may write to its channel
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36

Emit = Callable[[dict[str, Any]], None]


class Host:
    """The host's two pipes: one JSON object a line each way. Takes stdin and stdout for itself."""

    def __init__(self) -> None:
        self._requests, self._replies = os.dup(0), os.dup(1)
        self._pending = bytearray()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the host has gone."""
        while b"\n" not in self._pending:
            part = os.read(self._requests, 1 << 20)
            if not part:
                return None
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def answer(self, message: dict[str, Any]) -> None:
        """Writes one message in full."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self._replies, data) :]


def prepare_process(settings: dict[str, Any]) -> None:
    """Makes this process fit to supervise, with the package's import roots first on the path."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans of a run become our children, so they can be found and killed; and code that runs as the
    # same user cannot read or trace us, nor open our descriptors.
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    stdlib = [path for path in sys.path if not path.endswith("-packages")]
    sys.path[:] = [*settings["roots"], *stdlib, settings["site"], os.path.dirname(os.path.abspath(__file__))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*settings["roots"], settings["site"]])  # for subprocesses
    os.chdir(settings["tree"])


def pytest_arguments(settings: dict[str, Any], files: Iterable[str]) -> list[str]:
    """The one pytest command line, the same for cold and warm, so that node ids and behaviour agree."""
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-o", "addopts="]
    # In memory: a captured file would be shared by every child forked from one server.
    arguments += ["--capture=sys", "--tb=native", "--rootdir", settings["tree"]]
    arguments += [part for test in settings["deselect"] for part in ("--deselect", test)]
    return [*arguments, *files]


class Reporter:
    """The pytest plugin of a child: chooses what runs, and emits the plan and one line per test.

    Every function it needs is held in a local name before the code under test runs.
    """

    def __init__(self, emit: Emit, select: Callable[[list[Any]], list[Any]]) -> None:
        self._emit = emit
        self._select = select
        self._phases: list[tuple[str, str, str]] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._emit({"collect_error": report.nodeid, "detail": _detail(report)})

    def pytest_runtestloop(self, session: Any) -> bool:
        run_items(session, self._select(session.items), self._emit)
        return True  # the results are on the channel; pytest's own loop must not run them again

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._phases.append((report.when, report.outcome, _detail(report)))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        phases, self._phases = self._phases, []
        outcome, detail = _outcome(phases)
        self._emit({"test": nodeid, "outcome": outcome, "detail": detail})


def _outcome(phases: list[tuple[str, str, str]]) -> tuple[str, str]:
    for when, outcome, detail in phases:
        if outcome == "failed":
            return ("failed" if when == "call" else "error"), detail
    if any(outcome == "skipped" for _, outcome, _ in phases):
        return "skipped", ""
    if [when for when, _, _ in phases] == ["setup", "call", "teardown"]:
        return "passed", ""
    return "error", "its phases did not all run"


def _detail(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr or "")
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if crash is None and lines:
        lines = lines[-1:]  # a traceback ends with what happened
    return " ".join(lines)[:300] if report.failed else ""


def run_items(session: Any, items: list[Any], emit: Emit) -> None:
    """Announces the plan, then runs the items one after the other through pytest's own protocol."""
    emit({"plan": [item.nodeid for item in items]})
    protocol = session.config.hook.pytest_runtest_protocol
    for item, following in zip(items, [*items[1:], None], strict=True):
        protocol(item=item, nextitem=following)


def with_canaries(items: list[Any], canaries: dict[str, str]) -> list[Any]:
    """Puts tests of known outcome among the real ones: name → kind. The second half runs at the end.

    Each becomes a member of a module that is being tested anyway, beside the test it follows.
    """
    import pytest

    mixed, choose = list(items), random.SystemRandom().randrange
    for position, (name, kind) in enumerate(canaries.items()):
        place = choose(len(mixed) + 1) if position <= len(canaries) // 2 else len(mixed)
        module = mixed[max(place - 1, 0)].getparent(pytest.Module)
        mixed.insert(place, pytest.Function.from_parent(module, name=name, callobj=_canary(kind)))
    return mixed


def with_twins(items: list[Any], twins: dict[str, dict[str, Any]]) -> list[Any]:
    """Puts twins beside their tests: node id → `kinds` (how each twin fails), `place`, `whole`.

    The real one is number `place` of the copies. They stand next to each other, so that no fixture which
    outlives a test is set up more often than without them.
    """
    mixed = []
    for item in items:
        asked = twins.get(item.nodeid)
        copies = [_twin(item, kind, asked["whole"]) for kind in asked["kinds"]] if asked else []
        copies.insert(asked["place"] if asked else 0, item)
        mixed += copies
    return mixed


def _twin(item: Any, kind: str, whole: bool) -> Any:
    """An item that looks like the given one and fails: after doing the same, if `whole`."""
    import pytest

    fail = _canary(kind)
    if not (whole and isinstance(item, pytest.Function)):
        hollow = pytest.Function.from_parent(item.getparent(pytest.Module), name=item.name, callobj=fail)
        hollow._nodeid = item.nodeid  # type: ignore[attr-defined]  # no public way: a method's names its class
        return hollow
    twin = copy.copy(item)
    twin.stash, twin.user_properties, twin._report_sections = pytest.Stash(), [], []
    twin.__dict__.pop("_instance", None)  # a method's twin has an object of its own
    real = twin._getobj()

    @functools.wraps(real)
    def test(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        fail()

    twin._obj = test
    twin._initrequest()
    return twin


def _canary(kind: str) -> Callable[[], None]:
    import unittest

    import pytest

    def test() -> None:
        value = [1, 2, 3]
        if kind == "raises":
            with pytest.raises(ValueError, match="never"):
                value.pop()
        elif kind == "approx":
            assert float(value[0]) == pytest.approx(value[1])
        elif kind == "unittest":
            unittest.TestCase().assertEqual(value[0], value[1])  # noqa: PT009
        else:
            assert len(value) == (3 if kind == "pass" else 4)

    return test


# ---- the parent's side of one run


def supervise(
    body: Callable[[Emit], None], request: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Forks, lets the child run `body`, and relays what it wrote and how it ended.

    Args:
      body: runs in the child; its argument writes one object to the channel.
      request: `token`, `wall_s`, `cpu_s` (None for no limit), `output_bytes`.
      settings: `contained`: whether /tmp and /dev/shm are the sandbox's own.

    Returns:
      `lines` (as written, undecodable bytes replaced), `ended` ("exit", "wall", "output", "channel"),
      `status` (of waitpid, as an exit code or minus a signal), `clean` (whether every descendant died).
    """
    ours, theirs = socket.socketpair()
    output, output_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(body, request, theirs, output_end)
    theirs.close()
    os.close(output_end)
    data, ended = bytearray(), "exit"
    try:
        ended = _relay(pid, ours, output, data, request)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        _, status = os.waitpid(pid, 0)
        clean = _kill_descendants()
        _drain(ours, data)
    finally:
        ours.close()
        os.close(output)
    wipe_scratch(settings)
    lines = data.decode("utf-8", "replace").splitlines()
    return {"lines": lines, "ended": ended, "status": os.waitstatus_to_exitcode(status), "clean": clean}


def _child(
    body: Callable[[Emit], None], request: dict[str, Any], channel: socket.socket, output: int
) -> None:
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, place in ((null, 0), (output, 1), (output, 2)):
            os.dup2(fd, place)
        kept = channel.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, 4096)
        if request["cpu_s"] is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"] + 1))
        body(_emitter(channel, request["token"]))
        status = 0
    finally:
        os._exit(status)  # nothing the code under test registered may run after the end line


def _emitter(channel: socket.socket, token: str) -> Emit:
    send, encode, count = channel.sendall, json.dumps, 0

    def emit(message: dict[str, Any]) -> None:
        nonlocal count
        send(f"{token} {count} {encode(message)}\n".encode())
        count += 1

    return emit


def _relay(pid: int, channel: socket.socket, output: int, data: bytearray, request: dict[str, Any]) -> str:
    deadline, printed = time.monotonic() + request["wall_s"], 0
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (channel.fileno(), output, ended):
        poll.register(fd, select.POLLIN)
    try:
        while True:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            fds = [fd for fd, _ in ready]
            if channel.fileno() in fds:
                part = channel.recv(65536)
                data += part
                if not part:
                    poll.unregister(channel.fileno())
            if output in fds:
                part = os.read(output, 65536)
                printed += len(part)
                if not part:
                    poll.unregister(output)
            if len(data) > CHANNEL_BYTES:
                return "channel"
            if printed > request["output_bytes"]:
                return "output"
            if fds == [ended]:  # everything that was written before it ended has been read
                return "exit"
            if time.monotonic() > deadline:
                return "wall"
    finally:
        os.close(ended)


def _drain(channel: socket.socket, data: bytearray) -> None:
    channel.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while (part := channel.recv(65536)) and len(data) <= CHANNEL_BYTES:
            data += part


def _kill_descendants() -> bool:
    """Kills what the run left behind; False when it forks faster than it dies (the host ends the sandbox)."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
    return False


def _children() -> list[int]:
    """Our children, orphans of a run included: a subreaper inherits them."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(name))
    return found


def wipe_scratch(settings: dict[str, Any]) -> None:
    """Empties every place a run could have written to, so that the next one starts fresh."""
    for folder in [os.environ["TMPDIR"], *(["/dev/shm"] if settings["contained"] else [])]:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


# ---- the cold run


def _cold(request: dict[str, Any], settings: dict[str, Any]) -> Callable[[Emit], None]:
    wanted = None if request["tests"] is None else set(request["tests"])

    def select_items(items: list[Any]) -> list[Any]:
        canaries = [item for item in items if item.nodeid.partition("::")[0] == request["canary_file"]]
        chosen = [item for item in items if wanted is None or item.nodeid in wanted or item in canaries]
        return with_canaries(with_twins(chosen, request["twins"]), request["canaries"]) if chosen else []

    def body(emit: Emit) -> None:
        import pytest

        files = settings["tests"] if request["files"] is None else request["files"]
        arguments = pytest_arguments(settings, [*files, request["canary_file"]])
        status = pytest.main(arguments, plugins=[Reporter(emit, select_items)])
        emit({"end": int(status)})

    return body


def main() -> None:
    """The cold run: settings, one request, one reply."""
    host = Host()
    settings, request = host.receive(), host.receive()
    if settings is not None and request is not None:
        prepare_process(settings)
        host.answer(supervise(_cold(request, settings), request, settings))


if __name__ == "__main__":
    main()
