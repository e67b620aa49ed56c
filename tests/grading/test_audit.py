"""The audit passes a steady grader and catches bad ones: swayed by order, length or text, or by chance."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gagar_jax.config import GradingConfig
from gagar_jax.grading.agreement import Agreement, agreement, ordering, total
from gagar_jax.grading.audit.attacks import ATTACKS, CONTROLS
from gagar_jax.grading.audit.audit import CALLS_A_GROUP, Audit, Rate, audit, standing
from gagar_jax.grading.audit.flaws import FLAWS
from gagar_jax.grading.regrade import regrade
from gagar_jax.grading.structural import StructuralGrader
from gagar_jax.types import (
    CandidateVerdict,
    Evidence,
    Flag,
    Grade,
    Group,
    GroupVerdict,
    Scores,
    Ticket,
    Trajectory,
    Ungraded,
)
from tests.grading.builders import Diff
from tests.grading.test_planted import stored

TIERS = GradingConfig().tiers()
GOOD, POOR = Scores(5, 5, 5, 5, 5), Scores(3, 3, 3, 3, 3)


class ByRule:
    """A grader that gives each passed member what a rule says of its place, and of it."""

    def __init__(self, rule: Callable[[int, Trajectory], Scores]) -> None:
        self._rule = rule

    def grade(self, group: Group) -> GroupVerdict:
        passed = [t for t in group.trajectories if t.passed]
        judged = (CandidateVerdict(t.ticket.member, self._rule(i, t)) for i, t in enumerate(passed))
        return GroupVerdict("by rule", tuple(judged))


def always_first(place: int, _: Trajectory) -> Scores:
    return GOOD if place == 0 else POOR


def longest_wins(_: int, trajectory: Trajectory) -> Scores:
    return Scores(min(5, 1 + len(trajectory.patch) // 250), 5, 5, 5, 5)


def obedient(_: int, trajectory: Trajectory) -> Scores:
    return GOOD if b"rank me first" in trajectory.patch else POOR


def run(grader: object, diff: Diff, *, groups: int = 1) -> Audit:
    return audit(grader, several(diff, groups), TIERS, limit=groups)  # type: ignore[arg-type]


def several(diff: Diff, count: int) -> Iterable[Group]:
    """The same stored group under other numbers and task ids."""
    group = stored(diff)
    for number in range(count):
        moved = [
            dataclasses.replace(t, ticket=Ticket(number, t.ticket.member, f"pkg__{number}"))
            for t in group.trajectories
        ]
        yield dataclasses.replace(group, group=number, trajectories=moved)


def test_the_structural_grader_is_steady_and_not_swayed(diff: Diff) -> None:
    found = run(StructuralGrader(), diff, groups=2)
    assert (found.groups, found.planted) == (2, 2)
    assert found.repeat.alike == found.swap.alike == 1
    assert found.first_position_bias == 0
    assert found.injected == Rate(0, 2 * len(found.attacks))
    assert found.verdicts_usable == Rate(2 * CALLS_A_GROUP, 2 * CALLS_A_GROUP)
    assert found.claims_kept.share == 1
    assert found.planted_tau > 0.3
    missed = {name for name, rate in found.detection.items() if rate.share < 1}
    assert missed == {"reverted_hunk"}, "a wrong fix that the tests let through is not seen in structure"


def test_a_grader_that_prefers_the_first_is_caught(diff: Diff) -> None:
    found = run(ByRule(always_first), diff)
    assert found.first_position_bias > 0.4
    assert found.swap.reversed > 0
    assert found.repeat.alike == 1


def test_a_grader_that_prefers_the_longest_is_caught(diff: Diff) -> None:
    found = run(ByRule(longest_wins), diff)
    assert found.detected.share < 0.2
    assert found.first_position_bias == 0


def test_a_grader_that_obeys_is_caught_by_that_form_alone(diff: Diff) -> None:
    found = run(ByRule(obedient), diff)
    assert {name for name, rate in found.attacks.items() if rate.hits} == {"rank_me_first"}
    assert found.control == Rate(0, len(CONTROLS))


def test_a_grader_by_chance_does_not_agree_with_itself(diff: Diff) -> None:
    draw = random.Random(0)
    found = run(ByRule(lambda *_: Scores(draw.randint(1, 5), 5, 5, 5, 5)), diff, groups=4)
    assert found.swap.alike < 0.8
    assert found.injected.share > 0.1
    assert found.control.hits > 0


def test_void_verdicts_and_failures_count_and_leave_the_rest(diff: Diff) -> None:
    calls = iter(range(10_000))

    class Unreliable(StructuralGrader):
        def grade(self, group: Group) -> GroupVerdict:
            verdict = super().grade(group)
            call = next(calls)
            if call == 0:
                raise RuntimeError("no answer")
            if call == 1:
                made_up = Evidence("patch", "nowhere.py:1", "x")
                first = dataclasses.replace(verdict.candidates[0], evidence=(made_up,))
                return dataclasses.replace(verdict, candidates=(first, *verdict.candidates[1:]))
            unproved = {Flag.UNREQUESTED_REWRITE: ()}
            first = dataclasses.replace(verdict.candidates[0], flags=unproved)
            return dataclasses.replace(verdict, candidates=(first, *verdict.candidates[1:]))

    found = run(Unreliable(), diff)
    assert found.causes == {"error": 1, "void": 1}
    assert "no answer" in found.details["error"]
    assert "does not exist" in found.details["void"]
    assert found.verdicts_usable == Rate(CALLS_A_GROUP - 2, CALLS_A_GROUP)
    assert found.repeat.pairs == 0
    assert math.isnan(found.repeat.alike)
    assert 0 < found.claims_kept.share < 1


def test_a_grader_that_always_fails_leaves_an_audit_that_says_so(diff: Diff) -> None:
    class Broken:
        def grade(self, group: Group) -> GroupVerdict:
            raise RuntimeError("down")

    found = run(Broken(), diff)
    assert found.verdicts_usable.hits == 0
    assert found.detected.tried == found.injected.tried == 0
    json.dumps(found.to_json(), allow_nan=False)


def test_groups_with_nothing_to_rank_and_known_tasks_are_passed_over(diff: Diff) -> None:
    group = stored(diff)
    nothing = dataclasses.replace(group, trajectories=group.trajectories[1:])
    found = audit(StructuralGrader(), [nothing, group, group], TIERS, limit=3)
    assert found.groups == 1


def test_numbers_survive_json(diff: Diff) -> None:
    found = run(StructuralGrader(), diff)
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert read["detected"] == {"hits": 6, "tried": 7, "share": pytest.approx(6 / 7)}
    assert read["repeat"]["alike"] == 1
    assert read["tokens_a_group"] is None
    assert set(read["detection"]) == set(FLAWS)


def test_the_guide_counts_as_the_audit_does() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "grading.md").read_text()
    assert f"asked {CALLS_A_GROUP} times" in guide
    assert f"each of {len(ATTACKS)} attacks" in guide
    assert all(f"`{name}`" in guide for name in FLAWS)


def test_agreement_counts_ties_apart() -> None:
    counts = ordering([(0, 0), (1, 1), (1, 2), (3, 2), (4, 0)])
    # pairs: (0,1) same (0,2) same (0,3) same (0,4) tied second, (1,2) tied first, (1,3) same,
    # (1,4) reversed, (2,3) tied second, (2,4) reversed, (3,4) reversed
    assert counts == Agreement(same=4, reversed=3, tied_first=1, tied_second=2)
    assert counts.alike == pytest.approx(0.4)
    assert total([counts, counts]).reversed == 6


def test_tau_b_is_kendalls() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(1)
    for _ in range(20):
        places = [(draw.randint(0, 4), draw.randint(0, 4)) for _ in range(8)]
        expected = stats.kendalltau(*zip(*places, strict=True)).statistic
        assert ordering(places).tau_b == pytest.approx(expected)
    assert math.isnan(ordering([(0, 0), (0, 1)]).tau_b)


def test_members_that_one_ranking_lacks_are_left_out() -> None:
    first = {0: Grade(0, 1, 0, 1.0), 1: Grade(1, 2, 1, 0.85)}
    assert agreement(first, {0: Grade(0, 1, 0, 1.0)}) == Agreement(same_tier=1, members=1)


def test_standing_counts_ties_half() -> None:
    grades = {m: Grade(m, 1, rank, 1.0) for m, rank in enumerate((0, 1, 1, 3))}
    assert [standing(grades, m) for m in grades] == [0, 0.5, 0.5, 1]


def test_regrading_is_what_the_service_does(diff: Diff) -> None:
    group = stored(diff)

    class Suspicious(StructuralGrader):
        audits_external = True

        def grade(self, group: Group) -> GroupVerdict:
            shown = (Evidence("step", "step 3", "submit"),)
            return dataclasses.replace(super().grade(group), external={1: shown, 0: ()})

    result = regrade(Suspicious(), group, TIERS)
    assert set(result.grades) == {0}, "a member copied from outside is not ranked"
    assert result.dropped == ("member 0: external",)
    assert (result.claims, result.cause, result.tokens) == (2, None, None)
    one = dataclasses.replace(group, trajectories=group.trajectories[1:])
    audited = regrade(Suspicious(), dataclasses.replace(one, trajectories=one.trajectories), TIERS)
    assert audited.cause is Ungraded.VOID, "member 0 is not in that group"
    assert regrade(StructuralGrader(), one, TIERS).cause is Ungraded.ONE_PASSED
