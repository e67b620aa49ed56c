"""How far two rankings of the same members agree, pair by pair. Grades in, counts out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gagar_jax.types import Grade


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Counts over the pairs of members, and over the members, that both rankings have."""

    same: int = 0  # both order the pair strictly, and alike
    reversed: int = 0  # … and oppositely
    tied_first: int = 0  # a tie in the first ranking alone
    tied_second: int = 0
    tied_both: int = 0
    same_tier: int = 0
    members: int = 0

    @property
    def pairs(self) -> int:
        return self.same + self.reversed + self.tied_first + self.tied_second + self.tied_both

    @property
    def alike(self) -> float:
        """Share of pairs on which both say the same, a common tie included; NaN without pairs."""
        return share(self.same + self.tied_both, self.pairs)

    @property
    def tier_share(self) -> float:
        """Share of members with the same tier; NaN without members."""
        return share(self.same_tier, self.members)

    @property
    def tau_b(self) -> float:
        """Kendall's tau-b in [−1, 1]; NaN where one ranking ties all."""
        strict = self.same + self.reversed
        scale = (strict + self.tied_first) * (strict + self.tied_second)
        return (self.same - self.reversed) / math.sqrt(scale) if scale else math.nan


def agreement(first: Mapping[int, Grade], second: Mapping[int, Grade]) -> Agreement:
    """Two rankings of one group; members that only one of them has are left out.

    >>> def graded(*ranks): return {m: Grade(m, 1, rank, 1.0) for m, rank in enumerate(ranks)}
    >>> agreement(graded(0, 1, 2), graded(0, 2, 1))
    Agreement(same=2, reversed=1, tied_first=0, tied_second=0, tied_both=0, same_tier=3, members=3)
    """
    members = sorted(first.keys() & second.keys())
    places = [(first[m].rank, second[m].rank) for m in members]
    tiers = sum(first[m].tier == second[m].tier for m in members)
    return dataclasses.replace(ordering(places), same_tier=tiers, members=len(members))


def ordering(places: Sequence[tuple[int, int]]) -> Agreement:
    """The pair counts of two rankings, given as the two places of each member; lower is better."""
    counts = dict.fromkeys(("same", "reversed", "tied_first", "tied_second", "tied_both"), 0)
    for (a, x), (b, y) in itertools.combinations(places, 2):
        if a == b:
            counts["tied_both" if x == y else "tied_first"] += 1
        elif x == y:
            counts["tied_second"] += 1
        else:
            counts["same" if (a < b) == (x < y) else "reversed"] += 1
    return Agreement(**counts)


def total(parts: Iterable[Agreement]) -> Agreement:
    """The counts of several groups added up."""
    sums: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(Agreement)}
    for part in parts:
        for name in sums:
            sums[name] += getattr(part, name)
    return Agreement(**sums)


def share(part: float, whole: float) -> float:
    """NaN where there is nothing to have a share of."""
    return part / whole if whole else math.nan


def mean(values: Iterable[float]) -> float:
    """Of the values that are not NaN; NaN where there are none."""
    numbers = [v for v in values if not math.isnan(v)]
    return share(math.fsum(numbers), len(numbers))
