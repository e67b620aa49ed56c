"""Verdicts: do the tests pass with an agent's changes? Computed here, outside the agent's reach.

A run is *cold* (a fresh tree, imported and tested from nothing) or *warm* (a fork of a server that has
imported the package; see `warm_server`), and both return the same results, test by test. A verdict is
kept by (task, changes), so that the same patch is judged once.

A run's lines are believed only when all of this holds: each carries the token of this run and its place
in the sequence, each planned test is reported exactly once, the canary tests (random names; one passes,
two fail) came out as they must, and the process ended normally after its end line. Everything else is
the fault of the code under test and fails it, unless the sandbox itself broke: then the verdict is
INVALID, after one retry. What this does not protect against is said in `test_runner` and `envs.sandbox`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import random
import secrets
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from envs.coding.pristine import Changes, ImpossibleChange, Pristine, copy_pytest, digest
from envs.coding.servers import Pool, Runner, RunnerDied, ServerUnavailable, settings
from envs.sandbox import Limits, Sandbox, detect
from gagar_jax.types import Status

logger = logging.getLogger(__name__)

RunPath = Literal["cold", "warm", "cached"]
_OUTPUT_BYTES = 1 << 20
_CPU_FLOOR_S, _CPU_RATIO = 3, 20  # a run may take this ratio of what its tests take on the correct sources
_CHANGE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class TestReport:
    """Results of one run, test id → "passed", "failed", "error" or "skipped".

    `complete` is True when the results can be believed and every test that should run did; otherwise
    `why` is a sentence. `fault` says that the machinery failed, not the code. `details` has a line on
    each test that did not pass.
    """

    __test__ = False  # not a test class, whatever pytest thinks of its name

    results: dict[str, str]
    complete: bool
    why: str
    wall_ms: float
    path: RunPath
    fault: bool = False
    details: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on one set of changes to one task. `reason` is never empty unless PASSED."""

    status: Status
    reason: str
    failed_tests: tuple[str, ...]
    ms: float
    cached: bool
    path: RunPath


class _NeedsCold(Exception):
    """The warm path cannot answer; the message is the cause."""


Result = TypeVar("Result")


class _Cache:
    """Bounded, thread-safe; of several threads that want the same key, one computes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[Any, Future[Any]] = collections.OrderedDict()

    def get(self, key: Any, compute: Callable[[], Result], keep: Callable[[Result], bool]) -> tuple[Result, bool]:
        """The result, and whether it was there already. Results that `keep` refuses are not kept."""
        with self._lock:
            future = self._entries.get(key)
            mine = future is None
            if future is None:
                future = self._entries[key] = Future()
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        if not mine:
            return future.result(), True
        try:
            result = compute()
        except BaseException as error:
            self._drop(key, future)
            future.set_exception(error)
            raise
        if not keep(result):
            self._drop(key, future)
        future.set_result(result)
        return result, False

    def _drop(self, key: Any, future: Future[Any]) -> None:
        with self._lock:
            if self._entries.get(key) is future:
                del self._entries[key]


class Verifier:
    """Runs tests of packages with changes, confined, and judges tasks. Thread-safe.

    Args:
      packages_dir: `packages_dir/<name>/` holds each package's correct sources (see `pristine`).
      confinement: "auto", "bubblewrap", "namespaces" or "none".
      servers: runs at once.
      timeout_s: wall-clock limit of one run.

    Raises:
      ConfinementError: commands cannot be confined here in the requested way.
    """

    def __init__(
        self, packages_dir: Path, *, confinement: str, servers: int = 2, timeout_s: float = 20.0
    ) -> None:
        self.kind = detect(confinement)
        self._packages_dir = Path(packages_dir)
        self._timeout_s = timeout_s
        self._box = Sandbox(self.kind)
        self._temporary = tempfile.TemporaryDirectory(prefix="gagar-verify-")
        staging = Path(self._temporary.name)
        copy_pytest(staging / "site")
        (staging / "trees").mkdir()
        (staging / "work").mkdir()
        self._site, self._work = staging / "site", staging / "work"
        self._pool = Pool(self._box, self._site, staging / "trees", servers=servers)
        self._packages: dict[str, Pristine] = {}
        self._reports, self._judgements = _Cache(4096), _Cache(16384)
        self._lock = threading.Lock()
        self._ms: dict[str, list[float]] = {"cold": [], "warm": [], "cached": []}
        self._counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers and removes every temporary file."""
        self._pool.close()
        self._box.close()
        self._temporary.cleanup()

    def package(self, name: str) -> Pristine:
        """The package's correct sources.

        Raises:
          PackageError: there is no such package, or its description is not usable.
        """
        with self._lock:
            if name not in self._packages:
                self._packages[name] = Pristine.load(self._packages_dir, name)
            return self._packages[name]

    # ---- runs

    def suite(self, package: str, changed: Changes | None = None) -> TestReport:
        """The whole suite, cold, with `changed` applied to the correct sources. Never cached."""
        source = self.package(package)
        return self._noted(lambda: self._cold(source, source.effective(changed or {}), None))

    def run(self, package: str, changed: Changes, tests: Sequence[str] | None) -> TestReport:
        """The given tests (None: those mapped to the changed functions; all, if that cannot be known)."""
        source = self.package(package)
        kept = source.effective(changed)
        key = (package, digest(kept), None if tests is None else tuple(sorted(set(tests))))
        started = time.monotonic()
        report, cached = self._reports.get(
            key, lambda: self._noted(lambda: self._execute(source, kept, tests)), lambda r: not r.fault
        )
        if cached:
            report = dataclasses.replace(report, path="cached", wall_ms=1000 * (time.monotonic() - started))
            self._note("cached", report.wall_ms)
        return report

    def mapped_tests(self, package: str, path: str, qualname: str) -> frozenset[str]:
        """The tests that execute a function of the correct sources; empty where none does.

        Args:
          path: the file, relative to the package's top.
          qualname: the function, as `"name"` or `"Class.name"`; nested functions belong to the outer one.

        Raises:
          ServerUnavailable: the package's suite cannot be loaded.
        """
        return self._pool.facts(self.package(package)).map.get(f"{path}::{qualname}", frozenset())

    # ---- verdicts

    def judge(self, task: Mapping[str, Any], changed: Changes) -> Judgement:
        """The verdict on changes (relative to the correct sources) to a task.

        PASSED: every FAIL_TO_PASS test passes, and so does every other test that passes on the correct
        sources (PASS_TO_PASS and the rest of the suite; on the warm path, of those only the tests that
        execute a changed function). INVALID only where the machinery failed.

        Args:
          task: a record with `instance_id`, `package`, `FAIL_TO_PASS` and `PASS_TO_PASS`.

        Raises:
          ValueError: the task has no FAIL_TO_PASS.
          PackageError: its package is unknown or not usable.
        """
        instance_id = task["instance_id"]
        required = tuple(task["FAIL_TO_PASS"])
        if not required:
            raise ValueError(f"task {instance_id}: FAIL_TO_PASS is empty, so nothing would be judged")
        source = self.package(task["package"])
        kept = source.effective(changed)
        started = time.monotonic()

        def compute() -> Judgement:
            report = self._noted(lambda: self._execute(source, kept, required, guarded=True))
            return _verdict(report, required, self._guards(source, task["PASS_TO_PASS"], required))

        judgement, cached = self._judgements.get(
            (instance_id, digest(kept)), compute, lambda j: j.status is not Status.INVALID
        )
        if cached:
            ms = 1000 * (time.monotonic() - started)
            self._note("cached", ms)
            return dataclasses.replace(judgement, ms=ms, cached=True, path="cached")
        if judgement.status is Status.INVALID:
            logger.error("task %s: verdict is invalid: %s", instance_id, judgement.reason)
        return judgement

    def _guards(self, source: Pristine, pass_to_pass: Sequence[str], required: Sequence[str]) -> list[str]:
        """Tests that must not fail: PASS_TO_PASS, and whatever else passes on the correct sources."""
        guards = dict.fromkeys(pass_to_pass)
        with contextlib.suppress(ServerUnavailable):  # logged and counted where it was first met
            guards |= dict.fromkeys(self._pool.facts(source).passing)
        return [test for test in guards if test not in required]

    def stats(self) -> dict[str, Any]:
        """Counts and median milliseconds by path, causes of cold runs, faults, and server starts and restarts."""
        with self._lock:
            runs = {
                path: {"count": len(ms), "median_ms": statistics.median(ms) if ms else 0.0}
                for path, ms in self._ms.items()
            }
            counts = dict(self._counts)
        causes = {key.removeprefix("cold: "): n for key, n in counts.items() if key.startswith("cold: ")}
        return {
            **runs,
            "needs_cold": causes,
            "faults": counts.get("fault", 0),
            "retries": counts.get("retry", 0),
            "server_starts": self._pool.starts,
            "server_restarts": self._pool.restarts,
        }

    def _note(self, path: str, ms: float) -> None:
        with self._lock:
            self._ms[path].append(ms)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _noted(self, compute: Callable[[], TestReport]) -> TestReport:
        report = compute()
        self._note(report.path, report.wall_ms)
        if report.fault:
            self._count("fault")
        return report

    # ---- how a run is done

    def _execute(
        self, source: Pristine, kept: Changes, tests: Sequence[str] | None, guarded: bool = False
    ) -> TestReport:
        """Warm if possible, else cold. `guarded` adds the tests that the changes could break."""
        started = time.monotonic()
        if sum(len(content or b"") for content in kept.values()) > _CHANGE_BYTES:
            return TestReport({}, False, f"the changes are larger than {_CHANGE_BYTES >> 20} MiB", 0.0, "warm")
        try:
            return self._warm(source, kept, tests, guarded, started)
        except _NeedsCold as cause:
            self._count(f"cold: {cause}")
        return self._cold(source, kept, None if guarded else tests)

    def _warm(
        self, source: Pristine, kept: Changes, tests: Sequence[str] | None, guarded: bool, started: float
    ) -> TestReport:
        texts = _texts(source, kept)
        for attempt in (1, 2):
            run = _Run(tests, self._timeout_s)
            try:
                facts = self._pool.facts(source)
                if not facts.passing.issuperset(tests or ()):
                    raise _NeedsCold("a test that does not pass warm on the correct sources")
                run.cpu_s = _cpu_budget(facts.ms, self._timeout_s)
                with self._pool.slot(), self._pool.server(source) as server:
                    server.send(run.request() | {"changed": texts, "guarded": guarded})
                    reply = server.receive(self._timeout_s)
                    if not reply["clean"]:
                        raise RunnerDied("a run left processes that could not be killed")
                return run.report(reply, "warm", started, facts.tests)
            except ServerUnavailable as error:
                raise _NeedsCold(f"no server: {error}") from None
            except RunnerDied as died:
                self._pool.discarded(source.name, str(died))
                self._count("retry")
                logger.warning("package %s: attempt %d at a warm run broke: %s", source.name, attempt, died)
        raise _NeedsCold("the warm server died twice")

    def _cold(self, source: Pristine, kept: Changes, tests: Sequence[str] | None) -> TestReport:
        started = time.monotonic()
        run = _Run(tests, self._timeout_s)
        run.cpu_s = int(self._timeout_s) + 1
        try:
            with self._pool.slot(), tempfile.TemporaryDirectory(dir=self._work) as folder:
                tree = Path(folder, "tree")
                source.write(tree, kept)
                with self._runner(tree) as runner:
                    runner.send(settings(self._box, source, runner))
                    files = None if tests is None else sorted({test.partition("::")[0] for test in tests})
                    runner.send(run.request() | {"files": files})
                    reply = runner.receive(self._timeout_s)
            return run.report(reply, "cold", started, None)
        except ImpossibleChange as error:
            return TestReport({}, False, str(error), 1000 * (time.monotonic() - started), "cold")
        except (RunnerDied, OSError) as error:
            # Confinement that still works is not what ended the runner: the code under test did.
            fault = not isinstance(error, RunnerDied) or not self._confinement_works()
            why = f"the sandbox broke: {error}" if fault else f"the test run was killed: {error}"
            return TestReport({}, False, why, 1000 * (time.monotonic() - started), "cold", fault=fault)

    @contextlib.contextmanager
    def _runner(self, tree: Path) -> Iterator[Runner]:
        memory = Limits().memory_bytes
        runner = Runner(self._box, "test_runner.py", site=self._site, tree=tree, writable=True, memory=memory)
        try:
            yield runner
        finally:
            runner.close()

    def _confinement_works(self) -> bool:
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            return self._box.run(["true"], work=Path(folder)).returncode == 0


def _texts(source: Pristine, kept: Changes) -> dict[str, str]:
    """Changed files as the server takes them: only known Python sources, as text."""
    texts = {}
    for path, content in kept.items():
        if content is None:
            raise _NeedsCold("a deleted file")
        if not path.endswith(".py"):
            raise _NeedsCold("a file that is not Python")
        if source.content(path) is None:
            raise _NeedsCold("a new file")
        try:
            texts[path] = content.decode("utf-8")
        except UnicodeDecodeError:
            raise _NeedsCold("not UTF-8") from None
    return texts


def _cpu_budget(ms: Mapping[str, float], timeout_s: float) -> int:
    """CPU seconds a warm run may use: an endless loop ends soon, whatever else the machine is doing."""
    return int(min(timeout_s, _CPU_FLOOR_S + _CPU_RATIO * sum(ms.values()) / 1000)) + 1


class _Run:
    """One request to a runner, and the checks on its reply."""

    def __init__(self, tests: Sequence[str] | None, timeout_s: float) -> None:
        self.tests = None if tests is None else sorted(set(tests))
        self.timeout_s = timeout_s
        self.cpu_s = 0
        self._token = secrets.token_hex(16)
        names = [f"test_{secrets.token_hex(4)}" for _ in range(3)]
        first = [(names[0], True), (names[1], False)]
        random.SystemRandom().shuffle(first)
        # The failing one that runs last sees what the code under test has done to pytest by then.
        self._canaries = dict([*first, (names[2], False)])

    def request(self) -> dict[str, Any]:
        """The message to the runner."""
        return {
            "token": self._token,
            "tests": self.tests,
            "canaries": self._canaries,
            "wall_s": self.timeout_s,
            "cpu_s": self.cpu_s,
            "output_bytes": _OUTPUT_BYTES,
        }

    def report(
        self, reply: Mapping[str, Any], path: RunPath, started: float, known: Sequence[str] | None
    ) -> TestReport:
        """What the reply proves.

        Args:
          known: the suite's tests, when a module that does not compile may stand for all of them.

        Raises:
          _NeedsCold: the server said so before any code under test ran.
        """
        messages, garbage = self._messages(reply["lines"])
        wall_ms = 1000 * (time.monotonic() - started)
        first = messages[0] if messages else {}
        if "cold" in first and not garbage:
            raise _NeedsCold(first["cold"])
        if "broken" in first and known is not None:
            tests = self.tests if self.tests is not None else known
            details = dict.fromkeys(tests, str(first["broken"]))
            return TestReport(dict.fromkeys(tests, "error"), True, "", wall_ms, path, details=details)
        results, details, twice = self._results(messages)
        why = self._ending(reply) or (
            "something else wrote to the result channel" if garbage else self._doubt(messages, results, twice)
        )
        for test in [test for test in results if self._is_canary(test)]:
            del results[test]
            details.pop(test, None)
        if not why and path == "cold":
            self._add_uncollected(messages, results, details)
        return TestReport(results, not why, why, wall_ms, path, details=details)

    def _messages(self, lines: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
        messages: list[dict[str, Any]] = []
        for line in lines:
            prefix = f"{self._token} {len(messages)} "
            if not line.startswith(prefix):
                return messages, True
            try:
                message = json.loads(line[len(prefix) :])
            except ValueError:
                return messages, True
            messages.append(message)
        return messages, False

    @staticmethod
    def _results(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str], bool]:
        results: dict[str, str] = {}
        details: dict[str, str] = {}
        twice = False
        for message in messages:
            if "test" in message:
                twice = twice or message["test"] in results
                results[message["test"]] = message["outcome"]
                if message["detail"]:
                    details[message["test"]] = message["detail"]
        return results, details, twice

    def _ending(self, reply: Mapping[str, Any]) -> str:
        """Why the way the process ended disqualifies the run; "" if it does not."""
        status = reply["status"]
        if reply["ended"] == "wall":
            return f"the tests took longer than {self.timeout_s:g} s"
        if reply["ended"] == "output":
            return f"the tests printed more than {_OUTPUT_BYTES >> 20} MiB"
        if reply["ended"] == "channel":
            return "the result channel was flooded"
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"the tests used more than {self.cpu_s} s of processor time, or were killed"
        if status < 0:
            return f"the test process was ended by signal {-status}"
        return ""

    def _doubt(self, messages: Sequence[dict[str, Any]], results: Mapping[str, str], twice: bool) -> str:
        last = messages[-1] if messages else {}
        if "end" not in last:
            return "the test process ended before the tests did"
        if last["end"] not in (0, 1):
            return f"the test run stopped early (pytest status {last['end']})"
        plans = [message["plan"] for message in messages if "plan" in message]
        if twice or len(plans) != 1 or sorted(plans[0]) != sorted(results):
            return "not every test that should run was reported exactly once"
        if results and not self._canaries_hold(results):
            return "a test of known outcome was reported wrongly: the test framework was tampered with"
        return ""

    def _canaries_hold(self, results: Mapping[str, str]) -> bool:
        """Whether every canary is there with the outcome it must have, or could not be set up.

        A package that cannot be imported makes errors of its canaries too; it gains nothing by it.
        """
        outcomes = {test.rpartition("::")[2]: outcome for test, outcome in results.items() if self._is_canary(test)}
        expected = {name: "passed" if passes else "failed" for name, passes in self._canaries.items()}
        return outcomes.keys() == expected.keys() and all(
            outcome in (expected[name], "error") for name, outcome in outcomes.items()
        )

    def _is_canary(self, test: str) -> bool:
        return test.rpartition("::")[2] in self._canaries

    def _add_uncollected(
        self, messages: Sequence[dict[str, Any]], results: dict[str, str], details: dict[str, str]
    ) -> None:
        """Files that could not be collected, and requested tests that are nowhere, are errors."""
        for message in messages:
            if "collect_error" in message:
                name = message["collect_error"]
                details[name] = message["detail"]
                if self.tests is None:
                    results[name] = "error"
        for test in self.tests or ():
            if test not in results:
                results[test] = "error"
                details[test] = details.get(test.partition("::")[0], "the test was not found")


def _verdict(report: TestReport, required: Sequence[str], guards: Sequence[str]) -> Judgement:
    ms, path = report.wall_ms, report.path
    if report.fault:
        return Judgement(Status.INVALID, report.why, (), ms, False, path)
    if not report.complete:
        return Judgement(Status.FAILED, report.why, (), ms, False, path)
    unsolved = [test for test in required if report.results.get(test) != "passed"]
    broken = [test for test in guards if report.results.get(test, "passed") != "passed"]
    if not unsolved and not broken:
        return Judgement(Status.PASSED, "", (), ms, False, path)
    parts = [f"{len(unsolved)} of {len(required)} tests that must be fixed do not pass"] if unsolved else []
    parts += [f"{len(broken)} tests that passed before do not"] if broken else []
    first = (unsolved + broken)[0]
    detail = f" ({first}: {report.details[first]})" if first in report.details else f" ({first})"
    return Judgement(Status.FAILED, "; ".join(parts) + detail, (*unsolved, *broken), ms, False, path)
