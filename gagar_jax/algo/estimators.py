"""Other group estimators behind the interface of `group_advantages`, so that one run can compare them.

GAGAR itself lives in `advantage.py`. Invalid rows, padding and external rows are treated as there (steps 1
and 2). None of these estimators drops groups: every valid trajectory is trained on, as its authors do.

`trl` and `verl` follow those libraries to the letter (divisor, epsilon, groups of one); `grpo` is the formula
of the paper that introduced it. GOPO, PAPO and EDAS are known to us second-hand: what the docstrings state is
what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gagar_jax.algo.advantage import GroupAdvantages
from gagar_jax.algo.segments import group_sum, to_rows

_TINY = 1e-18


class _Batch(NamedTuple):
    """Rows after steps 1 and 2, and their groups' first statistics."""

    reward_N: jax.Array
    passed_N: jax.Array
    valid_N: jax.Array
    group_id_N: jax.Array
    size_G: jax.Array
    mean_G: jax.Array
    passes_G: jax.Array

    def sums(self, column_N: jax.Array) -> jax.Array:
        return group_sum(column_N, self.group_id_N, num_groups=self.size_G.shape[0])

    def rows(self, column_G: jax.Array) -> jax.Array:
        return to_rows(column_G[:, None], self.group_id_N)[0]

    def centred(self) -> jax.Array:
        return jnp.where(self.valid_N, self.reward_N - self.rows(self.mean_G), 0.0)


def _prepare(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    *,
    num_groups: int,
) -> _Batch:
    reward_N, group_id_N = (
        jnp.asarray(reward_N).astype(jnp.float32),
        jnp.asarray(group_id_N).astype(jnp.int32),
    )
    passed_N, valid_N, external_N = (jnp.asarray(x).astype(bool) for x in (passed_N, valid_N, external_N))
    valid_N = valid_N & (jnp.isfinite(reward_N) | external_N) & (group_id_N >= 0) & (group_id_N < num_groups)
    scored_N = valid_N & ~external_N
    reward_N, passed_N = jnp.where(scored_N, reward_N, 0.0), passed_N & scored_N

    def sums(column_N: jax.Array) -> jax.Array:
        return group_sum(column_N.astype(jnp.float32), group_id_N, num_groups=num_groups)

    size_G = sums(valid_N)
    return _Batch(
        reward_N,
        passed_N,
        valid_N,
        group_id_N,
        size_G,
        sums(reward_N) / jnp.maximum(size_G, 1.0),
        sums(passed_N),
    )


def _result(batch: _Batch, advantage_N: jax.Array) -> GroupAdvantages:
    ones_G = jnp.ones_like(batch.mean_G)
    return GroupAdvantages(
        advantage_N=jnp.where(batch.valid_N, advantage_N, 0.0),
        trained_N=batch.valid_N,
        kept_G=batch.size_G > 0,
        mean_G=batch.mean_G,
        size_G=batch.size_G.astype(jnp.int32),
        deficit_G=jnp.zeros_like(ones_G),
        scale_G=ones_G,
        capped_G=batch.size_G < 0,
    )


def _standardised(
    batch: _Batch, value_N: jax.Array, among_N: jax.Array, *, ddof: int, epsilon: float
) -> jax.Array:
    """(x − mean) / (std + ε) over the rows of a group in `among_N`; 0 elsewhere and where they are ≤ ddof."""
    among = among_N.astype(jnp.float32)
    count_G = batch.sums(among)
    mean_G = batch.sums(jnp.where(among_N, value_N, 0.0)) / jnp.maximum(count_G, 1.0)
    centred_N = jnp.where(among_N, value_N - batch.rows(mean_G), 0.0)
    variance_G = batch.sums(centred_N**2) / jnp.maximum(count_G - ddof, 1.0)
    spread_G = variance_G > 0  # √ has no derivative at 0
    std_G = jnp.where(spread_G, jnp.sqrt(jnp.where(spread_G, variance_G, 1.0)), 0.0)
    return jnp.where(batch.rows(count_G) > ddof, centred_N / (batch.rows(std_G) + epsilon), 0.0)


def grpo(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
    ddof: int = 0,
    epsilon: float = 1e-6,
) -> GroupAdvantages:
    """(R − R̄) / (std + ε). Groups with no more than `ddof` members get 0. Source: arXiv 2402.03300."""
    batch = _prepare(reward_N, passed_N, group_id_N, valid_N, external_N, num_groups=num_groups)
    return _result(batch, _standardised(batch, batch.reward_N, batch.valid_N, ddof=ddof, epsilon=epsilon))


def trl(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
) -> GroupAdvantages:
    """TRL 1.16, `scale_rewards="group"`: divisor n − 1, ε = 1e-4, a group of one gets 0."""
    return grpo(
        reward_N, passed_N, quality_N, group_id_N, valid_N, external_N, graded_G,
        num_groups=num_groups, ddof=1, epsilon=1e-4,
    )  # fmt: skip


def verl(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
) -> GroupAdvantages:
    """verl 0.9.1, `grpo` and `grpo_vectorized`: divisor n − 1, ε = 1e-6; a group of one keeps its reward."""
    batch = _prepare(reward_N, passed_N, group_id_N, valid_N, external_N, num_groups=num_groups)
    several_N = _standardised(batch, batch.reward_N, batch.valid_N, ddof=1, epsilon=1e-6)
    return _result(batch, jnp.where(batch.rows(batch.size_G) == 1, batch.reward_N / (1.0 + 1e-6), several_N))


def dr_grpo(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
) -> GroupAdvantages:
    """R − R̄. Source: arXiv 2503.20783."""
    batch = _prepare(reward_N, passed_N, group_id_N, valid_N, external_N, num_groups=num_groups)
    return _result(batch, batch.centred())


def rloo(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
) -> GroupAdvantages:
    """R_i − mean of the others = n/(n − 1) (R_i − R̄); a group of one gets 0. Source: arXiv 2402.14740."""
    batch = _prepare(reward_N, passed_N, group_id_N, valid_N, external_N, num_groups=num_groups)
    factor_G = batch.size_G / jnp.maximum(batch.size_G - 1.0, 1.0)
    return _result(batch, batch.rows(factor_G) * batch.centred())


def gopo(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
) -> GroupAdvantages:
    """Rank in the group, spread evenly over [−2, 2]; ties share the middle of their places; one member: 0."""
    batch = _prepare(reward_N, passed_N, group_id_N, valid_N, external_N, num_groups=num_groups)
    rows = batch.reward_N.shape[0]
    group_N = jnp.where(batch.valid_N, batch.group_id_N, num_groups)
    order_N = jnp.lexsort((batch.reward_N, group_N))
    group_sorted, reward_sorted = group_N[order_N], batch.reward_N[order_N]
    place_N = jnp.arange(rows, dtype=jnp.int32)
    new_group_N = jnp.concatenate((jnp.ones(1, bool), group_sorted[1:] != group_sorted[:-1]))[:rows]
    new_tie_N = (
        new_group_N | jnp.concatenate((jnp.ones(1, bool), reward_sorted[1:] != reward_sorted[:-1]))[:rows]
    )
    start_N = jax.lax.cummax(jnp.where(new_group_N, place_N, 0))
    tie_N = jnp.cumsum(new_tie_N, dtype=jnp.int32) - 1
    first_T = group_sum(
        (place_N * new_tie_N.astype(jnp.int32)).astype(jnp.float32), tie_N, num_groups=max(rows, 1)
    )
    length_T = group_sum(jnp.ones_like(reward_sorted), tie_N, num_groups=max(rows, 1))
    rank_sorted = (first_T + (length_T - 1.0) / 2.0)[tie_N] - start_N.astype(jnp.float32)
    rank_N = jnp.zeros_like(batch.reward_N).at[order_N].set(rank_sorted)
    size_N = batch.rows(batch.size_G)
    spread_N = -2.0 + 4.0 * rank_N / jnp.maximum(size_N - 1.0, 1.0)
    return _result(batch, jnp.where(size_N > 1, spread_N, 0.0))


def papo(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
    epsilon: float = 1e-6,
) -> GroupAdvantages:
    """A_out + (p − mean_C p) / std_C p on the correct set C of graded groups.

    p is `quality_N`, A_out is `grpo`.
    """
    batch = _prepare(reward_N, passed_N, group_id_N, valid_N, external_N, num_groups=num_groups)
    outcome_N = _standardised(batch, batch.reward_N, batch.valid_N, ddof=0, epsilon=epsilon)
    quality_N = jnp.asarray(quality_N).astype(jnp.float32)
    graded_N = batch.rows(jnp.asarray(graded_G).astype(bool))
    correct_N = batch.passed_N & graded_N
    quality_N = jnp.where(correct_N & jnp.isfinite(quality_N), quality_N, 0.0)
    return _result(batch, outcome_N + _standardised(batch, quality_N, correct_N, ddof=0, epsilon=epsilon))


def edas(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
    *,
    num_groups: int,
) -> GroupAdvantages:
    """Diversity shaping of failures: R − R̄ weighted by 2 − d, then rescaled to the failures' total.

    d in [0, 1], read from `quality_N` on failed rows of graded groups, is how unlike the group's other
    failures a failure is; the usual ones are blamed up to twice as much as the unusual.
    """
    batch = _prepare(reward_N, passed_N, group_id_N, valid_N, external_N, num_groups=num_groups)
    centred_N = batch.centred()
    shaped_N = batch.valid_N & ~batch.passed_N & batch.rows(jnp.asarray(graded_G).astype(bool))
    diversity_N = jnp.clip(jnp.nan_to_num(jnp.asarray(quality_N).astype(jnp.float32)), 0.0, 1.0)
    weighted_N = jnp.where(shaped_N, (2.0 - diversity_N) * centred_N, 0.0)
    before_G, after_G = batch.sums(jnp.where(shaped_N, centred_N, 0.0)), batch.sums(weighted_N)
    some_G = jnp.abs(after_G) > _TINY
    factor_N = batch.rows(jnp.where(some_G, before_G, 0.0) / jnp.where(some_G, after_G, 1.0))
    return _result(batch, jnp.where(shaped_N & batch.rows(some_G), factor_N * weighted_N, centred_N))


ESTIMATORS: dict[str, Callable[..., GroupAdvantages]] = {
    "grpo": grpo,
    "trl": trl,
    "verl": verl,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "gopo": gopo,
    "papo": papo,
    "edas": edas,
}
"""Every estimator here by the name the comparison uses."""
