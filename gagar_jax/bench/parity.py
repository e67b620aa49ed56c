"""Where the estimators differ: one table over small groups that bring out each convention."""

from __future__ import annotations

import functools

import jax
import numpy as np

from gagar_jax.algo.advantage import group_advantages
from gagar_jax.algo.estimators import ESTIMATORS

# name: rewards, passed, quality coefficients (on failed rows: diversity, which only EDAS reads)
CASES: dict[str, tuple[list[float], list[int], list[float]]] = {
    "two of four passed, f = 1, .4": ([1, 1, 0, 0], [1, 1, 0, 0], [1, 0.4, 0.9, 0.1]),
    "one of four passed": ([1, 0, 0, 0], [1, 0, 0, 0], [0.85, 0.5, 0.5, 0.5]),
    "cap binds, f = .2, .4": ([1, 1, 0, 0], [1, 1, 0, 0], [0.2, 0.4, 0.5, 0.5]),
    "shaped rewards": ([1, 0.1, 0, 0], [1, 1, 0, 0], [1, 0.85, 0.5, 0.5]),
    "all passed": ([1, 1, 1], [1, 1, 1], [1, 0.9, 0.4]),
    "a group of one": ([1], [1], [1]),
}


def parity_table() -> str:
    """A Markdown table: each estimator's advantages of each case's members, as computed now."""
    methods = {
        f"GAGAR `{mode}`": functools.partial(group_advantages, mode=mode)
        for mode in ("sum_preserving", "downweight", "none")
    } | {f"`{name}`": function for name, function in ESTIMATORS.items()}
    lines = [f"| | {' | '.join(CASES)} |", "|---" * (len(CASES) + 1) + "|"]
    for name, method in methods.items():
        cells = []
        for reward, passed, quality in CASES.values():
            rows = len(reward)
            out = jax.jit(functools.partial(method, num_groups=1))(
                np.array(reward, np.float32),
                np.array(passed, bool),
                np.array(quality, np.float32),
                np.zeros(rows, np.int32),
                np.ones(rows, bool),
                np.zeros(rows, bool),
                np.ones(1, bool),
            )
            cells.append(" ".join(f"{value + 0.0:.2f}" for value in np.round(out.advantage_N, 2)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
