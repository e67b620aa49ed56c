"""Confined runner processes as the host sees them: starting, asking, ending, and keeping a few alive.

What is asked and whether the answer is believed is decided in `verification`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs import sandbox
from envs.coding import pristine
from envs.coding.facts_store import FactsStore
from envs.sandbox import Limits, Sandbox

logger = logging.getLogger(__name__)

_REPLY_BYTES = 256 << 20
_GRACE_S = 10.0  # beyond the runner's own wall-clock limit
_START_S = 120.0
_START_ATTEMPTS = 2  # after that, a package's runs are cold without trying again


class RunnerDied(RuntimeError):
    """A runner process ended or stopped answering; the message says what it last wrote to stderr."""


class Runner:
    """One confined process that runs `script` and speaks JSON lines.

    Args:
      script: `test_runner.py` (answers one request) or `warm_server.py`.
      staging: the folder with `runner/` and `site/`.
      tree: the sources to test. Read-only inside: code under test that could write there would change
        test files that have not been imported yet.
    """

    def __init__(self, box: Sandbox, script: str, staging: Path, tree: Path) -> None:
        readonly = {"/runner": staging / "runner", "/site": staging / "site", sandbox.WORK: tree}
        self.tree = box.place(sandbox.WORK, tree)
        self.site = box.place("/site", readonly["/site"])
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._buffer = bytearray()
        try:
            self._process = box.popen(
                [sandbox.interpreter(), "-I", f"{box.place('/runner', readonly['/runner'])}/{script}"],
                readonly=readonly,
                env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                limits=Limits(cpu_s=None),
                stderr=self._stderr,
            )
        except BaseException:
            self._stderr.close()
            raise
        assert self._process.popen.stdin
        assert self._process.popen.stdout
        self._stdin, self._stdout = self._process.popen.stdin.fileno(), self._process.popen.stdout.fileno()
        os.set_blocking(self._stdin, False)

    @property
    def pid(self) -> int:
        """The outermost process (the sandbox's)."""
        return self._process.popen.pid

    def send(self, message: dict[str, Any], timeout_s: float = 10.0) -> None:
        """Writes one message.

        Raises:
          RunnerDied: it has ended, or does not read.
        """
        data, deadline = memoryview(json.dumps(message).encode() + b"\n"), time.monotonic() + timeout_s
        while data:
            _, ready, _ = select.select([], [self._stdin], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RunnerDied("the runner does not read its requests")
            try:
                data = data[os.write(self._stdin, data) :]
            except BrokenPipeError:
                raise self._died() from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Reads one message.

        Raises:
          RunnerDied: it ended, took longer than `timeout_s` and a grace, or wrote what is not a message.
        """
        deadline = time.monotonic() + timeout_s + _GRACE_S
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RunnerDied(f"the runner did not answer within {timeout_s + _GRACE_S:.0f} s")
            part = os.read(self._stdout, 1 << 20)
            if not part:
                raise self._died()
            self._buffer += part
            if len(self._buffer) > _REPLY_BYTES:
                raise RunnerDied("the runner's answer is too long")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            raise RunnerDied("the runner's answer is not a message") from None
        if not isinstance(message, dict):
            raise RunnerDied("the runner's answer is not a message")
        return message

    def _died(self) -> RunnerDied:
        self._process.kill()
        self._stderr.seek(0)
        lines = self._stderr.read(1 << 16).decode(errors="replace").strip().splitlines()
        return RunnerDied(
            f"the runner ended with status {self._process.popen.returncode}"
            + (f": {lines[-1]}" if lines else "")
        )

    def close(self) -> None:
        """Kills the process and everything in its sandbox."""
        self._process.kill()
        self._stderr.close()


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one run of the pristine suite in a warm server has shown."""

    tests: tuple[str, ...]
    ms: dict[str, float]
    map: dict[str, frozenset[str]]  # "path::qualified name" → tests that execute it
    passing: frozenset[str]
    repeatable: frozenset[str]  # tests that pass as often as they are run, and so can have whole twins
    raw: dict[str, Any]  # as another server of the package wants it

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Facts:
        mapped = {key: frozenset(tests) for key, tests in raw["map"].items()}
        passing = frozenset(test for test, outcome in raw["outcomes"].items() if outcome == "passed")
        return cls(tuple(raw["tests"]), raw["ms"], mapped, passing, frozenset(raw["repeatable"]), raw)


class ServerUnavailable(RuntimeError):
    """A package's warm server cannot be started; the message says why. Cold runs may still work."""


class Pool:
    """Warm servers, at most `servers` of a package busy at once and `live` of all packages alive.

    The least recently used idle server is ended when a new one would exceed `live`.
    """

    def __init__(
        self, box: Sandbox, staging: Path, *, servers: int, store: FactsStore, live: int = 12
    ) -> None:
        self._box, self._staging, self._store = box, staging, store
        self._live = max(live, servers)
        self._slots = threading.Semaphore(servers)
        self._lock = threading.Lock()
        self._idle: list[tuple[str, Runner]] = []  # least recently used first
        self._busy: set[Runner] = set()
        self._facts: dict[str, Facts] = {}
        self._failures: dict[str, list[str]] = {}
        self._starting: dict[str, threading.Lock] = {}
        self._closed = False
        self.restarts = 0
        self.starts = 0

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Waits until fewer than `servers` runs are going on; cold runs take one too."""
        with self._slots:
            yield

    def facts(self, package: pristine.Pristine) -> Facts:
        """What is known of the package, from the first server that was started for it."""
        with self._lock:
            known = self._facts.get(package.name)
        if known is not None:
            return known
        with self.slot(), self.server(package):
            return self._facts[package.name]

    @contextlib.contextmanager
    def server(self, package: pristine.Pristine) -> Iterator[Runner]:
        """A server of this package, for this thread alone. One that raised is ended, not reused.

        Raises:
          ServerUnavailable: it cannot be started.
        """
        runner = self._take(package)
        good = False
        try:
            yield runner
            good = True
        finally:
            with self._lock:
                self._busy.discard(runner)
                keep = good and not self._closed
                if keep:
                    self._idle.append((package.name, runner))
                surplus = [r for _, r in self._idle[: max(0, len(self._idle) + len(self._busy) - self._live)]]
                self._idle = [(name, r) for name, r in self._idle if r not in surplus]
            for ended in surplus if keep else [*surplus, runner]:
                ended.close()

    def discarded(self, package: str, why: str) -> None:
        """Counts a server that was ended because it no longer worked."""
        with self._lock:
            self.restarts += 1
        logger.warning("package %s: warm server ended and will be restarted: %s", package, why)

    def _take(self, package: pristine.Pristine) -> Runner:
        with self._lock:
            starting = self._starting.setdefault(package.name, threading.Lock())
        runner = self._take_idle(package.name)
        if runner is None:
            # One start at a time per package: the first builds the map, the others are handed it.
            with starting:
                runner = self._take_idle(package.name) or self._start(package)
        return runner

    def _take_idle(self, name: str) -> Runner | None:
        with self._lock:
            for index in range(len(self._idle) - 1, -1, -1):
                if self._idle[index][0] == name:
                    runner = self._idle.pop(index)[1]
                    self._busy.add(runner)
                    return runner
        return None

    def _start(self, package: pristine.Pristine) -> Runner:
        failures = self._failures.setdefault(package.name, [])
        if len(failures) >= _START_ATTEMPTS:
            raise ServerUnavailable(failures[-1])
        try:
            runner = Runner(self._box, "warm_server.py", self._staging, self._tree(package))
        except OSError as error:  # the machine's state, which may pass: not counted as an attempt
            raise ServerUnavailable(f"package {package.name}: {error}") from error
        known = self._facts.get(package.name)
        facts = known.raw if known else self._store.load(package)
        try:
            start = {"facts": facts, "start_s": _START_S}
            runner.send(settings(self._box, package, runner) | start)
            reply = runner.receive(_START_S)
        except RunnerDied as died:
            reply = {"ready": False, "why": str(died)}
        except BaseException:
            runner.close()
            raise
        if not reply["ready"]:
            runner.close()
            failures.append(f"package {package.name}: {reply['why']}")
            logger.error("package %s: its warm server did not start: %s", package.name, reply["why"])
            raise ServerUnavailable(failures[-1])
        if facts is None:
            self._store.save(package, reply["facts"])
        with self._lock:
            failures.clear()
            self.starts += 1
            self._facts.setdefault(package.name, Facts.parse(reply["facts"]))
            self._busy.add(runner)
        return runner

    def _tree(self, package: pristine.Pristine) -> Path:
        """The correct sources as a server is shown them, written once."""
        tree = self._staging / "trees" / package.name
        if not tree.exists():
            with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
                package.write(Path(folder, "tree"), {})
                Path(folder, "tree").rename(tree)
        return tree

    def pids(self) -> list[int]:
        """The live servers' outermost processes."""
        with self._lock:
            return [runner.pid for _, runner in self._idle] + [runner.pid for runner in self._busy]

    def close(self) -> None:
        """Ends every idle server; busy ones end when their run does."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, runner in idle:
            runner.close()


def settings(box: Sandbox, package: pristine.Pristine, runner: Runner) -> dict[str, Any]:
    """The first message to a runner."""
    return {
        "tree": runner.tree,
        "site": runner.site,
        "roots": [os.path.normpath(os.path.join(runner.tree, root)) for root in package.import_roots],
        "sources": package.python_sources(),
        "tests": list(package.tests),
        "deselect": list(package.deselect),
        "contained": box.kind != "none",
    }
