"""GAGAR's advantages: one group's arithmetic in the paper's order, for any number of ragged groups at once.

Rewards, verdicts and the loss live elsewhere; how sums over groups are computed lives in `segments.py`.

Ours, beyond the paper:
- a reward that is not finite is no reward: its trajectory counts as invalid;
- a coefficient of a passed trajectory outside (0, 1] voids its group's verdict: the group is ungraded;
- positive advantages that sum to less than 1e-18 are a zero denominator;
- binary rewards take one pass over the rows instead of two (Eq. 4: its sums follow from the first's).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from gagar_jax.algo.segments import group_counts, group_sums, likely, to_rows

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """The inputs. What follows from them is computed where it is read: storing it costs more."""

    reward_N: jax.Array
    outcome_N: jax.Array  # the tests' verdict
    quality_N: jax.Array
    group_id_N: jax.Array
    healthy_N: jax.Array  # the infrastructure did not fail
    external_N: jax.Array
    num_groups: int = dataclasses.field(metadata={"static": True})

    def valid(self) -> jax.Array:
        """Step 1: broken episodes, padding and rewards that are not finite leave."""
        known_N = (self.group_id_N >= 0) & (self.group_id_N < self.num_groups)
        return self.healthy_N & known_N & (jnp.isfinite(self.reward_N) | self.external_N)

    def reward(self) -> jax.Array:
        """Step 2: an external row's reward is 0. So is, here, an invalid row's."""
        return jnp.where(self.valid() & ~self.external_N, self.reward_N, 0.0)

    def passed(self) -> jax.Array:
        """Step 2: an external row has failed."""
        return self.outcome_N & self.valid() & ~self.external_N

    def binary(self) -> jax.Array:
        """Whether the reward is exactly 1 for passed and 0 for the rest."""
        return self.reward() == self.passed().astype(jnp.float32)

    def proper(self) -> jax.Array:
        return (self.quality_N > 0) & (self.quality_N <= 1)

    def coefficient(self) -> jax.Array:
        return jnp.where(self.proper(), self.quality_N, 1.0)

    def quality(self) -> jax.Array:
        """f of the passed; −∞ where it is void."""
        return jnp.where(self.passed(), jnp.where(self.proper(), self.quality_N, -jnp.inf), 0.0)


class _Sums(NamedTuple):
    """Per group, float32."""

    size_G: jax.Array
    passes_G: jax.Array
    mean_G: jax.Array
    gain_G: jax.Array  # Σ_P A⁺
    credit_G: jax.Array  # Σ_P f A⁺; −∞ where a coefficient is void
    loss_G: jax.Array  # Σ_P min(A, 0), of shaped rewards
    error_G: jax.Array  # Σ A, what is left of 0 by rounding the mean


def group_advantages(
    reward_N: ArrayLike,
    passed_N: ArrayLike,
    quality_N: ArrayLike,
    group_id_N: ArrayLike,
    valid_N: ArrayLike,
    external_N: ArrayLike,
    graded_G: ArrayLike,
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
      num_groups: static number of groups G, at least 1.
      mode: "none" is binary GRPO without a standard deviation, "downweight" discounts and gives nothing
        back (the paper's unstable ablation), "sum_preserving" is GAGAR.
      lambda_max: cap of λ, at least 1.

    Returns:
      `GroupAdvantages`. Finite for every input, and so are its gradients.

    Raises:
      ValueError: unknown mode or no groups.
      AssertionError: shapes that do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> yes, no = jnp.ones(4, bool), jnp.zeros(4, bool)
      >>> out = group_advantages(
      ...     jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.array([True, True, False, False]),
      ...     jnp.array([1.0, 0.5, 1.0, 1.0]), jnp.zeros(4, int), yes, no, jnp.ones(1, bool), num_groups=1)
      >>> [round(float(a), 3) for a in out.advantage_N]
      [0.667, 0.333, -0.5, -0.5]
    """
    if mode not in ("none", "downweight", "sum_preserving"):
        raise ValueError(f"mode {mode!r}: expected 'none', 'downweight' or 'sum_preserving'")
    if num_groups < 1:
        raise ValueError(f"num_groups must be at least 1, got {num_groups}")
    inputs = [
        jnp.asarray(x) for x in (reward_N, passed_N, quality_N, group_id_N, valid_N, external_N, graded_G)
    ]
    chex.assert_rank(inputs, 1)
    chex.assert_equal_shape(inputs[:-1])
    chex.assert_shape(inputs[-1], (num_groups,))
    dtypes = (jnp.float32, bool, jnp.float32, jnp.int32, bool, bool, bool)
    inputs = [x.astype(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    compute = functools.partial(_advantages, num_groups=num_groups, mode=mode, lambda_max=lambda_max)
    # Scatters have no rule for explicitly sharded axes: the compiler takes those; rows stay as they came.
    sharding = jax.typeof(inputs[0]).sharding
    if not sharding.mesh.explicit_axes:
        return compute(*inputs)
    by_row, everywhere = (NamedSharding(sharding.mesh, spec) for spec in (sharding.spec, P()))
    by_name = {name: by_row if name.endswith("_N") else everywhere for name in GroupAdvantages._fields}
    out = GroupAdvantages(**by_name)  # type: ignore[arg-type]
    return jax.sharding.auto_axes(compute, out_sharding=out)(*inputs)


def _advantages(
    reward_N: jax.Array,
    passed_N: jax.Array,
    quality_N: jax.Array,
    group_id_N: jax.Array,
    valid_N: jax.Array,
    external_N: jax.Array,
    graded_G: jax.Array,
    *,
    num_groups: int,
    mode: Mode,
    lambda_max: float,
) -> GroupAdvantages:
    # Steps 1 and 2 are in `_Rows`.
    rows = _Rows(reward_N, passed_N, quality_N, group_id_N, valid_N, external_N, num_groups)
    # Steps 3 to 6, up to what every row must know of its group.
    cap = jnp.asarray(lambda_max, jnp.float32)
    table_G3, groups = _group_statistics(mode, rows, graded_G, cap)
    mean_N, scale_N, centre_N = to_rows(table_G3, group_id_N)
    # A_i = R_i − R̄;  B_i = λ f_i A⁺_i for passed, A_i for failed;  A*_i = B_i − mean(B).
    shares_N = rows.passed() & (scale_N > 0)
    factor_N = jnp.where(shares_N, scale_N * rows.coefficient(), 1.0)
    shared_N = factor_N * jnp.maximum(rows.reward() - mean_N, jnp.where(shares_N, 0.0, -jnp.inf))
    trained_N = rows.valid() & (scale_N >= 0)
    return groups._replace(advantage_N=jnp.where(trained_N, shared_N - centre_N, 0.0), trained_N=trained_N)


def _counts(rows: _Rows, column: Callable[[_Rows], jax.Array]) -> tuple[jax.Array, ...]:
    """(size_G, passes_G, Σ of the column, whether all rewards are binary)."""

    def flags(rows: _Rows) -> tuple[jax.Array, jax.Array]:
        return rows.valid(), rows.passed()

    return group_counts(flags, column, _Rows.binary, rows, rows.group_id_N, num_groups=rows.num_groups)


def _of_any(rows: _Rows, size_G: jax.Array, passes_G: jax.Array, reward_G: jax.Array) -> _Sums:
    """Any rewards: a second pass. It sums the rounding error of the first's mean too, which is taken out."""
    mean_G = reward_G / jnp.maximum(size_G, 1.0)

    def columns(rows: _Rows) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        (mean_N,) = to_rows(mean_G[:, None], rows.group_id_N)
        centred_N = jnp.where(rows.valid(), rows.reward() - mean_N, 0.0)
        gain_N = jnp.where(rows.passed(), jnp.maximum(centred_N, 0.0), 0.0)
        credit_N = jnp.where(rows.passed() & ~rows.proper(), -jnp.inf, rows.coefficient() * gain_N)
        loss_N = jnp.where(rows.passed(), jnp.minimum(centred_N, 0.0), 0.0)
        return gain_N, credit_N, loss_N, centred_N

    sums = group_sums(columns, rows, rows.group_id_N, num_groups=rows.num_groups)
    return _Sums(size_G, passes_G, mean_G, *sums)


def _of_binary(size_G: jax.Array, passes_G: jax.Array, quality_G: jax.Array) -> _Sums:
    """Rewards that are exactly 1 for passed and 0 for the rest: the first pass has it all."""
    mean_G = passes_G / jnp.maximum(size_G, 1.0)
    # 0 · −∞ cannot be: a group with a void coefficient and mean 1 is dropped, but its sum must not be NaN.
    credit_G = quality_G * jnp.maximum(1.0 - mean_G, _TINY)
    zero_G = jnp.zeros_like(mean_G)
    return _Sums(size_G, passes_G, mean_G, passes_G * (1.0 - mean_G), credit_G, loss_G=zero_G, error_G=zero_G)


def _redistribution(
    sums: _Sums, graded_G: jax.Array, cap: jax.Array, mode: Mode
) -> tuple[jax.Array, GroupAdvantages]:
    """Steps 4 to 6 for every group.

    Returns:
      table_G3: mean; λ, or 0 where advantages stay as they are, or −1 where the group is dropped; mean of B.
      groups: the result, its two row fields still empty.
    """
    kept_G = (sums.passes_G > 0) & (sums.passes_G < sums.size_G)
    graded_G = graded_G & kept_G & (sums.credit_G > _TINY) & (mode != "none")
    credit_G = jnp.where(graded_G, sums.credit_G, 1.0)
    preserving_G = graded_G & (mode == "sum_preserving")
    capped_G = preserving_G & (sums.gain_G > cap * credit_G)
    # The quotient is only taken where it is used, so that gradients are finite.
    below_G = preserving_G & ~capped_G
    scale_G = jnp.where(below_G, sums.gain_G, 1.0) / jnp.where(below_G, credit_G, 1.0)
    scale_G = jnp.where(capped_G, cap, scale_G)
    # Σ B = Σ A + (λ Σ_P f A⁺ − Σ_P A⁺) − Σ_P min(A, 0): the group's sums are enough.
    members_G = jnp.maximum(sums.size_G, 1.0)
    given_G = jnp.where(preserving_G, scale_G * credit_G - sums.gain_G - sums.loss_G, 0.0)
    centre_G = (sums.error_G + given_G) / members_G
    share_G = jnp.where(kept_G, jnp.where(graded_G, scale_G, 0.0), -1.0)
    empty = jnp.zeros((0,))
    return jnp.stack((sums.mean_G, share_G, centre_G), axis=-1), GroupAdvantages(
        advantage_N=empty,
        trained_N=empty,
        kept_G=kept_G,
        mean_G=sums.mean_G + sums.error_G / members_G,
        size_G=sums.size_G.astype(jnp.int32),
        deficit_G=jnp.where(graded_G, sums.gain_G - credit_G, 0.0),
        scale_G=scale_G,
        capped_G=capped_G,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _group_statistics(
    mode: Mode, rows: _Rows, graded_G: jax.Array, cap: jax.Array
) -> tuple[jax.Array, GroupAdvantages]:
    """`_redistribution` after one pass or two. All ends in small tables that the rows then read."""
    # The first pass sums what its likely successor needs: coefficients if rewards look binary, else rewards.
    guess = likely(_Rows.binary, rows)

    def column(rows: _Rows) -> jax.Array:
        return jnp.where(guess, rows.quality(), rows.reward())

    size_G, passes_G, sum_G, binary = _counts(rows, column)

    def of_any() -> _Sums:
        reward_G = jax.lax.cond(guess, lambda: _rewards(rows), lambda: sum_G)
        return _of_any(rows, size_G, passes_G, reward_G)

    sums = jax.lax.cond(guess & binary, lambda: _of_binary(size_G, passes_G, sum_G), of_any)
    return _redistribution(sums, graded_G, cap, mode)


def _rewards(rows: _Rows) -> jax.Array:
    (reward_G,) = group_sums(lambda rows: (rows.reward(),), rows, rows.group_id_N, num_groups=rows.num_groups)
    return reward_G


@_group_statistics.defjvp
def _group_statistics_jvp(mode, primals, tangents):  # type: ignore[no-untyped-def]
    """One pass reads no rewards, so its own derivative would be wrong."""

    def general(rows: _Rows, graded_G: jax.Array, cap: jax.Array) -> tuple[jax.Array, GroupAdvantages]:
        size_G, passes_G, reward_G, _ = _counts(rows, _Rows.reward)
        return _redistribution(_of_any(rows, size_G, passes_G, reward_G), graded_G, cap, mode)

    return jax.jvp(general, primals, tangents)
