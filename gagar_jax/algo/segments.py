"""Sums over groups named by id, and reading them back: the only place that scatters and gathers.

The mathematics that uses them lives in `advantage.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def group_sums(columns: tuple[jax.Array, ...], group_id_N: jax.Array, *, num_groups: int) -> tuple[jax.Array, ...]:
    """Σ of each column over the rows of each group.

    Args:
      columns: float32 arrays of shape [N].
      group_id_N: int32; rows with an id outside [0, num_groups) are left out.
      num_groups: static number of groups G.

    Returns:
      As many float32 arrays of shape [G].
    """
    sums_GC = jax.ops.segment_sum(jnp.stack(columns, axis=-1), group_id_N, num_groups)
    return tuple(sums_GC[:, c] for c in range(len(columns)))


def to_rows(columns: tuple[jax.Array, ...], group_id_N: jax.Array) -> tuple[jax.Array, ...]:
    """Each row's value of its group's columns; rows of no group read 0.

    Args:
      columns: arrays of shape [G].
      group_id_N: int32 ids.

    Returns:
      As many arrays of shape [N], dtypes kept.
    """
    return tuple(column_G.at[group_id_N].get(mode="fill", fill_value=0) for column_G in columns)
