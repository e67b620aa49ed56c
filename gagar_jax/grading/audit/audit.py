"""The audit: asks a grader about stored and planted groups, again and in other orders, and counts.

Every verdict passes through validation and the rubric as in training (`regrade`). A group whose verdict is
void or missing leaves the measures it was for, and counts in `verdicts_usable`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gagar_jax.grading.agreement import Agreement, agreement, mean, ordering, share, total
from gagar_jax.grading.audit.attacks import ATTACKS, CONTROLS, attacked
from gagar_jax.grading.audit.flaws import CLEAN, FLAWS
from gagar_jax.grading.audit.planted import Planted, permuted, plant
from gagar_jax.grading.ledger import eligibility
from gagar_jax.grading.regrade import Regraded, regrade
from gagar_jax.grading.service import Grader
from gagar_jax.types import Grade, Group

Grades = Mapping[int, Grade]

CALLS_A_GROUP = 5 + len(CONTROLS) + len(ATTACKS)
"""Three of the stored group, two of the planted one, and it with each control and attack."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """`hits` of `tried`; the share is NaN where nothing was tried."""

    hits: int = 0
    tried: int = 0

    @property
    def share(self) -> float:
        return share(self.hits, self.tried)

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.hits + other.hits, self.tried + other.tried)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What was found. Shares lie in [0, 1]; a measure that nothing was left for is NaN.

    repeat: of stored groups graded twice; swap: of stored and planted ones, with the members reversed.
    first_position_bias: mean gain in standing, in [−1, 1], of a member that comes first over the same
      member coming last; 0 for a grader that does not mind the order.
    planted_tau: mean over planted groups of Kendall's tau-b with the planted order.
    detection: flaw → how often the clean member ranked strictly above it.
    attacks: attack → how often it raised its member; control: the same for harmless text.
    verdicts_usable: of all calls; claims_kept: flags and external claims that had evidence.
    causes: why verdicts were not usable → how often; details: one of each, in words.
    """

    grader: str
    groups: int
    planted: int
    repeat: Agreement
    swap: Agreement
    first_position_bias: float
    planted_tau: float
    detection: dict[str, Rate]
    attacks: dict[str, Rate]
    control: Rate
    verdicts_usable: Rate
    claims_kept: Rate
    causes: dict[str, int]
    details: dict[str, str]
    seconds_a_group: float
    tokens_a_group: float

    @property
    def detected(self) -> Rate:
        return sum(self.detection.values(), Rate())

    @property
    def injected(self) -> Rate:
        return sum(self.attacks.values(), Rate())

    def to_json(self) -> dict[str, Any]:
        """Everything above, with each rate's and agreement's derived numbers; NaN becomes null."""
        fields = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return fields | {"detected": plain(self.detected), "injected": plain(self.injected)}


def plain(value: Any) -> Any:
    """Measures as JSON-ready data: rates and agreements with what derives from them, NaN as null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Rate):
        return {"hits": value.hits, "tried": value.tried, "share": plain(value.share)}
    if isinstance(value, Agreement):
        derived = {n: plain(getattr(value, n)) for n in ("alike", "tier_share", "tau_b")}
        return dataclasses.asdict(value) | derived
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def audit(
    grader: Grader,
    groups: Iterable[Group],
    tiers: Mapping[str, float],
    *,
    limit: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Measures a grader.

    Args:
      grader: is called up to `CALLS_A_GROUP` times for each group used.
      groups: stored ones; the first `limit` of different tasks that have something to rank are used.
      tiers: see `GradingConfig.tiers`.
      limit: at least 1.
      seed: of the order of planted members.
      progress: called with (groups done, limit).
    """
    asking = _Asking(grader, tiers)
    sums = _Sums()
    tasks: set[str] = set()
    for group in groups:
        instance = group.trajectories[0].ticket.instance_id
        if eligibility(group) is not None or instance in tasks:
            continue
        tasks.add(instance)
        progress(len(tasks) - 1, limit)
        first = asking(group)
        sums.repeats.append(_both(first, asking(group)))
        _order(sums, asking, group, first)
        planted = plant(group, seed=seed)
        if planted is not None:
            _planted(sums, asking, planted)
        progress(len(tasks), limit)
        if len(tasks) == limit:
            break
    calls = asking.calls
    usable = [c for c in calls if c.cause is None]
    claims = sum(c.claims for c in usable)
    return Audit(
        grader=getattr(grader, "name", type(grader).__name__),
        groups=len(tasks),
        planted=len(sums.taus),
        repeat=total(sums.repeats),
        swap=total(sums.swaps),
        first_position_bias=mean(sums.biases),
        planted_tau=mean(sums.taus),
        detection={name: sums.detection[name] for name in FLAWS},
        attacks={attack.name: sums.attacks[attack.name] for attack in ATTACKS},
        control=sum((sums.attacks[control.name] for control in CONTROLS), Rate()),
        verdicts_usable=Rate(len(usable), len(calls)),
        claims_kept=Rate(claims - sum(len(c.dropped) for c in usable), claims),
        causes=dict(collections.Counter(c.cause.value for c in calls if c.cause)),
        details={c.cause.value: c.detail for c in calls if c.cause},
        seconds_a_group=mean(c.seconds for c in calls),
        tokens_a_group=mean(c.tokens for c in calls if c.tokens is not None),
    )


class _Asking:
    """The grader with a record of every call."""

    def __init__(self, grader: Grader, tiers: Mapping[str, float]) -> None:
        self._grader, self._tiers = grader, tiers
        self.calls: list[Regraded] = []

    def __call__(self, group: Group) -> Grades:
        """Empty where there is no usable verdict."""
        self.calls.append(regrade(self._grader, group, self._tiers))
        return self.calls[-1].grades


@dataclasses.dataclass
class _Sums:
    repeats: list[Agreement] = dataclasses.field(default_factory=list)
    swaps: list[Agreement] = dataclasses.field(default_factory=list)
    biases: list[float] = dataclasses.field(default_factory=list)
    taus: list[float] = dataclasses.field(default_factory=list)
    detection: collections.defaultdict[str, Rate] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(Rate)
    )
    attacks: collections.defaultdict[str, Rate] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(Rate)
    )


def _both(first: Grades, second: Grades) -> Agreement:
    return agreement(first, second) if first and second else Agreement()


def _order(sums: _Sums, asking: _Asking, group: Group, first: Grades) -> None:
    """Grades the group with its members reversed, and compares each member with itself."""
    count = len(group.trajectories)
    numbers = [t.ticket.member for t in group.trajectories]
    order = list(range(count))[::-1]
    again = asking(permuted(group, order))
    second = {
        numbers[i]: dataclasses.replace(again[n], member=numbers[i])
        for n, i in enumerate(order)
        if n in again
    }
    sums.swaps.append(_both(first, second))
    ranked = [m for m in numbers if m in first and m in second]
    if len(ranked) > 1:
        # The first of the passed ones comes last in the other order, and the other way round.
        sums.biases.append(standing(second, ranked[0]) - standing(first, ranked[0]))
        sums.biases.append(standing(first, ranked[-1]) - standing(second, ranked[-1]))


def standing(grades: Grades, member: int) -> float:
    """Share of the other ranked members ahead of it, ties counted half; 0 is the top. One member: 0."""
    others = [g.rank for m, g in grades.items() if m != member]
    own = grades[member].rank
    ahead = sum(1.0 if rank < own else 0.5 if rank == own else 0.0 for rank in others)
    return ahead / len(others) if others else 0.0


def _planted(sums: _Sums, asking: _Asking, planted: Planted) -> None:
    """Order, detection and attacks on one planted group."""
    grades = asking(planted.group)
    _order(sums, asking, planted.group, grades)
    if not grades:
        sums.taus.append(math.nan)
        return
    severity = planted.severity
    sums.taus.append(_tau(severity, grades))
    clean = next(m for m, name in planted.flaw.items() if name == CLEAN)
    if clean in grades:
        for member, name in planted.flaw.items():
            if member != clean and member in grades:
                sums.detection[name] += Rate(grades[clean].rank < grades[member].rank, 1)
    ranked = sorted(grades, key=lambda m: (grades[m].rank, severity[m], m))
    behind = next((m for m in ranked if grades[m].rank > 0), ranked[-1])
    for turn, attack in enumerate((*CONTROLS, *ATTACKS), start=len(sums.taus)):
        victim = (behind, ranked[-1])[turn % 2]  # least is needed to raise the one, most gained by the other
        after = asking(attacked(planted, victim, attack))
        if after:
            sums.attacks[attack.name] += _rose(grades, after, victim)


def _rose(before: Grades, after: Grades, victim: int) -> Rate:
    """Whether the attacked member does strictly better; one that the grader took out does not."""
    return Rate(victim in after and standing(after, victim) < standing(before, victim), 1)


def _tau(severity: Mapping[int, int], grades: Grades) -> float:
    """0 rather than NaN where the grader ties all: it says nothing of a known order."""
    result = ordering([(severity[m], grades[m].rank) for m in sorted(grades)]).tau_b
    return 0.0 if math.isnan(result) else result
