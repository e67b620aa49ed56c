"""Reward and advantage shaping of the industrial recipe: the length penalty and the segment penalty.

Both happen around `group_advantages`: the first changes rewards before it, the second advantages after it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gagar_jax.algo.segments import group_sum, to_rows

_TINY = 1e-18


def length_penalty(
    reward_N: jax.Array,
    passed_N: jax.Array,
    length_N: jax.Array,
    group_id_N: jax.Array,
    valid_N: jax.Array,
    *,
    num_groups: int,
    strength: float = 0.2,
    slack: float = 0.0,
    span: float = 1.0,
    power: float = 1.5,
    quantile: float = 0.3,
    min_pass_rate: float = 0.5,
) -> jax.Array:
    """R − 1[passed] · X · clip((ℓ/ℓ* − 1 − δ)/(s − δ), 0, 1)^γ, in groups with a high enough pass rate.

    ℓ* is a quantile (linear interpolation) of the lengths of the group's passed members.

    Args:
      reward_N: float32.
      passed_N: bool; mark external rows as failed.
      length_N: tokens the trajectory generated, at least 0.
      group_id_N: int32 ids; outside [0, num_groups) is padding.
      valid_N: bool.
      num_groups: static number of groups G.
      strength: X, the most a reward can lose.
      slack: δ, how much longer than ℓ* (as a share of it) is free.
      span: s, the excess at which all of X is lost; above `slack`.
      power: γ, at least 1.
      quantile: which quantile ℓ* is, in [0, 1].
      min_pass_rate: the pass rate a group must exceed.

    Returns:
      reward_N, float32; unchanged on failed, invalid and padding rows. Source: MiMo-V2.6, arXiv 2610.11959.

    Raises:
      ValueError: `span` is not above `slack`.
    """
    if span <= slack:
        raise ValueError(f"span {span} must be above slack {slack}")
    reward_N, length_N = jnp.asarray(reward_N).astype(jnp.float32), jnp.asarray(length_N).astype(jnp.float32)
    group_id_N = jnp.asarray(group_id_N).astype(jnp.int32)
    valid_N = jnp.asarray(valid_N) & (group_id_N >= 0) & (group_id_N < num_groups)
    passed_N = jnp.asarray(passed_N) & valid_N

    def sums(column_N: jax.Array) -> jax.Array:
        return group_sum(column_N.astype(jnp.float32), group_id_N, num_groups=num_groups)

    size_G, passes_G = sums(valid_N), sums(passed_N)
    target_G = _quantiles(length_N, passed_N, group_id_N, passes_G, quantile)
    applies_G = (passes_G > min_pass_rate * size_G) & (target_G > 0)
    target_N, applies_N = (to_rows(x_G[:, None], group_id_N)[0] for x_G in (target_G, applies_G))
    applies_N = applies_N & passed_N
    ratio_N = jnp.where(applies_N, length_N, 1.0) / jnp.where(applies_N, target_N, 1.0)
    excess_N = jnp.clip((ratio_N - 1.0 - slack) / (span - slack), 0.0, 1.0)
    return jnp.where(applies_N, reward_N - strength * excess_N**power, reward_N)


def _quantiles(
    value_N: jax.Array, among_N: jax.Array, group_id_N: jax.Array, count_G: jax.Array, quantile: float
) -> jax.Array:
    """The quantile of the selected rows' values in each group; 0 where none is selected."""
    num_groups, rows = count_G.shape[0], value_N.shape[0]
    order_N = jnp.lexsort((value_N, jnp.where(among_N, group_id_N, num_groups)))
    sorted_N = value_N[order_N]
    count_G = count_G.astype(jnp.int32)
    start_G = jnp.cumsum(count_G) - count_G
    at_G = quantile * jnp.maximum(count_G - 1, 0).astype(jnp.float32)
    low_G = jnp.floor(at_G).astype(jnp.int32)
    high_G = jnp.minimum(low_G + 1, jnp.maximum(count_G - 1, 0))
    low_value_G, high_value_G = (
        sorted_N.at[jnp.minimum(start_G + x_G, rows - 1)].get(mode="clip") for x_G in (low_G, high_G)
    )
    between_G = low_value_G + (at_G - low_G.astype(jnp.float32)) * (high_value_G - low_value_G)
    return jnp.where(count_G > 0, between_G, 0.0)


def segment_penalty(
    advantage: jax.Array, malformed: jax.Array, weight: jax.Array, *, kappa: float = 2.0
) -> jax.Array:
    """Penalises malformed segments and gives both signs back the totals they had.

    On malformed elements a positive advantage becomes 0 and a negative one is multiplied by κ; then the
    positive ones are rescaled together, and so are the negative ones, until Σ w·A over each sign is what it
    was. A sign with nothing left to rescale (all its elements malformed and positive) keeps 0. The totals
    are those of the arrays given: shape the whole batch before splitting it.

    Args:
      advantage: float32, any shape: one per token (or per segment).
      malformed: bool, same shape: in a malformed tool call.
      weight: float32 or bool, same shape: loss weights, or the mask.
      kappa: at least 1.

    Returns:
      Advantages of the same shape. Source: MiMo-V2.6, arXiv 2610.11959.
    """
    weight = weight.astype(jnp.float32)
    live = weight > 0
    advantage = jnp.where(live, advantage.astype(jnp.float32), 0.0)
    shaped = jnp.where(malformed, jnp.where(advantage > 0, 0.0, kappa * advantage), advantage)
    for positive in (True, False):
        before = jnp.sum(jnp.where((advantage > 0) == positive, weight * advantage, 0.0))
        side = (shaped > 0) == positive
        after = jnp.sum(jnp.where(side, weight * shaped, 0.0))
        some = jnp.abs(after) > _TINY
        shaped = jnp.where(side & some, shaped * (before / jnp.where(some, after, 1.0)), shaped)
    return shaped
