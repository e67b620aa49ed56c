"""Policy losses as sums over tokens, and the weights that make them means.

Every function returns numerators and denominators. The caller adds them over microbatches (`add`) and
devices and divides once, at the very end (`mean`), so no split of a batch changes its loss.

Loss weight of a token: `token_weights`. Several rows of one trajectory share its one vote (its advantage
is computed once, per trajectory); each of its generated tokens, in whatever row, weighs the same.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from gagar_jax.algo.advantage import GroupAdvantages
from gagar_jax.algo.segments import group_sum, to_rows

_LOG_RATIO_LIMIT = 20.0  # e²⁰ ≈ 5e8: a ratio beyond it is already absurd, and exp must not overflow


class LossSums(NamedTuple):
    """Σ over tokens of weight · quantity; divide by `weight` once, globally. `ratio_max` is a maximum."""

    loss: jax.Array
    weight: jax.Array
    entropy: jax.Array  # H(π), nats
    clipped: jax.Array  # tokens whose gradient the clip, cap or mask stops
    kl: jax.Array  # ratio − 1 − log ratio: an estimate of KL(behaviour ‖ policy) on sampled tokens
    ratio: jax.Array
    ratio_max: jax.Array  # over tokens with weight > 0; 0 without any


def zero_sums() -> LossSums:
    """The neutral element of `add`."""
    return LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields))


def add(a: LossSums, b: LossSums) -> LossSums:
    """Sums of two disjoint sets of tokens taken together."""
    merged = jax.tree.map(jnp.add, a, b)
    return merged._replace(ratio_max=jnp.maximum(a.ratio_max, b.ratio_max))


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight, and 0 (with zero gradient) where nothing has weight."""
    some = weight > 0
    return jnp.where(some, total, 0.0) / jnp.where(some, weight, 1.0)


def fan_out(
    advantages: GroupAdvantages, trajectory_id_BT: jax.Array, loss_mask_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Step 7: every generated token, in every row of its trajectory, carries the trajectory's advantage.

    Args:
      advantages: of N trajectories.
      trajectory_id_BT: int32 in [0, N); any other id is padding.
      loss_mask_BT: 1 on generated tokens, 0 on prompts, tool output and padding.

    Returns:
      (advantage_BT float32, mask_BT bool); the mask leaves out trajectories that are not trained on.
    """
    trajectories = advantages.advantage_N.shape[0]
    inside_BT = (trajectory_id_BT >= 0) & (trajectory_id_BT < trajectories)
    id_BT = jnp.where(inside_BT, trajectory_id_BT, 0)
    mask_BT = inside_BT & advantages.trained_N[id_BT] & (loss_mask_BT != 0)
    return jnp.where(mask_BT, advantages.advantage_N[id_BT], 0.0), mask_BT


def token_weights(
    mask_BT: jax.Array,
    trajectory_id_BT: jax.Array,
    group_id_N: jax.Array,
    *,
    num_groups: int,
    aggregation: Literal["token", "prompt"] = "token",
) -> jax.Array:
    """Weights w so that Σ w·l / Σ w is the wanted mean.

    token:  w = mask.                      Mean over all tokens of the batch.
    prompt: w = mask / (tokens of its group).  Mean inside each group, then over groups; Σ w counts groups.

    Compute them over the whole batch, before it is split: a group's tokens may lie in several microbatches.

    Args:
      mask_BT: bool, as from `fan_out`.
      trajectory_id_BT: int32 in [0, N); any other id is padding.
      group_id_N: int32 in [0, num_groups); any other id is padding.
      num_groups: static number of groups G.
      aggregation: "token" or "prompt".

    Returns:
      weight_BT, float32.
    """
    if aggregation not in ("token", "prompt"):
        raise ValueError(f"aggregation {aggregation!r}: expected 'token' or 'prompt'")
    weight_BT = mask_BT.astype(jnp.float32)
    if aggregation == "token":
        return weight_BT
    trajectory_id = trajectory_id_BT.astype(jnp.int32).reshape(-1)
    group_id_N = group_id_N.astype(jnp.int32)
    tokens_N = group_sum(weight_BT.reshape(-1), trajectory_id, num_groups=group_id_N.shape[0])
    tokens_G = group_sum(tokens_N, group_id_N, num_groups=num_groups)
    (tokens_N,) = to_rows(tokens_G[:, None], group_id_N)
    (tokens,) = to_rows(tokens_N[:, None], trajectory_id)
    # A token of no group belongs to no mean; one of a real group finds at least itself in the count.
    inside_N = (group_id_N >= 0) & (group_id_N < num_groups)
    inside_BT = jnp.append(inside_N, False).at[trajectory_id_BT].get(mode="fill", fill_value=False)
    return jnp.where(inside_BT, weight_BT / jnp.maximum(tokens.reshape(weight_BT.shape), 1.0), 0.0)


def policy_loss(
    logprob_BT: jax.Array,
    behaviour_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    weight_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    entropy_BT: jax.Array | None = None,
) -> LossSums:
    """The clipped surrogate with its own bound on each side.

    l = −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A),  r = π / μ.

    Args:
      logprob_BT: log π of the tokens, under the parameters being trained.
      behaviour_logprob_BT: log μ, recorded when they were sampled. No gradient flows into it.
      advantage_BT: float32. No gradient flows into it.
      weight_BT: from `token_weights` (or a mask); tokens with weight 0 may hold anything, NaN included.
      clip_low: in (0, 1].
      clip_high: above 0.
      entropy_BT: nats; summed with the same weights where given.

    Returns:
      `LossSums`. Source: PPO, arXiv 1707.06347; the asymmetric bound: DAPO, arXiv 2503.14476.
    """
    weight, log_ratio, advantage, _ = _prepare(logprob_BT, behaviour_logprob_BT, advantage_BT, weight_BT)
    ratio = jnp.exp(log_ratio)
    surrogate = ratio * advantage
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    return _sums(-jnp.minimum(surrogate, bounded), bounded < surrogate, log_ratio, weight, entropy_BT)


def truncated_policy_loss(
    logprob_BT: jax.Array,
    behaviour_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    weight_BT: jax.Array,
    *,
    ratio_cap: float = 2.0,
    entropy_BT: jax.Array | None = None,
) -> LossSums:
    """Policy gradient with truncated importance weights: l = −sg[min(r, ratio_cap)] A log π.

    Arguments as for `policy_loss`. Source: IMPALA, arXiv 1802.01561 (ρ̄); per token as in CISPO,
    arXiv 2506.13585.
    """
    weight, log_ratio, advantage, logprob = _prepare(
        logprob_BT, behaviour_logprob_BT, advantage_BT, weight_BT
    )
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    loss = -jnp.minimum(ratio, ratio_cap) * advantage * logprob
    return _sums(loss, ratio > ratio_cap, log_ratio, weight, entropy_BT)


def masked_policy_loss(
    logprob_BT: jax.Array,
    behaviour_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    weight_BT: jax.Array,
    *,
    ratio_low: float = 0.2,
    ratio_high: float = 5.0,
    entropy_BT: jax.Array | None = None,
) -> LossSums:
    """The industrial recipe: l = −sg[r] M A log π, with M = 0 where r is outside [ratio_low, ratio_high].

    Masked tokens stay in the denominator. Arguments as for `policy_loss`. Source: arXiv 2610.11959.
    """
    weight, log_ratio, advantage, logprob = _prepare(
        logprob_BT, behaviour_logprob_BT, advantage_BT, weight_BT
    )
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    outside = (ratio < ratio_low) | (ratio > ratio_high)
    loss = jnp.where(outside, 0.0, -ratio * advantage * logprob)
    return _sums(loss, outside, log_ratio, weight, entropy_BT)


def _prepare(
    logprob_BT: jax.Array, behaviour_logprob_BT: jax.Array, advantage_BT: jax.Array, weight_BT: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(weight, log ratio, advantage, log π) in float32; what weighs 0 is replaced before any arithmetic."""
    chex.assert_equal_shape((logprob_BT, behaviour_logprob_BT, advantage_BT, weight_BT))
    weight = jax.lax.stop_gradient(weight_BT.astype(jnp.float32))
    live = weight > 0

    def clean(x: jax.Array) -> jax.Array:
        return jnp.where(live, x.astype(jnp.float32), 0.0)

    logprob = clean(logprob_BT)
    log_ratio = logprob - jax.lax.stop_gradient(clean(behaviour_logprob_BT))
    log_ratio = jnp.clip(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return weight, log_ratio, jax.lax.stop_gradient(clean(advantage_BT)), logprob


def _sums(
    loss: jax.Array, clipped: jax.Array, log_ratio: jax.Array, weight: jax.Array, entropy: jax.Array | None
) -> LossSums:
    live = weight > 0
    log_ratio = jax.lax.stop_gradient(log_ratio)
    ratio = jnp.exp(log_ratio)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(weight * jnp.where(live, x.astype(jnp.float32), 0.0))

    return LossSums(
        loss=total(loss),
        weight=jnp.sum(weight),
        entropy=total(jnp.zeros_like(weight) if entropy is None else entropy),
        clipped=total(clipped),
        kl=total(ratio - 1.0 - log_ratio),
        ratio=total(ratio),
        ratio_max=jnp.max(jnp.where(live, ratio, 0.0), initial=0.0),
    )
