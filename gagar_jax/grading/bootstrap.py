"""A mean with its confidence interval, by resampling. Numbers in, numbers out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of `count` values and its 95 % interval; NaN where there are too few values for it."""

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    count: int = 0


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of what is not NaN, and the 2.5 % and 97.5 % quantiles of the means of `RESAMPLES` resamples.

    A resample draws as many values as there are, with replacement. Draws depend on the seed and on the
    number of values alone, so that mirrored values have mirrored intervals. The interval is a little too
    narrow for few values, by about √((n − 1)/n), and has no width where all are equal.

    Args:
      values: one for each unit that could have been another (a task, say), in a fixed order.
      seed: of the draws.

    Example:
      >>> bootstrap([0.0, 1.0, 1.0, 1.0])
      Estimate(mean=0.75, low=0.25, high=1.0, count=4)
    """
    known = np.array([value for value in values if not math.isnan(value)], np.float64)
    if len(known) < 2:
        return Estimate(mean=float(known[0]) if len(known) else math.nan, count=len(known))
    rng = np.random.default_rng(seed)
    # How often each value is drawn, rather than the draws: a resample costs one product.
    times = rng.multinomial(len(known), np.full(len(known), 1 / len(known)), size=RESAMPLES)
    means = times @ known / len(known)
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(np.mean(known)), float(low), float(high), len(known))
