"""Verdicts: do the tests pass with an agent's changes? Computed here, outside the agent's reach.

A run is *cold* (a fresh tree, imported and tested from nothing) or *warm* (a fork of a server that has
imported the package; see `warm_server`), and both return the same results, test by test. A verdict is
kept by (task, changes), so that the same patch is judged once.

What a run must show to be believed is in `report`. A run that does not show it is the fault of the code
under test and fails it, unless the sandbox itself broke: then the verdict is INVALID, after one retry.
What this does not protect against is said in `test_runner` and `envs.sandbox`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.coding.facts_store import FactsStore
from envs.coding.pristine import Changes, ImpossibleChange, Pristine, copy_pytest, copy_runner, digest
from envs.coding.report import NeedsCold, Run, RunPath, TestReport
from envs.coding.servers import Pool, Runner, RunnerDied, ServerUnavailable, settings
from envs.coding.single_flight import SingleFlight
from envs.sandbox import Sandbox, detect
from gagar_jax.types import Status

logger = logging.getLogger(__name__)

_CHANGE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on one set of changes to one task. `reason` is never empty unless PASSED."""

    status: Status
    reason: str
    failed_tests: tuple[str, ...]
    ms: float
    cached: bool
    path: RunPath


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
        copy_runner(staging / "runner")
        (staging / "trees").mkdir()
        self._work = staging / "work"
        self._work.mkdir()
        self._staging = staging
        store = FactsStore(self._packages_dir.parent / "facts")
        self._pool = Pool(self._box, staging, servers=servers, store=store)
        self._packages: dict[str, Pristine] = {}
        self._reports, self._judgements = SingleFlight(4096), SingleFlight(16384)
        self._lock = threading.Lock()
        self._ms: dict[str, list[float]] = {"cold": [], "warm": [], "cached": []}
        self._counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers and removes every temporary file. The log gets the statistics."""
        logger.info("verdicts: %s", self.stats())
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
        execute a changed function). On the cold path one that is missing does not pass, nor may a file
        fail to load; what is so on the correct sources too is excused. INVALID only where the machinery
        failed.

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
            # Most changes solve nothing, and the required tests alone show that.
            report = self._noted(lambda: self._execute(source, kept, required))
            if not report.complete or any(report.results.get(test) != "passed" for test in required):
                return _verdict(report, required, [])
            whole = self._noted(lambda: self._execute(source, kept, required, guarded=True))
            report = dataclasses.replace(whole, wall_ms=report.wall_ms + whole.wall_ms)
            broken = _broken(report, self._guards(source, task["PASS_TO_PASS"], required))
            if broken and report.complete and report.path == "cold":
                clean = self._clean(source)
                if clean.fault:
                    return _verdict(clean, required, [])
                broken = [test for test in broken if not _excused(test, report, clean)]
            return _verdict(report, required, broken)

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

    def _clean(self, source: Pristine) -> TestReport:
        """The whole suite, cold, on the correct sources; run once."""
        key = (source.name, "clean", None)
        return self._reports.get(key, lambda: self.suite(source.name), lambda r: not r.fault)[0]

    def stats(self) -> dict[str, Any]:
        """Counts and median milliseconds by path; causes of cold runs; faults, retries, server starts."""
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
        """Warm if possible, else cold.

        `guarded`: what a verdict rests on. The tests that the changes could break are added (cold: all),
        and `tests` get twins.
        """
        started = time.monotonic()
        if sum(len(content or b"") for content in kept.values()) > _CHANGE_BYTES:
            return TestReport(
                {}, False, f"the changes are larger than {_CHANGE_BYTES >> 20} MiB", 0.0, "warm"
            )
        try:
            return self._warm(source, kept, tests, guarded, started)
        except NeedsCold as cause:
            self._count(f"cold: {cause}")
        return self._cold(source, kept, None if guarded else tests, twinned=(tests or ()) if guarded else ())

    def _warm(
        self, source: Pristine, kept: Changes, tests: Sequence[str] | None, guarded: bool, started: float
    ) -> TestReport:
        texts = _texts(source, kept)
        for attempt in (1, 2):
            try:
                facts = self._pool.facts(source)
                twinned = (tests or ()) if guarded else ()
                run = Run(
                    tests,
                    self._timeout_s,
                    source.test_files(),
                    twinned=twinned,
                    repeatable=facts.repeatable,
                )
                if not facts.passing.issuperset(tests or ()):
                    raise NeedsCold("a test that does not pass warm on the correct sources")
                with self._pool.slot(), self._pool.server(source) as server:
                    started = time.monotonic()  # waiting for a server is not the run's time
                    server.send(run.request() | {"changed": texts, "guarded": guarded})
                    reply = server.receive(self._timeout_s)
                    if not reply["clean"]:
                        raise RunnerDied("a run left processes that could not be killed")
                return run.report(reply, "warm", started, facts.tests)
            except ServerUnavailable as error:
                raise NeedsCold(f"no server: {error}") from None
            except RunnerDied as died:
                self._pool.discarded(source.name, str(died))
                self._count("retry")
                logger.warning("package %s: attempt %d at a warm run broke: %s", source.name, attempt, died)
        raise NeedsCold("the warm server died twice")

    def _cold(
        self, source: Pristine, kept: Changes, tests: Sequence[str] | None, *, twinned: Sequence[str] = ()
    ) -> TestReport:
        started = time.monotonic()
        repeatable: frozenset[str] = frozenset()
        if twinned:
            with contextlib.suppress(ServerUnavailable):
                repeatable = self._pool.facts(source).repeatable
        files = _files_of(tests, source.test_files())
        run = Run(tests, self._timeout_s, files, twinned=twinned, repeatable=repeatable)
        try:
            with self._pool.slot(), tempfile.TemporaryDirectory(dir=self._work) as folder:
                started = time.monotonic()
                tree = Path(folder, "tree")
                canary_file, text = run.canary_file()
                source.write(tree, {**kept, canary_file: text})
                with contextlib.closing(Runner(self._box, "test_runner.py", self._staging, tree)) as runner:
                    runner.send(settings(self._box, source, runner))
                    runner.send(run.request())
                    reply = runner.receive(self._timeout_s)
            return run.report(reply, "cold", started, None)
        except ImpossibleChange as error:
            return TestReport({}, False, str(error), 1000 * (time.monotonic() - started), "cold")
        except (RunnerDied, OSError) as error:
            # Confinement that still works is not what ended the runner: the code under test did.
            fault = not isinstance(error, RunnerDied) or not self._confinement_works()
            why = f"the sandbox broke: {error}" if fault else f"the test run was killed: {error}"
            return TestReport({}, False, why, 1000 * (time.monotonic() - started), "cold", fault=fault)

    def _confinement_works(self) -> bool:
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            return self._box.run(["true"], work=Path(folder)).returncode == 0


def _files_of(tests: Sequence[str] | None, files: Sequence[str]) -> list[str]:
    """The test files to load for some tests; all of them where that cannot be told from the node ids."""
    wanted = {test.split("::")[0] for test in tests or ()}
    return [file for file in files if file in wanted] if wanted.issubset(files) and wanted else list(files)


def _texts(source: Pristine, kept: Changes) -> dict[str, str]:
    """Changed files as the server takes them: only known Python sources, as text."""
    texts = {}
    for path, content in kept.items():
        if content is None:
            raise NeedsCold("a deleted file")
        if not path.endswith(".py"):
            raise NeedsCold("a file that is not Python")
        if source.content(path) is None:
            raise NeedsCold("a new file")
        try:
            texts[path] = content.decode("utf-8")
        except UnicodeDecodeError:
            raise NeedsCold("not UTF-8") from None
    return texts


def _broken(report: TestReport, guards: Sequence[str]) -> list[str]:
    """What passed before and does not now, files that cannot be loaded among it.

    A warm run leaves out the tests that the changes cannot break, a cold one leaves out none.
    """
    absent = "passed" if report.path == "warm" else "error"
    broken = [test for test in guards if report.results.get(test, absent) != "passed"]
    return list(dict.fromkeys([*report.uncollected, *broken]))


def _excused(test: str, report: TestReport, clean: TestReport) -> bool:
    """Whether a cold run of the correct sources shows the same: an id that differs from run to run, say."""
    if test in report.uncollected:
        return test in clean.uncollected
    return clean.complete and clean.results.get(test) != "passed"


def _verdict(report: TestReport, required: Sequence[str], broken: Sequence[str]) -> Judgement:
    ms, path = report.wall_ms, report.path
    if report.fault:
        return Judgement(Status.INVALID, report.why, (), ms, False, path)
    if not report.complete:
        return Judgement(Status.FAILED, report.why, (), ms, False, path)
    unsolved = [test for test in required if report.results.get(test) != "passed"]
    if not unsolved and not broken:
        return Judgement(Status.PASSED, "", (), ms, False, path)
    parts = [f"{len(unsolved)} of {len(required)} tests that must be fixed do not pass"] if unsolved else []
    parts += [f"{len(broken)} tests that passed before do not"] if broken else []
    first = [*unsolved, *broken][0]
    detail = f" ({first}: {report.details[first]})" if first in report.details else f" ({first})"
    return Judgement(Status.FAILED, "; ".join(parts) + detail, (*unsolved, *broken), ms, False, path)
