"""Blind pairwise comparison: who meets whom, what a grader is shown, and what its verdicts add up to."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import scipy.stats

from gagar_jax.config import GradingConfig
from gagar_jax.grading.bootstrap import Estimate, bootstrap
from gagar_jax.grading.duel import MEASURES, Both, Duel, draw, duel
from gagar_jax.grading.structural import StructuralGrader
from gagar_jax.types import (
    CandidateVerdict,
    Evidence,
    Group,
    GroupVerdict,
    Scores,
    Status,
    Ticket,
    Trajectory,
    Turn,
    UserError,
)
from tests.grading.builders import FIXED, MODULE, Diff, group_of, trajectory

PATH = "pkg/core.py"
TIERS = GradingConfig().tiers()
PRINTED = FIXED.replace("        return low\n", "        print(value)\n        return low\n")
LONGER = FIXED.replace("    return value\n", "    result = value\n    unused = low\n    return result\n")


@pytest.fixture
def evaluation(diff: Diff) -> Callable[..., list[Group]]:
    """Groups of one run: task → final texts of its attempts, None for one that failed."""

    def make(tasks: dict[str, Sequence[str | None]], *, version: int = 3, first: int = 0) -> list[Group]:
        groups = []
        for number, (task, texts) in enumerate(tasks.items(), first):
            members = []
            for place, text in enumerate(texts):
                patch = diff({PATH: text}) if text is not None else b""
                status = Status.FAILED if text is None else Status.PASSED
                member = trajectory(
                    place, patch, status=status, turns=[Turn(f"try {place}", ""), Turn("submit", "")]
                )
                ticket = Ticket(number, place, task)
                members.append(dataclasses.replace(member, ticket=ticket, version=version))
            groups.append(
                group_of(members, task={"instance_id": task, "problem_statement": "clamp is wrong"})
            )
        return groups

    return make


Evaluation = Callable[..., list[Group]]


class Scripted:
    """Gives each member the scores that a function of the group and its place says."""

    name = "scripted"

    def __init__(self, score: Callable[[Group, Trajectory], int]) -> None:
        self.score, self.seen = score, list[Group]()

    def grade(self, group: Group) -> GroupVerdict:
        self.seen.append(group)
        return GroupVerdict(
            self.name,
            tuple(
                CandidateVerdict(t.ticket.member, Scores(*[self.score(group, t)] * 5))
                for t in group.trajectories
            ),
        )


def flipped(found: Both) -> Both:
    """As it must be with the sides exchanged."""
    d = found.difference
    return Both(found.b, found.a, Estimate(-d.mean, -d.high, -d.low, d.count))


def same(one: Estimate, other: Estimate) -> bool:
    return one.count == other.count and np.allclose(
        dataclasses.astuple(one), dataclasses.astuple(other), equal_nan=True
    )


# ---- the interval


def test_the_interval_is_the_percentile_bootstrap() -> None:
    values = np.random.default_rng(0).normal(size=40)
    found = bootstrap(list(values))
    reference = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(reference.low, abs=0.02)
    assert found.high == pytest.approx(reference.high, abs=0.02)
    assert bootstrap(list(values)) == found
    assert bootstrap(list(values), seed=1) != found


def test_mirrored_values_have_mirrored_intervals_and_few_have_none() -> None:
    values = [0.0, 0.25, 0.5, 1.0, 1.0, 0.5]
    found, mirrored = bootstrap(values), bootstrap([1 - v for v in values])
    assert same(mirrored, Estimate(1 - found.mean, 1 - found.high, 1 - found.low, found.count))
    one = bootstrap([math.nan, 3.0])
    assert (one.mean, one.count) == (3.0, 1)
    assert math.isnan(one.low)
    assert bootstrap([math.nan]).count == 0
    assert math.isnan(bootstrap([]).mean)


# ---- who meets whom


def test_the_draw_does_not_depend_on_any_order(evaluation: Evaluation) -> None:
    texts = [FIXED, PRINTED, LONGER, None, FIXED.replace("return low", "return (low)")]
    (a,), (b,) = evaluation({"t": texts}), evaluation({"t": texts[::-1]}, version=9)
    drawn = draw(a, b, count=3, seed=0)
    assert len(drawn) == 3
    assert all(one.passed and other.passed for one, other in drawn)
    mixed = dataclasses.replace(a, trajectories=random.Random(1).sample(a.trajectories, 5))
    assert draw(mixed, b, count=3, seed=0) == drawn
    renumbered = [dataclasses.replace(t, ticket=Ticket(0, 9 - t.ticket.member, "t")) for t in a.trajectories]
    again = draw(dataclasses.replace(a, trajectories=renumbered), b, count=3, seed=0)
    assert [one.turns for one, _ in again] == [one.turns for one, _ in drawn], "content decides, not numbers"
    assert draw(b, a, count=3, seed=0) == [(other, one) for one, other in drawn]
    assert draw(a, b, count=9, seed=0)[:3] == drawn, "more pairs keep those there were"
    for side in zip(*draw(a, b, count=9, seed=0), strict=True):
        assert len({t.ticket.member for t in side}) == 4, "no attempt is in two pairs"


def test_every_pair_is_as_likely_as_another(evaluation: Evaluation) -> None:
    """Two sides of one seed do not draw in step, even where they have an attempt in common."""
    (a,), (b,) = evaluation({"t": [FIXED, PRINTED]}), evaluation({"t": [FIXED, LONGER]})
    counts = collections.Counter(
        (one.ticket.member, other.ticket.member)
        for seed in range(800)
        for one, other in draw(a, b, count=1, seed=seed)
    )
    assert len(counts) == 4
    assert all(150 < count < 250 for count in counts.values()), counts


# ---- what is asked


def test_a_grader_is_shown_two_numbered_members_in_both_orders(evaluation: Evaluation) -> None:
    a, b = evaluation({"t": [FIXED]}, version=3), evaluation({"t": [None, PRINTED]}, version=80, first=7)
    judge = Scripted(lambda group, t: 5)
    duel(judge, a, b, TIERS)
    first, second = judge.seen
    assert [t.patch for t in first.trajectories] == [t.patch for t in second.trajectories[::-1]]
    assert first.trajectories[0].patch == a[0].trajectories[0].patch
    for shown in judge.seen:
        assert [t.ticket for t in shown.trajectories] == [Ticket(0, 0, "t"), Ticket(0, 1, "t")]
        assert {t.version for t in shown.trajectories} == {0}
        assert shown.base_files == {PATH: MODULE}
        assert shown.task["problem_statement"] == "clamp is wrong"


def test_only_tasks_that_both_pass_count_and_identical_patches_are_not_asked_about(
    evaluation: Evaluation,
) -> None:
    a = evaluation({"same": [FIXED], "a fails": [None], "alone": [FIXED], "differs": [FIXED]})
    b = evaluation({"differs": [PRINTED], "a fails": [FIXED], "same": [FIXED], "other": [FIXED]})
    judge = Scripted(lambda group, t: 5)
    found = duel(judge, a, b, TIERS)
    assert (found.evaluated, found.tasks, found.pairs, found.identical) == (3, 2, 2, 1)
    assert len(judge.seen) == 2
    assert (found.a_better, found.tied, found.b_better) == (0, 2, 0)
    assert found.win_rate.mean == 0.5
    assert found.measures["W"].a.count == 1, "nobody judged the identical pair"


# ---- what it adds up to


def test_the_structural_grader_prefers_the_clean_side(evaluation: Evaluation) -> None:
    a = evaluation({f"t{n}": [FIXED] for n in range(3)})
    b = evaluation({"t0": [PRINTED], "t1": [LONGER], "t2": [FIXED]})
    found = duel(StructuralGrader(), a, b, TIERS)
    assert (found.a_better, found.tied, found.b_better, found.identical) == (2, 1, 0, 1)
    assert found.win_rate.mean == pytest.approx((1 + 1 + 0.5) / 3)
    assert found.win_rate_unlike.mean == 1
    quality = found.measures["W"]
    assert quality.a.mean == 5
    assert quality.b.mean < 5
    assert quality.difference.mean == pytest.approx(quality.a.mean - quality.b.mean)
    assert found.measures["tier1"].a.mean == 1
    assert sum(found.measures[f"tier{n}"].b.mean for n in (1, 2, 3)) == pytest.approx(1)
    assert (found.orders_agree.hits, found.orders_agree.tried) == (2, 2)
    assert (found.verdicts_usable.hits, found.verdicts_usable.tried) == (4, 4)


def test_swapping_the_sides_mirrors_everything(evaluation: Evaluation) -> None:
    a = evaluation(
        {"t0": [FIXED, PRINTED], "t1": [LONGER, None, FIXED], "t2": [FIXED, FIXED], "t3": [PRINTED]}
    )
    b = evaluation({"t3": [LONGER, FIXED], "t1": [PRINTED, PRINTED], "t2": [FIXED], "t0": [PRINTED, LONGER]})
    one = duel(StructuralGrader(), a, b, TIERS, pairs_a_task=2)
    other = duel(StructuralGrader(), b[::-1], a, TIERS, pairs_a_task=2)
    assert (one.pairs, one.identical, one.tied) == (other.pairs, other.identical, other.tied)
    assert (one.a_better, one.b_better) == (other.b_better, other.a_better)
    win = one.win_rate
    assert same(other.win_rate, Estimate(1 - win.mean, 1 - win.high, 1 - win.low, win.count))
    for name in MEASURES:
        mirrored = flipped(one.measures[name])
        for part in ("a", "b", "difference"):
            assert same(getattr(other.measures[name], part), getattr(mirrored, part)), (name, part)


def test_a_run_against_itself_is_even(evaluation: Evaluation) -> None:
    a = evaluation({"t0": [FIXED, PRINTED, LONGER], "t1": [PRINTED]})
    found = duel(StructuralGrader(), a, a, TIERS, pairs_a_task=3)
    assert (found.pairs, found.identical) == (4, 4)
    assert found.win_rate.mean == 0.5


def test_every_task_weighs_the_same(evaluation: Evaluation) -> None:
    good, bad = [FIXED] * 3, [PRINTED] * 3
    a = evaluation({"many": good, "one": bad[:1]})
    b = evaluation({"many": bad, "one": good[:1]})
    found = duel(StructuralGrader(), a, b, TIERS, pairs_a_task=3)
    assert (found.a_better, found.b_better) == (3, 1)
    assert found.win_rate.mean == 0.5


def test_a_grader_that_likes_the_first_gives_nothing_to_either_side(evaluation: Evaluation) -> None:
    a, b = evaluation({"t": [FIXED], "u": [FIXED]}), evaluation({"t": [PRINTED], "u": [LONGER]})
    found = duel(Scripted(lambda group, t: 5 - 2 * t.ticket.member), a, b, TIERS)
    assert found.win_rate == Estimate(0.5, 0.5, 0.5, 2)
    assert (found.a_better, found.tied, found.b_better) == (0, 2, 0)
    assert (found.orders_agree.hits, found.orders_agree.tried) == (0, 2)
    assert found.measures["W"].difference.mean == 0
    assert found.identical == 0


def test_a_pair_without_both_verdicts_has_no_result(evaluation: Evaluation, diff: Diff) -> None:
    printed = diff({PATH: PRINTED})

    class Careless(Scripted):
        def grade(self, group: Group) -> GroupVerdict:
            given = super().grade(group)
            if group.trajectories[0].patch == printed:  # in one order only
                invented = (Evidence("step", "step 40", "rm -rf"),)
                worse = dataclasses.replace(given.candidates[0], evidence=invented)
                return dataclasses.replace(given, candidates=(worse, given.candidates[1]))
            if group.trajectories[0].ticket.instance_id == "down":
                raise ConnectionError("the line is dead")
            return given

    a = evaluation({"t": [FIXED], "down": [FIXED], "fine": [FIXED]})
    b = evaluation({"t": [PRINTED], "down": [LONGER], "fine": [LONGER]})
    found = duel(Careless(lambda group, t: 5), a, b, TIERS)
    assert (found.pairs, found.unresolved, found.tied) == (3, 2, 1)
    assert found.win_rate.count == 1
    assert (found.verdicts_usable.hits, found.verdicts_usable.tried) == (3, 6)
    assert found.causes == {"error": 2, "void": 1}
    assert "this evidence does not exist" in found.details["void"]
    assert found.details["error"] == "ConnectionError: the line is dead"


def test_a_copied_answer_loses_and_is_not_measured(evaluation: Evaluation) -> None:
    class Accuses(Scripted):
        def grade(self, group: Group) -> GroupVerdict:
            shown = (Evidence("step", "step 1", "try 0"),)
            guilty = {t.ticket.member: shown for t in group.trajectories if b"print" in t.patch}
            return dataclasses.replace(super().grade(group), external=guilty)

    a, b = evaluation({"t": [FIXED], "u": [LONGER]}), evaluation({"t": [PRINTED], "u": [FIXED]})
    found = duel(Accuses(lambda group, t: 5), a, b, TIERS)
    assert (found.a_better, found.tied) == (1, 1)
    assert found.external == {"a": 0, "b": 2}
    assert (found.measures["W"].a.count, found.measures["W"].b.count) == (2, 1)


def test_other_tasks_are_refused(evaluation: Evaluation) -> None:
    a, b = evaluation({"t": [FIXED]}), evaluation({"t": [PRINTED]})
    other = [dataclasses.replace(b[0], base_files={PATH: MODULE + "\n"})]
    with pytest.raises(UserError, match=r"task t: .* different texts of pkg/core\.py"):
        duel(StructuralGrader(), a, other, TIERS)
    twice = [b[0], dataclasses.replace(b[0], group=5)]
    with pytest.raises(UserError, match="task t is in the groups 0 and 5"):
        duel(StructuralGrader(), a, twice, TIERS)


def test_nothing_in_common_is_nothing_found(evaluation: Evaluation) -> None:
    found: Duel = duel(StructuralGrader(), evaluation({"t": [FIXED]}), evaluation({"u": [FIXED]}), TIERS)
    assert (found.evaluated, found.tasks, found.pairs) == (0, 0, 0)
    assert math.isnan(found.win_rate.mean)
