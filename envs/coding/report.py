"""What one run of tests proves: the request sent to a runner, and the checks on its reply.

A run's lines are believed only when all of this holds: each carries the token of this run and its place
in the sequence, the results follow the plan one by one, the tests of known outcome (canaries with random
names, twins with the names of tests that must be fixed) came out as they must, and the process ended
normally after its end line. What may get past this is listed in `test_runner`.
"""

from __future__ import annotations

import dataclasses
import json
import random
import secrets
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

RunPath = Literal["cold", "warm", "cached"]
_OUTPUT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class TestReport:
    """Results of one run, test id → "passed", "failed", "error" or "skipped".

    `complete` is True when the results can be believed and every test that should run did; otherwise
    `why` is a sentence. `fault` says that the machinery failed, not the code. `details` has a line on
    each test that did not pass. `uncollected` names what pytest could not load (cold only).
    """

    __test__ = False  # not a test class, whatever pytest thinks of its name

    results: dict[str, str]
    complete: bool
    why: str
    wall_ms: float
    path: RunPath
    fault: bool = False
    details: dict[str, str] = dataclasses.field(default_factory=dict)
    uncollected: tuple[str, ...] = ()


class NeedsCold(Exception):
    """The warm path cannot answer; the message is the cause."""


_PYTEST_STATUS = {
    2: ": interrupted",
    3: ": pytest failed",
    4: ": the suite could not be loaded",
    5: ": no tests",
}
_FAILING = ("assert", "raises", "approx", "unittest")  # each a way in which tests say no
_TAMPERED = "a test of known outcome was reported wrongly: the test framework was tampered with"
_RANDOM = random.SystemRandom()


class Run:
    """One request to a runner, and the checks on its reply.

    Args:
      tests: test ids; None for all (cold) or those mapped to the changed functions (warm).
      timeout_s: wall-clock limit in seconds; also the most processor time it may use.
      test_files: the suite's files, sorted. Tests elsewhere are not looked for.
      twinned: tests that get twins (see `test_runner`): those that a verdict rests on.
      repeatable: tests whose twins may call them.
    """

    def __init__(
        self,
        tests: Sequence[str] | None,
        timeout_s: float,
        test_files: Sequence[str],
        *,
        twinned: Sequence[str] = (),
        repeatable: Collection[str] = (),
    ) -> None:
        self.tests = None if tests is None else sorted(set(tests))
        self.timeout_s = timeout_s
        named = {test.partition("::")[0] for test in self.tests or ()}
        self._files = [path for path in test_files if path in named] if tests is not None else None
        self._last_file = (self._files or list(test_files))[-1]
        self._token = secrets.token_hex(16)
        kinds = ["pass", *_FAILING]
        _RANDOM.shuffle(kinds)
        # Those at the end see what the code under test has done to pytest by then.
        self._canaries = {f"test_{secrets.token_hex(4)}": kind for kind in [*kinds, *_FAILING]}
        self._file: str | None = None
        self._file_canaries: dict[str, str] = {}
        # Guessing which copy is the real one is right once in four times, or in 2**n for n tests.
        copies = 3 if len(twinned) == 1 else 1
        self._twins: dict[str, dict[str, Any]] = {
            test: {
                "kinds": _RANDOM.choices(_FAILING, k=copies),
                "place": _RANDOM.randrange(copies + 1),
                "whole": test in repeatable,
            }
            for test in twinned
        }

    def canary_file(self) -> tuple[str, bytes]:
        """A test file of known outcome for a cold run: its path, beside the suite's last, and its text.

        It is collected after the package has been imported, so it shows what that did to the way in
        which test files are loaded. Tests that have twins have namesakes in it, which fail.
        """
        last = PurePosixPath(self._last_file)
        stem = last.stem if last.name.startswith("test_") else f"test_{last.stem}"
        self._file = str(last.with_name(f"{stem}_{secrets.token_hex(4)}.py"))
        self._file_canaries = {f"test_{secrets.token_hex(4)}": kind for kind in ("pass", "assert")}
        names = [test.partition("[")[0].rpartition("::")[2] for test in self._twins]
        self._file_canaries |= {
            name: "assert" for name in names if name.startswith("test") and name.isidentifier()
        }
        expected = {"pass": 3, "assert": 4}
        tests = [
            f"def {name}():\n    value = [1, 2, 3]\n    assert len(value) == {expected[kind]}\n"
            for name, kind in self._file_canaries.items()
        ]
        return self._file, "\n\n".join(tests).encode()

    def request(self) -> dict[str, Any]:
        """The message to the runner."""
        return {
            "token": self._token,
            "tests": self.tests,
            "files": self._files,
            "canaries": self._canaries,
            "canary_file": self._file,
            "twins": self._twins,
            "wall_s": self.timeout_s,
            "cpu_s": int(self.timeout_s) + 1,
            "output_bytes": _OUTPUT_BYTES,
        }

    def report(
        self, reply: Mapping[str, Any], path: RunPath, started: float, known: Sequence[str] | None
    ) -> TestReport:
        """What the reply proves.

        Args:
          known: the suite's tests, when a module that does not compile may stand for all of them.

        Raises:
          NeedsCold: the server said so before any code under test ran.
        """
        messages, garbage = self._messages(reply["lines"])
        wall_ms = 1000 * (time.monotonic() - started)
        first = messages[0] if messages else {}
        if "cold" in first and not garbage:
            raise NeedsCold(first["cold"])
        if "broken" in first and known is not None:
            tests = self.tests if self.tests is not None else known
            details = dict.fromkeys(tests, str(first["broken"]))
            return TestReport(dict.fromkeys(tests, "error"), True, "", wall_ms, path, details=details)
        results, details, runs = self._results(messages)
        why = self._ending(reply) or (
            "something else wrote to the result channel" if garbage else self._doubt(messages, results, runs)
        )
        for test in [test for test in results if self._is_canary(test)]:
            del results[test]
            details.pop(test, None)
        uncollected: list[str] = []
        if not why and path == "cold":
            uncollected = self._add_uncollected(messages, results, details)
        return TestReport(
            results, not why, why, wall_ms, path, details=details, uncollected=tuple(uncollected)
        )

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

    def _results(
        self, messages: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, str], dict[str, str], dict[str, list[str]]]:
        """Outcomes and details by test, twins left out, and the outcomes of every copy, in order."""
        results: dict[str, str] = {}
        details: dict[str, str] = {}
        runs: dict[str, list[str]] = {}
        for message in messages:
            if "test" in message:
                test = message["test"]
                copies = runs.setdefault(test, [])
                if len(copies) == self._place(test):
                    results[test] = message["outcome"]
                    if message["detail"]:
                        details[test] = message["detail"]
                copies.append(message["outcome"])
        return results, details, runs

    def _place(self, test: str) -> int:
        """Which of the test's copies is the real one, from 0."""
        place: int = self._twins[test]["place"] if test in self._twins else 0
        return place

    def _ending(self, reply: Mapping[str, Any]) -> str:
        """Why the way the process ended disqualifies the run; "" if it does not."""
        status = reply["status"]
        if reply["ended"] == "wall":
            return f"the tests took longer than {self.timeout_s:g} s"
        if reply["ended"] == "output":
            return f"the tests printed more than {_OUTPUT_BYTES >> 20} MiB"
        if reply["ended"] == "channel":
            return "the result channel was flooded"
        if status == -signal.SIGXCPU:
            return "the tests used too much processor time"
        if status == -signal.SIGKILL:
            return "the test process was killed, by itself or for using too much processor time"
        if status < 0:
            return f"the test process was ended by signal {-status}"
        return ""

    def _doubt(
        self,
        messages: Sequence[dict[str, Any]],
        results: Mapping[str, str],
        runs: Mapping[str, Sequence[str]],
    ) -> str:
        last = messages[-1] if messages else {}
        if "end" not in last:
            return "the test process ended before the tests did"
        if last["end"] not in (0, 1):
            cause = _PYTEST_STATUS.get(last["end"], "")
            return f"the test run stopped early (pytest status {last['end']}{cause})"
        plans = [message["plan"] for message in messages if "plan" in message]
        reported = [message["test"] for message in messages if "test" in message]
        copies = {test: 1 + len(twin["kinds"]) for test, twin in self._twins.items()}
        once = all(len(outcomes) == copies.get(test, 1) for test, outcomes in runs.items())
        if not once or plans != [reported]:
            return "not every test that should run was reported exactly once"
        if results and not (self._canaries_hold(results) and self._twins_hold(runs)):
            return _TAMPERED
        return ""

    def _canaries_hold(self, results: Mapping[str, str]) -> bool:
        """Whether every canary is there with the outcome it must have.

        One that could not be set up is believed only where a test could not be either: a fixture that
        fails for all makes errors of both, and gains nothing by it.
        """
        expected = self._canaries | self._file_canaries
        outcomes = {test.rpartition("::")[2]: results[test] for test in results if self._is_canary(test)}
        errors = any(outcome == "error" and not self._is_canary(test) for test, outcome in results.items())
        return outcomes.keys() == expected.keys() and all(
            outcome == ("passed" if expected[name] == "pass" else "failed") or (errors and outcome == "error")
            for name, outcome in outcomes.items()
        )

    def _twins_hold(self, runs: Mapping[str, Sequence[str]]) -> bool:
        """Whether no twin passed, and all failed where their test passed."""
        for test in self._twins.keys() & runs.keys():
            twins = list(runs[test])
            passed = twins.pop(self._place(test)) == "passed"
            if "passed" in twins or (passed and set(twins) != {"failed"}):
                return False
        return True

    def _is_canary(self, test: str) -> bool:
        return test.rpartition("::")[2] in self._canaries or test.partition("::")[0] == self._file

    def _add_uncollected(
        self, messages: Sequence[dict[str, Any]], results: dict[str, str], details: dict[str, str]
    ) -> list[str]:
        """Files that could not be collected (returned) and requested tests that are nowhere are errors."""
        uncollected = []
        for message in messages:
            if "collect_error" in message:
                name = message["collect_error"]
                uncollected.append(name)
                details[name] = message["detail"]
                if self.tests is None:
                    results[name] = "error"
        for test in self.tests or ():
            if test not in results:
                results[test] = "error"
                details[test] = details.get(test.partition("::")[0], "the test was not found")
        return uncollected
