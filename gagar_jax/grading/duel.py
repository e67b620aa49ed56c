"""Two policies compared blind: attempts of both at one task, judged side by side, in both orders.

Each pair is a group of two passed members that a grader sees under numbers alone. Verdicts pass through
validation and the rubric as in training (`regrade.ask`). A pair counts only if its verdicts in both orders
are usable: one order alone would let its first position speak.

Deviation from the paper, which does not say how it pairs and weighs: attempts are drawn at random, and every
task weighs the same, however many of its pairs there are.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence

from gagar_jax.grading import rubric
from gagar_jax.grading.agreement import mean
from gagar_jax.grading.audit.audit import Rate
from gagar_jax.grading.bootstrap import Estimate, bootstrap
from gagar_jax.grading.regrade import Regraded, ask
from gagar_jax.grading.service import Grader
from gagar_jax.types import Grade, Group, Ticket, Trajectory, UserError

Pair = tuple[Trajectory, Trajectory]
Measures = Mapping[str, float]

MEASURES = ("W", "f", "tier1", "tier2", "tier3")
_UNKNOWN = dict.fromkeys(MEASURES, math.nan)


@dataclasses.dataclass(frozen=True)
class Both:
    """A measure of each side and of the first less the second, task by task."""

    a: Estimate
    b: Estimate
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Duel:
    """What was found. Estimates are means over tasks of the means over their pairs; see `bootstrap`.

    evaluated: tasks that both sides attempted; tasks: of these, both passed; pairs: of all tasks.
    identical: pairs with the same patch on both sides, ties for which no grader was asked.
    a_better, tied, b_better: pairs, identical ones among the tied; the rest of `pairs` has no result.
    win_rate: of the first side over all pairs with a result; a tie is half, and so is a pair that each
      order decides for another side. win_rate_unlike: the same without the identical pairs.
    measures: of `MEASURES`, over judged pairs (identical ones have none). W is the weighted score, 1 to 5;
      f the coefficient in a group of two; tierN the share of verdicts that put the side's attempt in tier N.
    orders_agree: judged pairs on which both orders say the same.
    verdicts_usable: of all asked for, two a pair. causes: why others were not → how often; details: one of
      each, in words.
    external: verdicts, of each side, that call its attempt copied from outside: it loses, unmeasured.
    """

    grader: str
    seed: int
    evaluated: int
    tasks: int
    pairs: int
    identical: int
    a_better: int
    tied: int
    b_better: int
    win_rate: Estimate
    win_rate_unlike: Estimate
    measures: dict[str, Both]
    orders_agree: Rate
    verdicts_usable: Rate
    external: dict[str, int]
    causes: dict[str, int]
    details: dict[str, str]
    seconds_a_verdict: float
    tokens_a_verdict: float

    @property
    def unresolved(self) -> int:
        """Pairs without a result: a verdict of theirs was not usable."""
        return self.pairs - self.a_better - self.tied - self.b_better


def duel(
    grader: Grader,
    groups_a: Sequence[Group],
    groups_b: Sequence[Group],
    tiers: Mapping[str, float],
    *,
    pairs_a_task: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Duel:
    """Compares two evaluations. Swapping the sides mirrors the result, for an order-blind grader exactly.

    Args:
      grader: must keep the order of the members it is given; asked twice for each pair of unlike patches.
      groups_a, groups_b: one group a task and side, in any order.
      tiers: see `GradingConfig.tiers`.
      pairs_a_task: at least 1; fewer where a side has fewer passed attempts. No attempt is in two pairs.
      seed: of the draws of attempts and of the intervals.
      progress: called with (pairs done, pairs).

    Raises:
      UserError: a task is in two groups of a side; or a file that both sides edited was not the same to
        begin with, so that the tasks are not the same.
    """
    a, b = _by_task(groups_a), _by_task(groups_b)
    common = sorted(a.keys() & b.keys())
    drawn = {task: draw(a[task], b[task], count=pairs_a_task, seed=seed) for task in common}
    total, done = sum(map(len, drawn.values())), 0
    results: dict[str, list[_Result]] = {}
    asked: list[Regraded] = []
    for number, task in enumerate(t for t in common if drawn[t]):
        base = _base_files(task, a[task], b[task])
        record = dataclasses.replace(a[task], group=number, base_files=base)
        for pair in drawn[task]:
            progress(done, total)
            results.setdefault(task, []).append(_result(grader, record, pair, tiers, asked))
            done += 1
    progress(done, total)
    return _summed(grader, results, asked, evaluated=len(common), seed=seed)


def draw(a: Group, b: Group, *, count: int, seed: int) -> list[Pair]:
    """Up to `count` pairs of passed attempts at one task, every attempt as likely as another of its side.

    What is drawn depends on the seed, the task and the content of the side's own passed attempts: not on
    the order in which they are stored, on the other tasks, or on which side comes first.
    """
    passed = ([t for t in group.trajectories if t.passed] for group in (a, b))
    first, second = (_shuffled(side, seed)[:count] for side in passed)
    return list(zip(first, second, strict=False))  # the shorter side decides


def _shuffled(attempts: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    ordered = sorted(attempts, key=_digest)
    # All of the side's content seeds its draw: two sides of one seed alone would draw in step.
    content = " ".join(map(_digest, ordered))
    return random.Random(f"{seed} {content}").sample(ordered, len(ordered))


def _digest(attempt: Trajectory) -> str:
    said = [attempt.ticket.instance_id, attempt.patch, *(turn.action for turn in attempt.turns)]
    return hashlib.sha256(repr(said).encode("utf-8", "surrogateescape")).hexdigest()


def _by_task(groups: Sequence[Group]) -> dict[str, Group]:
    found: dict[str, Group] = {}
    for group in groups:
        task = group.trajectories[0].ticket.instance_id
        if found.setdefault(task, group) is not group:
            raise UserError(
                f"task {task} is in the groups {found[task].group} and {group.group}, but an evaluation has "
                "each task once: give trajectories/eval_*.jsonl, or a run folder"
            )
    return found


def _base_files(task: str, a: Group, b: Group) -> dict[str, str]:
    unlike = sorted(
        p for p in a.base_files.keys() & b.base_files.keys() if a.base_files[p] != b.base_files[p]
    )
    if unlike:
        raise UserError(
            f"task {task}: the two runs were handed different texts of {', '.join(unlike)}, so they did not "
            "work on the same task. Compare runs whose tasks were built with the same settings."
        )
    return a.base_files | b.base_files


@dataclasses.dataclass(frozen=True)
class _Result:
    """Of one pair. score: of the first side, 0 to 1, NaN without a result. The rest: of a judged pair."""

    score: float
    a: Measures = dataclasses.field(default_factory=lambda: _UNKNOWN)
    b: Measures = dataclasses.field(default_factory=lambda: _UNKNOWN)
    orders_agree: bool | None = None
    external_a: int = 0
    external_b: int = 0


def _result(
    grader: Grader, task: Group, pair: Pair, tiers: Mapping[str, float], asked: list[Regraded]
) -> _Result:
    a, b = pair
    if a.patch == b.patch:
        return _Result(0.5)
    first, second = (ask(grader, _group(task, order), tiers) for order in ((a, b), (b, a)))
    asked += first, second
    if first.cause is not None or second.cause is not None:
        return _Result(math.nan)
    scores = [_score(first.grades, 0, 1), _score(second.grades, 1, 0)]
    return _Result(
        sum(scores) / 2,
        _averaged(_measures(first, 0), _measures(second, 1)),
        _averaged(_measures(first, 1), _measures(second, 0)),
        scores[0] == scores[1],
        (0 not in first.grades) + (1 not in second.grades),
        (1 not in first.grades) + (0 not in second.grades),
    )


def _group(task: Group, members: Pair) -> Group:
    """Two attempts under their places; nothing else tells which run they are of."""
    prompt = min(t.prompt for t in members)
    anonymous = [
        dataclasses.replace(
            t, ticket=Ticket(task.group, place, t.ticket.instance_id), version=0, prompt=prompt
        )
        for place, t in enumerate(members)
    ]
    return dataclasses.replace(task, trajectories=anonymous)


def _score(grades: Mapping[int, Grade], member: int, other: int) -> float:
    """1, ½ or 0: whether the member ranks above the other. One out of the ranking is below one in it."""
    own, its = (grades[m].rank if m in grades else math.inf for m in (member, other))
    return 0.5 if own == its else float(own < its)


def _measures(result: Regraded, member: int) -> Measures:
    grade = result.grades.get(member)
    if grade is None or result.verdict is None:
        return _UNKNOWN
    scores = next(c.scores for c in result.verdict.candidates if c.member == member)
    tiers = {f"tier{n}": float(grade.tier == n) for n in (1, 2, 3)}
    return {"W": rubric.weighted(scores) / 100, "f": grade.quality, **tiers}


def _averaged(*measures: Measures) -> Measures:
    return {name: mean(m[name] for m in measures) for name in MEASURES}


def _summed(
    grader: Grader,
    results: Mapping[str, Sequence[_Result]],
    asked: Sequence[Regraded],
    *,
    evaluated: int,
    seed: int,
) -> Duel:
    pairs = [result for of_task in results.values() for result in of_task]
    known = [r.score for r in pairs if not math.isnan(r.score)]
    agreed = [r.orders_agree for r in pairs if r.orders_agree is not None]
    bad = [(r.cause.value, r.detail) for r in asked if r.cause is not None]

    def estimate(of_pair: Callable[[_Result], float]) -> Estimate:
        return bootstrap([mean(map(of_pair, of_task)) for of_task in results.values()], seed=seed)

    def both(name: str) -> Both:
        return Both(
            estimate(lambda r: r.a[name]),
            estimate(lambda r: r.b[name]),
            estimate(lambda r: r.a[name] - r.b[name]),
        )

    return Duel(
        grader=getattr(grader, "name", type(grader).__name__),
        seed=seed,
        evaluated=evaluated,
        tasks=len(results),
        pairs=len(pairs),
        identical=sum(r.score == 0.5 and r.orders_agree is None for r in pairs),
        a_better=sum(score > 0.5 for score in known),
        tied=sum(score == 0.5 for score in known),
        b_better=sum(score < 0.5 for score in known),
        win_rate=estimate(lambda r: r.score),
        win_rate_unlike=estimate(lambda r: math.nan if r.orders_agree is None else r.score),
        measures={name: both(name) for name in MEASURES},
        orders_agree=Rate(sum(agreed), len(agreed)),
        verdicts_usable=Rate(len(asked) - len(bad), len(asked)),
        external={"a": sum(r.external_a for r in pairs), "b": sum(r.external_b for r in pairs)},
        causes=dict(collections.Counter(cause for cause, _ in bad)),
        details=dict(bad),
        seconds_a_verdict=mean(r.seconds for r in asked),
        tokens_a_verdict=mean(float(r.tokens) for r in asked if r.tokens is not None),
    )
