"""The rubric's arithmetic: scores and flags in, tier, place and coefficient f out. Nothing judges here.

Tiers and f are computed in code so that a grader can only say what it saw (method: "The rubric", Eq. 6).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gagar_jax.types import Flag, Grade, Scores

WEIGHTS = {"approach": 30, "precision": 25, "minimality": 20, "side_effects": 15, "consistency": 10}
"""Hundredths, so that W is an integer and equal W is exactly equal."""

_DEMOTING = frozenset({Flag.UNREQUESTED_REWRITE, Flag.TEST_SPECIFIC_WORKAROUND})
_BARRING = frozenset({Flag.SEVERE_PROCESS_ISSUE, Flag.UNRESOLVED_REGRESSION})


def weighted(scores: Scores) -> int:
    """100·W = 30 approach + 25 precision + 20 minimality + 15 side_effects + 10 consistency, in 100…500."""
    return sum(weight * getattr(scores, name) for name, weight in WEIGHTS.items())


def tier(scores: Scores, flags: Collection[Flag]) -> int:
    """1, 2 or 3, by the rubric's rules in their order.

    T3 if rewritten unasked, special-cased for the tests, approach = 1, or minimality and side_effects
    both ≤ 2; else T1 if all five ≥ 4 and no severe process issue or unresolved regression; else T2.
    """
    held = frozenset(flags)
    poor = scores.approach == 1 or (scores.minimality <= 2 and scores.side_effects <= 2)
    if poor or held & _DEMOTING:
        return 3
    if min(getattr(scores, name) for name in WEIGHTS) >= 4 and not held & _BARRING:
        return 1
    return 2


def coefficients(
    entries: Mapping[int, tuple[Scores, Collection[Flag]]],
    *,
    tier1_best: float,
    tier1_rest: float,
    tier2_best: float,
    tier2_worst: float,
    tier3: float,
) -> dict[int, Grade]:
    """Tier, place and quality coefficient f of every graded member of one group (Eq. 6).

    Members rank by (tier, W); equal W inside a tier is a tie and shares a place. T1: the top place gets
    `tier1_best`, the rest `tier1_rest`. T2: tier2_best − (tier2_best − tier2_worst)·k/(K − 1) at the
    zero-based place k of K (K = 1: `tier2_best`). T3: `tier3`. The order of `entries` does not matter.

    Args:
      entries: member → (scores, flags), validated; failed members are not in it.
      tier1_best, tier1_rest, tier2_best, tier2_worst, tier3: f in (0, 1]; the paper's Flash values are
        1.0, 0.9, 0.85, 0.4, 0.2.

    Returns:
      member → Grade; empty for no entries.

    Example:
      >>> right = Scores(5, 5, 5, 5, 5)
      >>> entries = {
      ...     0: (right, ()),
      ...     3: (Scores(5, 5, 4, 5, 4), ()),                # a comment more than needed
      ...     4: (Scores(5, 5, 3, 4, 3), ()),                # a print left behind
      ...     7: (Scores(4, 3, 3, 4, 3), ()),
      ...     9: (right, (Flag.UNREQUESTED_REWRITE,)),
      ... }
      >>> paper = dict(tier1_best=1.0, tier1_rest=0.9, tier2_best=0.85, tier2_worst=0.4, tier3=0.2)
      >>> for grade in coefficients(entries, **paper).values():
      ...     print(grade.member, grade.tier, grade.rank, round(grade.quality, 3))
      0 1 0 1.0
      3 1 1 0.9
      4 2 2 0.85
      7 2 3 0.4
      9 3 4 0.2
    """
    keys = {m: (tier(scores, flags), -weighted(scores)) for m, (scores, flags) in entries.items()}
    places = sorted(set(keys.values()))
    within: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for t, negative in places:
        within[t].append(negative)

    def quality(t: int, negative: int) -> float:
        k, count = within[t].index(negative), len(within[t])
        if t == 1:
            return tier1_best if k == 0 else tier1_rest
        if t == 2:
            return tier2_best if count == 1 else tier2_best - (tier2_best - tier2_worst) * k / (count - 1)
        return tier3

    return {m: Grade(m, key[0], places.index(key), quality(*key)) for m, key in keys.items()}
