from __future__ import annotations

import dataclasses
import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gagar_jax.config import GradingConfig
from gagar_jax.grading import ledger
from gagar_jax.grading.breaker import Breaker
from gagar_jax.grading.facts import trajectory_facts
from gagar_jax.grading.service import GradingService
from gagar_jax.grading.structural import StructuralGrader
from gagar_jax.types import (
    CandidateVerdict,
    Evidence,
    Group,
    GroupVerdict,
    Scores,
    Status,
    Trajectory,
    Ungraded,
)
from tests.grading.builders import FIXED, Diff, group_of, trajectory

P, F, I = Status.PASSED, Status.FAILED, Status.INVALID  # noqa: E741
WORSE = FIXED.replace("        return low\n", "        print(value)\n        return low\n")


class Scripted:
    """A grader that is real but for what a test makes it do to some groups."""

    name = "scripted"

    def __init__(self, script: dict[int, Callable[[Group], GroupVerdict | None]] | None = None) -> None:
        self.script = script or {}
        self.called: list[int] = []

    def grade(self, group: Group) -> GroupVerdict:
        self.called.append(group.group)
        answer = self.script.get(group.group, lambda _: None)(group)
        return answer or StructuralGrader().grade(group)


def raising(_: Group) -> GroupVerdict:
    raise RuntimeError("the endpoint is down")


def quitting(_: Group) -> GroupVerdict:
    raise SystemExit(3)


def void(_: Group) -> GroupVerdict:
    return GroupVerdict("scripted", (CandidateVerdict(0, Scores(9, 9, 9, 9, 9)),))


@pytest.fixture(scope="session")
def patches(diff: Diff) -> tuple[bytes, bytes]:
    return diff({"pkg/core.py": FIXED}), diff({"pkg/core.py": WORSE})


@pytest.fixture
def make_group(patches: tuple[bytes, bytes]) -> Callable[..., Group]:
    def make(number: int, statuses: tuple[Status, ...] = (P, P, F), same: bool = False) -> Group:
        def member(i: int, status: Status) -> Trajectory:
            return trajectory(i, patches[0 if same else i % 2], status=status, group=number)

        return group_of([member(i, status) for i, status in enumerate(statuses)])

    return make


@pytest.fixture
def service_of() -> Iterator[Callable[..., GradingService]]:
    services: list[GradingService] = []

    def make(grader, *, mode: str = "sum_preserving", clock=time.monotonic, **changes) -> GradingService:
        settings = GradingConfig(**{"deadline_s": 20.0} | changes)
        services.append(GradingService(grader, settings, mode=mode, clock=clock))
        return services[-1]

    yield make
    for service in services:
        service.close()


def redeem(service: GradingService, *groups: Group):
    group_N = np.array([g.group for g in groups for _ in g.trajectories] + [-1], np.int32)
    member_N = np.array([t.ticket.member for g in groups for t in g.trajectories] + [-1], np.int32)
    return service.redeem(group_N, member_N, np.array([g.group for g in groups] + [-1], np.int32))


def test_grades_are_redeemed_by_ticket_in_any_order(make_group, service_of):
    service = service_of(StructuralGrader())
    first, second = make_group(3), make_group(8, (F, P, P))
    service.submit(first)
    service.submit(second)
    quality_N, external_N, graded_G = service.redeem(
        np.array([8, 3, -1, 3, 8, 8, 3]), np.array([1, 0, -1, 1, 2, 0, 2]), np.array([8, -1, 3])
    )
    np.testing.assert_allclose(quality_N, [0.85, 1, 1, 0.85, 1, 1, 1])
    assert (quality_N.dtype, external_N.dtype, graded_G.dtype) == (np.float32, np.int32, np.int32)
    assert external_N.tolist() == [0] * 7
    assert graded_G.tolist() == [1, 0, 1]
    assert service.counts()["graded"] == 2


@pytest.mark.parametrize(
    ("statuses", "same", "cause"),
    [
        ((P, P, P), False, Ungraded.DROPPED),
        ((F, F), False, Ungraded.DROPPED),
        ((P, P, I), False, Ungraded.DROPPED),
        ((I, I), False, Ungraded.DROPPED),
        ((P, F, F), False, Ungraded.ONE_PASSED),
        ((P, F, I), False, Ungraded.ONE_PASSED),
        ((P, P, F), True, Ungraded.IDENTICAL),
    ],
)
def test_groups_with_nothing_to_rank_are_not_sent(make_group, service_of, statuses, same, cause: Ungraded):
    grader = Scripted()
    service = service_of(grader)
    group = make_group(0, statuses, same)
    service.submit(group)
    quality_N, _, graded_G = redeem(service, group)
    assert (quality_N.tolist(), graded_G.tolist(), grader.called) == ([1.0] * (len(statuses) + 1), [0, 0], [])
    metrics = service.metrics([0])
    assert (service.counts()[cause], metrics[f"ungraded_{cause}"]) == (1, 1.0)
    assert math.isnan(metrics["graded_share"])


def test_mode_none_grades_nothing(make_group, service_of):
    grader = Scripted()
    service = service_of(grader, mode="none")
    service.submit(make_group(0))
    assert redeem(service, make_group(0))[2].tolist() == [0, 0]
    assert (service.counts()["disabled"], grader.called) == (1, [])


@pytest.mark.parametrize(
    ("failure", "cause", "detail"),
    [
        (raising, "error", "RuntimeError: the endpoint is down"),
        (quitting, "error", "SystemExit: 3"),
        (void, "void", "passed members [1] are not judged"),
        (lambda _: "fine", "void", "the grader returned str, not a GroupVerdict"),
    ],
)
def test_a_bad_grader_costs_one_group_its_grade(make_group, service_of, failure, cause, detail, caplog):
    service = service_of(Scripted({1: failure}))
    groups = [make_group(i) for i in range(3)]
    for group in groups:
        service.submit(group)
    quality_N, _, graded_G = redeem(service, *groups)
    assert graded_G.tolist() == [1, 0, 1, 0]
    assert quality_N[3:6].tolist() == [1, 1, 1]
    assert service.counts()[cause] == 1
    record = service.record(1)
    assert (record["cause"], record["detail"], record["graded"]) == (cause, detail, False)
    assert "group 1 (pkg__1)" in caplog.text
    metrics = service.metrics([0, 1, 2])
    assert (metrics["graded_share"], metrics["tier1_share"]) == (pytest.approx(2 / 3), 0.5)


def test_a_hanging_grader_holds_up_only_its_group_and_only_until_the_deadline(make_group, service_of):
    release = threading.Event()
    service = service_of(Scripted({0: lambda _: release.wait(30) and None}), concurrency=2, deadline_s=0.5)
    groups = [make_group(i) for i in range(4)]
    for group in groups:
        service.submit(group)
    start = time.monotonic()
    quality_N, _, graded_G = redeem(service, *groups)
    waited = time.monotonic() - start
    assert 0.5 <= waited < 5
    assert graded_G.tolist() == [0, 1, 1, 1, 0]
    assert quality_N[:3].tolist() == [1, 1, 1]
    assert service.metrics(range(4))["grade_wait_s"] == pytest.approx(waited, abs=0.3)
    assert service.counts()["late"] == 1

    release.set()
    _until(lambda: service.counts()["late_arrivals"] == 1)
    record = service.record(0)
    assert (record["graded"], record["cause"]) == (False, "late")
    assert record["members"]["0"]["verdict"]["scores"]["approach"] == 5  # kept, …
    assert record["members"]["0"]["quality"] == 1.0  # … not used,
    assert redeem(service, groups[0])[2].tolist() == [0, 0]  # not even when asked again


def test_a_call_nobody_waits_for_gives_its_place_up(make_group, service_of):
    release = threading.Event()
    service = service_of(Scripted({0: lambda _: release.wait(30) and None}), concurrency=1, deadline_s=0.05)
    service.submit(make_group(0))
    redeem(service, make_group(0))
    service.submit(make_group(1))
    _until(lambda: service.counts()["graded"] == 1)
    release.set()
    _until(lambda: service.counts()["late_arrivals"] == 1)
    service.submit(make_group(2))
    _until(lambda: service.counts()["graded"] == 2)
    assert service._workers == 1


def test_a_group_still_in_the_queue_is_late_and_never_sent(make_group, service_of):
    release = threading.Event()
    grader = Scripted({0: lambda _: release.wait(30) and None})
    service = service_of(grader, concurrency=1, deadline_s=0.05)
    service.submit(make_group(0))
    service.submit(make_group(1))
    assert redeem(service, make_group(0), make_group(1))[2].tolist() == [0, 0, 0]
    release.set()
    service.submit(make_group(2))
    _until(lambda: service.counts()["graded"] == 1)
    assert (grader.called, service.counts()["late"]) == ([0, 2], 2)


def test_redeeming_never_raises(make_group, service_of, caplog):
    service = service_of(StructuralGrader())
    service.submit(make_group(0))
    quality_N, external_N, graded_G = service.redeem(
        np.zeros(3, np.int32), np.zeros(2, np.int32), np.zeros(1, np.int32)
    )
    assert (quality_N.tolist(), external_N.tolist(), graded_G.tolist()) == ([1, 1, 1], [0, 0, 0], [0])
    assert service.counts()["redeem_failures"] == 1
    assert redeem(service, make_group(77))[2].tolist() == [0, 0]
    assert service.counts()["unsubmitted"] == 1
    assert "group 77 is to be redeemed but was never submitted" in caplog.text


def test_an_external_member_is_marked_and_not_ranked(make_group, service_of):
    def copied(group: Group) -> GroupVerdict:
        verdict = StructuralGrader().grade(group)
        proof = (Evidence("step", "step 2", "edit pkg/core.py 14"),)
        return GroupVerdict("scripted", verdict.candidates, {0: proof})

    service = service_of(Scripted({0: copied}))
    service.submit(make_group(0))
    quality_N, external_N, graded_G = redeem(service, make_group(0))
    assert external_N.tolist() == [1, 0, 0, 0]
    np.testing.assert_allclose(quality_N, [1, 0.85, 1, 1])
    assert graded_G.tolist() == [1, 0]


def test_forgetting_and_submitting_again(make_group, service_of):
    grader = Scripted()
    service = service_of(grader)
    service.submit(make_group(0))
    before = redeem(service, make_group(0))
    service.forget([0, 5])
    assert service.record(0) is None
    assert redeem(service, make_group(0))[2].tolist() == [0, 0]
    service.submit(make_group(0))
    for a, b in zip(before, redeem(service, make_group(0)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert grader.called == [0, 0]


def test_results_do_not_depend_on_timing(make_group, service_of):
    groups = [make_group(i, (P, P, F, P)) for i in range(8)]

    def pause(seconds: float) -> Callable[[Group], None]:
        return lambda _: time.sleep(seconds)

    slow = {i: pause(0.002 * ((5 * i) % 8)) for i in range(8)}
    results = []
    for script, concurrency in (({}, 1), (slow, 4)):
        service = service_of(Scripted(script), concurrency=concurrency)
        for group in groups:
            service.submit(group)
        results.append(redeem(service, *groups))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    assert results[0][2].tolist() == [1] * 8 + [0]


def test_the_record_is_json_and_complete(make_group, service_of, patches):
    service = service_of(StructuralGrader())
    broken = trajectory(3, b"nonsense", status=F, group=4)
    group = group_of([*make_group(4).trajectories, broken])
    service.submit(group)
    redeem(service, group)
    record = json.loads(json.dumps(service.record(4), allow_nan=False))
    assert (record["instance_id"], record["graded"], record["cause"], record["grader"]) == (
        "pkg__1", True, None, "structural"
    )  # fmt: skip
    best, noisy, failed, unreadable = (record["members"][str(i)] for i in range(4))
    assert (best["tier"], best["rank"], best["quality"], best["facts"]["patch_lines"]) == (1, 0, 1.0, 2)
    assert noisy["facts"]["found"] == {
        "print": [{"kind": "file", "where": "pkg/core.py:14", "text": "print(value)"}]
    }
    assert (noisy["tier"], noisy["quality"]) == (2, 0.85)
    assert (failed["tier"], failed["verdict"], failed["facts"]["patch_lines"]) == (None, None, 2)
    assert unreadable["facts"] is None
    assert "malformed patch" in unreadable["facts_error"]
    assert best["facts_error"] is None


def test_the_record_says_what_became_of_a_group(make_group, service_of):
    """Causes with their details, what a grader calls copied, who judged, and a verdict that came too late."""
    shown = (Evidence("step", "step 1", "view pkg/core.py"),)
    gate = threading.Event()

    def copied(group: Group) -> GroupVerdict:
        return dataclasses.replace(StructuralGrader().grade(group), external={2: shown})

    def late(group: Group) -> GroupVerdict:
        gate.wait(10)
        return copied(group)

    script = {1: copied, 2: raising, 3: void, 4: late}
    service = service_of(Scripted(script), deadline_s=1.0, concurrency=4)
    groups = [make_group(n) for n in script]
    for group in groups:
        service.submit(group)
    redeem(service, *groups)
    gate.set()
    _until(lambda: service.counts()["late_arrivals"] == 1)
    good, failed, voided, tardy = (json.loads(json.dumps(service.record(n))) for n in script)
    evidence = {"2": [{"kind": "step", "where": "step 1", "text": "view pkg/core.py"}]}
    assert (good["graded"], good["grader"], good["external"]) == (True, "structural", evidence)
    assert good["grade_s"] >= 0
    assert (failed["cause"], failed["detail"]) == ("error", "RuntimeError: the endpoint is down")
    assert (voided["cause"], "are not judged" in voided["detail"]) == ("void", True)
    assert (tardy["cause"], tardy["detail"][:13]) == ("late", "arrived after")
    assert (tardy["graded"], tardy["external"], tardy["grader"]) == (False, evidence, "structural")
    assert tardy["members"]["0"]["verdict"]["scores"]["approach"] == 5
    assert (tardy["members"]["0"]["tier"], tardy["members"]["1"]["quality"]) == (None, 1.0)


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), RuntimeError("odd"), KeyError("x")])
def test_facts_that_fail_cost_one_member_its_facts(make_group, service_of, monkeypatch, caplog, error):
    def facts(trajectory: Trajectory, base_files):
        if trajectory.ticket.member == 1:
            raise error
        return trajectory_facts(trajectory, base_files)

    monkeypatch.setattr(ledger, "trajectory_facts", facts)
    service = service_of(StructuralGrader())
    service.submit(make_group(4))
    redeem(service, make_group(4))
    members = service.record(4)["members"]
    assert [members[n]["facts"] is None for n in "012"] == [False, True, False]
    assert members["1"]["facts_error"].startswith(type(error).__name__)
    assert members["1"]["tier"] == 2  # the verdict stands
    assert "no facts of group 4 member 1" in caplog.text


def test_the_breaker_opens_and_recovers(make_group, service_of, caplog):
    now = [0.0]
    grader = Scripted(dict.fromkeys(range(4), raising))
    service = service_of(
        grader, clock=lambda: now[0], breaker_window=4, breaker_threshold=0.75, breaker_cooldown_s=60.0
    )  # fmt: skip

    def step(number: int) -> str | None:
        service.submit(make_group(number))
        redeem(service, make_group(number))
        return service.record(number)["cause"]

    with caplog.at_level(logging.WARNING):
        assert [step(i) for i in range(4)] == ["error"] * 4
        assert [step(i) for i in (4, 5)] == ["circuit_open"] * 2
        now[0] = 60.0
        grader.script[6] = void
        assert step(6) == "void"  # the trial fails, so it stays open
        assert step(7) == "circuit_open"
        now[0] = 120.0
        assert [step(i) for i in (8, 9)] == [None, None]
    assert grader.called == [0, 1, 2, 3, 6, 8, 9]
    assert "100 % of the last 4 verdicts failed" in caplog.text
    assert "works again" in caplog.text
    assert service.counts()["circuit_open"] == 3


def test_a_breaker_waits_for_a_full_window_and_lets_one_trial_through():
    now = [0.0]
    breaker = Breaker(window=3, threshold=0.5, cooldown_s=10.0, clock=lambda: now[0])
    for failed in (True, True):
        assert breaker.allow()
        breaker.result(failed=failed)
    assert breaker.allow()
    breaker.result(failed=False)
    assert not breaker.allow()
    now[0] = 10.0
    assert [breaker.allow(), breaker.allow()] == [True, False]
    breaker.result(failed=False)
    assert [breaker.allow(), breaker.allow()] == [True, True]


def test_lateness_opens_the_breaker(make_group, service_of):
    release = threading.Event()
    service = service_of(
        Scripted({i: lambda _: release.wait(30) and None for i in range(2)}),
        deadline_s=0.05, breaker_window=2, breaker_threshold=1.0,
    )  # fmt: skip
    for i in range(3):
        service.submit(make_group(i))
        redeem(service, make_group(i))
    release.set()
    assert [service.record(i)["cause"] for i in range(3)] == ["late", "late", "circuit_open"]


def test_a_hanging_grader_does_not_keep_the_process(repository: Path):
    script = """
import threading, time
import numpy as np
from gagar_jax.config import GradingConfig
from gagar_jax.grading.service import GradingService
from tests.grading.builders import group_of, trajectory
from gagar_jax.types import Status

class Hanging:
    def grade(self, group):
        threading.Event().wait()

settings = GradingConfig(deadline_s=0.1)
service = GradingService(Hanging(), settings, mode="sum_preserving")
members = [trajectory(0, b"a"), trajectory(1, b"b"), trajectory(2, b"", status=Status.FAILED)]
service.submit(group_of(members))
print(service.redeem(np.zeros(1, int), np.zeros(1, int), np.zeros(1, int))[2].tolist())
"""
    assert _run(script, repository) == "[0]\n"


def test_nothing_here_imports_jax(repository: Path):
    script = (
        "import sys, gagar_jax.grading.service, gagar_jax.grading.structural; print('jax' in sys.modules)"
    )
    assert _run(script, repository) == "False\n"


def _run(script: str, folder: Path) -> str:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
