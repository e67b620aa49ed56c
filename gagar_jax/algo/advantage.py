"""GAGAR's advantages: one group's arithmetic in the paper's order, for any number of ragged groups at once.

Rewards, verdicts and the loss live elsewhere; how sums over groups are computed lives in `segments.py`.

Ours, beyond the paper:
- a reward that is not finite is no reward: its trajectory counts as invalid;
- a coefficient of a passed trajectory outside (0, 1] voids its group's verdict: the group is ungraded;
- positive advantages that sum to less than 1e-18 are a zero denominator.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from gagar_jax.algo.segments import group_sums, to_rows

Mode = Literal["none", "downweight", "sum_preserving"]
_TINY = 1e-18  # below it, squares in the derivative of a quotient leave float32


class GroupAdvantages(NamedTuple):
    """What a batch's groups came to. Dropped groups: advantage 0, deficit 0, scale 1, not capped."""

    advantage_N: jax.Array  # float32; one per trajectory, 0 where it is not trained on
    trained_N: jax.Array  # bool; valid member of a kept group: its tokens are in the loss and its denominator
    kept_G: jax.Array  # bool; at least two valid members and both outcomes
    mean_G: jax.Array  # float32; mean reward of the valid members (0 without any)
    size_G: jax.Array  # int32; valid members
    deficit_G: jax.Array  # float32; D, what discounting alone takes out
    scale_G: jax.Array  # float32; λ
    capped_G: jax.Array  # bool; λ was cut at lambda_max


def group_advantages(
    reward_N: jax.Array,
    passed_N: jax.Array,
    quality_N: jax.Array,
    group_id_N: jax.Array,
    valid_N: jax.Array,
    external_N: jax.Array,
    graded_G: jax.Array,
    *,
    num_groups: int,
    mode: Mode = "sum_preserving",
    lambda_max: float = 1.5,
) -> GroupAdvantages:
    """Quality-aware group advantages (GAGAR, arXiv 2609.32577, Eq. 1, 2, 7 and 8).

    A_i = R_i − R̄;  λ = min(Σ_P A⁺ / Σ_P f A⁺, λ_max);  B_i = λ f_i A⁺_i for passed i, A_i for failed;
    A*_i = B_i − mean(B).

    Args:
      reward_N: any real dtype, read as float32; ignored on invalid and external rows.
      passed_N: bool, the tests' verdict.
      quality_N: f in (0, 1]; read only on passed rows of graded groups.
      group_id_N: integer ids, in any order; outside [0, num_groups) is padding.
      valid_N: bool, false where the infrastructure failed or the evaluation is broken.
      external_N: bool, the answer was copied from outside: counts as failed with reward 0.
      graded_G: bool, the group has a usable verdict.
      num_groups: static number of groups G.
      mode: "none" is binary GRPO without a standard deviation, "downweight" discounts and gives nothing
        back (the paper's unstable ablation), "sum_preserving" is GAGAR.
      lambda_max: cap of λ, at least 1.

    Returns:
      `GroupAdvantages`. Finite for every input, and so are its gradients.
    """
    if mode not in ("none", "downweight", "sum_preserving"):
        raise ValueError(f"mode {mode!r}: expected 'none', 'downweight' or 'sum_preserving'")
    rows = [jnp.asarray(x) for x in (reward_N, passed_N, quality_N, group_id_N, valid_N, external_N)]
    chex.assert_rank(rows, 1)
    chex.assert_equal_shape(rows)
    chex.assert_shape(graded_G, (num_groups,))
    reward_N, passed_N, quality_N, group_id_N, valid_N, external_N = rows
    group_id_N = group_id_N.astype(jnp.int32)

    # Steps 1 and 2: invalid rows leave, external rows fail.
    reward_N = jnp.where(external_N, 0.0, reward_N.astype(jnp.float32))
    valid_N = valid_N & jnp.isfinite(reward_N) & (group_id_N >= 0) & (group_id_N < num_groups)
    reward_N = jnp.where(valid_N, reward_N, 0.0)
    passed_N = passed_N & valid_N & ~external_N

    # Step 3: statistics. The rounding error of this mean is taken out by the second pass.
    size_G, reward_G, passes_G = group_sums((valid_N, reward_N, passed_N), group_id_N, num_groups=num_groups)
    members_G = jnp.maximum(size_G, 1.0)
    mean_G = reward_G / members_G
    # Step 4: dynamic sampling.
    kept_G = (passes_G > 0) & (passes_G < size_G)

    (mean_N,) = to_rows((mean_G,), group_id_N)
    centred_N = jnp.where(valid_N, reward_N - mean_N, 0.0)
    gain_N = jnp.where(passed_N, jnp.maximum(centred_N, 0.0), 0.0)
    quality_N = quality_N.astype(jnp.float32)
    proper_N = (quality_N > 0) & (quality_N <= 1)
    credit_N = jnp.where(proper_N, quality_N, 1.0) * gain_N
    # A void coefficient puts −∞ into its group's sum, and no comparison below lets such a group be graded.
    voided_N = jnp.where(passed_N & ~proper_N, -jnp.inf, credit_N)
    failed_N = jnp.where(passed_N, 0.0, centred_N)
    error_G, gain_G, credit_G, failed_G = group_sums(
        (centred_N, gain_N, voided_N, failed_N), group_id_N, num_groups=num_groups
    )

    # Step 5: redistribution. The quotient is only taken where it is used, so that gradients are finite.
    graded_G = jnp.asarray(graded_G) & kept_G & (credit_G > _TINY) & (mode != "none")
    credit_G = jnp.where(graded_G, credit_G, 1.0)
    capped_G = graded_G & (gain_G > lambda_max * credit_G) & (mode == "sum_preserving")
    shared_G = graded_G & ~capped_G & (mode == "sum_preserving")
    scale_G = jnp.where(shared_G, gain_G, jnp.where(capped_G, lambda_max, 1.0)) / jnp.where(shared_G, credit_G, 1.0)
    # Step 6: centring. Σ B follows from the group's sums; elsewhere only the mean's rounding error is taken out.
    centre = graded_G & (mode == "sum_preserving")
    centre_G = jnp.where(centre, scale_G * credit_G + failed_G, error_G) / members_G

    kept_N, graded_N, scale_N, centre_N = to_rows((kept_G, graded_G, scale_G, centre_G), group_id_N)
    trained_N = kept_N & valid_N
    redistributed_N = jnp.where(passed_N & graded_N, scale_N * credit_N, centred_N)
    return GroupAdvantages(
        advantage_N=jnp.where(trained_N, redistributed_N - centre_N, 0.0),
        trained_N=trained_N,
        kept_G=kept_G,
        mean_G=mean_G + error_G / members_G,
        size_G=size_G.astype(jnp.int32),
        deficit_G=jnp.where(graded_G, gain_G - credit_G, 0.0),
        scale_G=scale_G,
        capped_G=capped_G,
    )
