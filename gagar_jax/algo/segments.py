"""Sums over groups named by id, and reading them back: the only place that scatters and gathers.

The mathematics that uses them lives in `advantage.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_CELLS = 4096  # few large groups are summed as up to this many partial sums, which keeps float32 accurate
_HALF = 16  # bits of a packed counter


def group_sums(column_N: jax.Array, group_id_N: jax.Array, *, num_groups: int) -> jax.Array:
    """Σ of a column over the rows of each group.

    Groups of hundreds of rows and more are summed in parts that are added pairwise, so that the rounding
    error grows with the part, not with the group.

    Args:
      column_N: float32 or int32.
      group_id_N: int32; rows with an id outside [0, num_groups) are left out.
      num_groups: static number of groups G, at least 1.

    Returns:
      sums_G, the column's dtype.
    """
    rows = group_id_N.shape[0]
    parts = _parts(rows, num_groups) if jnp.issubdtype(column_N.dtype, jnp.floating) else 1
    if parts > 1:
        part_N = jax.lax.broadcasted_iota(jnp.int32, (rows,), 0) % parts
        inside_N = (group_id_N >= 0) & (group_id_N < num_groups)
        group_id_N = jnp.where(inside_N, part_N * num_groups + group_id_N, -1)
    sums = jnp.zeros((parts * num_groups,), column_N.dtype)
    sums = sums.at[group_id_N].add(column_N, mode="drop", wrap_negative_indices=False)
    while parts > 1:
        parts //= 2
        sums = sums[: parts * num_groups] + sums[parts * num_groups :]
    return sums


def group_counts(
    valid_N: jax.Array, passed_N: jax.Array, group_id_N: jax.Array, *, num_groups: int
) -> tuple[jax.Array, jax.Array]:
    """How many rows of each group are valid, and how many passed: two counts for the price of one scatter.

    Both are packed into one int32, 16 bits each. Where some group has 2¹⁶ members that overflows, which shows
    in the total, and the two are counted apart.

    Args:
      valid_N: bool.
      passed_N: bool; a passed row is valid.
      group_id_N: int32; valid rows have ids in [0, num_groups).
      num_groups: static number of groups G.

    Returns:
      (size_G, passes_G), float32.
    """

    def count(flag_N: jax.Array) -> jax.Array:
        return group_sums(flag_N.astype(jnp.int32), group_id_N, num_groups=num_groups)

    both_N = valid_N.astype(jnp.int32) + (passed_N.astype(jnp.int32) << _HALF)
    packed_G = group_sums(both_N, group_id_N, num_groups=num_groups)
    low_G = packed_G & ((1 << _HALF) - 1)
    packed = (low_G, jax.lax.shift_right_logical(packed_G, jnp.int32(_HALF)))
    if valid_N.shape[0] >= 1 << _HALF:
        packed = jax.lax.cond(
            jnp.sum(low_G) == jnp.sum(valid_N, dtype=jnp.int32),
            lambda: packed,
            lambda: (count(valid_N), count(passed_N)),
        )
    return packed[0].astype(jnp.float32), packed[1].astype(jnp.float32)


def to_rows(table_GC: jax.Array, group_id_N: jax.Array) -> tuple[jax.Array, ...]:
    """Each row's values of its group, one array per column of the table.

    The columns of a group are neighbours in memory, so a row touches one cache line however many it reads.

    Args:
      table_GC: any dtype.
      group_id_N: int32 ids; a row of no group reads some group's values, so mask it.

    Returns:
      C arrays of shape [N].
    """
    columns = table_GC.shape[1]
    flat = table_GC.reshape(-1)
    return tuple(
        flat.at[group_id_N * columns + c].get(mode="clip", wrap_negative_indices=False)
        for c in range(columns)
    )


def _parts(rows: int, num_groups: int) -> int:
    """A power of two: 1 for many small groups, more where the average group has 128 rows or more."""
    parts = 1
    while 2 * parts * num_groups <= _CELLS and rows >= 128 * parts * num_groups:
        parts *= 2
    return parts
