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


@functools.cache
def parity_table() -> str:
    """A Markdown table: each estimator's advantages of each case's members, as computed now."""
    methods = {
        f"GAGAR `{mode}`": functools.partial(group_advantages, mode=mode)
        for mode in ("sum_preserving", "downweight", "none")
    } | {f"`{name}`": function for name, function in ESTIMATORS.items()}
    sizes = [len(reward) for reward, _, _ in CASES.values()]
    reward, passed, quality = (np.concatenate(column) for column in zip(*CASES.values(), strict=True))
    yes = np.ones(len(reward), bool)
    batch = (
        reward.astype(np.float32),
        passed.astype(bool),
        quality.astype(np.float32),
        np.repeat(np.arange(len(CASES), dtype=np.int32), sizes),
        yes,
        ~yes,
        np.ones(len(CASES), bool),
    )
    lines = [f"| | {' | '.join(CASES)} |", "|---" * (len(CASES) + 1) + "|"]
    for name, method in methods.items():
        out = jax.jit(functools.partial(method, num_groups=len(CASES)))(*batch)
        groups = np.split(np.round(np.asarray(out.advantage_N), 2) + 0.0, np.cumsum(sizes)[:-1])
        cells = [" ".join(f"{value:.2f}" for value in group) for group in groups]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
