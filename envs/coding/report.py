"""What one run of tests proves: the request sent to a runner, and the checks on its reply.

A run's lines are believed only when all of this holds: each carries the token of this run and its place
in the sequence, each planned test is reported exactly once, the canary tests (random names, known
outcomes) came out as they must, and the process ended normally after its end line.
"""

from __future__ import annotations

import dataclasses
import json
import random
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

RunPath = Literal["cold", "warm", "cached"]
_OUTPUT_BYTES = 1 << 20


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


class NeedsCold(Exception):
    """The warm path cannot answer; the message is the cause."""


_PYTEST_STATUS = {
    2: ": interrupted",
    3: ": pytest failed",
    4: ": the suite could not be loaded",
    5: ": no tests",
}
_FAILING = ("assert", "raises", "approx", "unittest")  # each a way in which tests say no


class Run:
    """One request to a runner, and the checks on its reply.

    Args:
      tests: test ids; None for all (cold) or those mapped to the changed functions (warm).
      timeout_s: wall-clock limit in seconds; also the most processor time it may use.
      test_files: the suite's files, sorted. Tests elsewhere are not looked for.
    """

    def __init__(self, tests: Sequence[str] | None, timeout_s: float, test_files: Sequence[str]) -> None:
        self.tests = None if tests is None else sorted(set(tests))
        self.timeout_s = timeout_s
        named = {test.partition("::")[0] for test in self.tests or ()}
        self._files = [path for path in test_files if path in named] if tests is not None else None
        self._last_file = (self._files or list(test_files))[-1]
        self._token = secrets.token_hex(16)
        kinds = ["pass", *_FAILING]
        random.SystemRandom().shuffle(kinds)
        # Those at the end see what the code under test has done to pytest by then.
        self._canaries = {f"test_{secrets.token_hex(4)}": kind for kind in [*kinds, *_FAILING]}
        self._file: str | None = None
        self._file_canaries: dict[str, str] = {}

    def canary_file(self) -> tuple[str, bytes]:
        """A test file of known outcome for a cold run: its path, beside the suite's last, and its text.

        It is collected after the package has been imported, so it shows what that did to the way in
        which test files are loaded.
        """
        last = PurePosixPath(self._last_file)
        stem = last.stem if last.name.startswith("test_") else f"test_{last.stem}"
        self._file = str(last.with_name(f"{stem}_{secrets.token_hex(4)}.py"))
        self._file_canaries = {f"test_{secrets.token_hex(4)}": kind for kind in ("pass", "assert")}
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
        if status == -signal.SIGXCPU:
            return "the tests used too much processor time"
        if status == -signal.SIGKILL:
            return "the test process was killed, by itself or for using too much processor time"
        if status < 0:
            return f"the test process was ended by signal {-status}"
        return ""

    def _doubt(self, messages: Sequence[dict[str, Any]], results: Mapping[str, str], twice: bool) -> str:
        last = messages[-1] if messages else {}
        if "end" not in last:
            return "the test process ended before the tests did"
        if last["end"] not in (0, 1):
            cause = _PYTEST_STATUS.get(last["end"], "")
            return f"the test run stopped early (pytest status {last['end']}{cause})"
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
        expected = self._canaries | self._file_canaries
        outcomes = {test.rpartition("::")[2]: results[test] for test in results if self._is_canary(test)}
        return outcomes.keys() == expected.keys() and all(
            outcome in ("passed" if expected[name] == "pass" else "failed", "error")
            for name, outcome in outcomes.items()
        )

    def _is_canary(self, test: str) -> bool:
        name = test.rpartition("::")[2]
        return name in self._canaries or name in self._file_canaries

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
