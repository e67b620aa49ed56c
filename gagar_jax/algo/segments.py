"""Sums over groups named by id, and reading them back: the only place that scatters and gathers.

The mathematics that uses them lives in `advantage.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

R = TypeVar("R")  # a pytree of rows
C = TypeVar("C")  # a pytree that rows are folded into

_CELLS = 4096  # few large groups are summed as up to this many partial sums, which keeps float32 accurate
_BLOCK = 16_384  # rows a turn: a few columns of them fit a core's second-level cache
_HALF = 16  # bits of a packed counter


def group_sum(column_N: jax.Array, group_id_N: jax.Array, *, num_groups: int) -> jax.Array:
    """`group_sums` of one column that is there already."""
    return group_sums(lambda column_N: (column_N,), column_N, group_id_N, num_groups=num_groups)[0]


def group_sums(
    columns: Callable[[R], tuple[jax.Array, ...]], rows: R, group_id_N: jax.Array, *, num_groups: int
) -> tuple[jax.Array, ...]:
    """Σ of columns over the rows of each group.

    Groups of hundreds of rows and more are summed in parts that are added pairwise, so that the rounding
    error grows with the part, not with the group.

    Args:
      columns: float32 or int32 columns of a set of rows; row by row, as it may be given a block of them.
      rows: a pytree of arrays of shape [N].
      group_id_N: int32; rows with an id outside [0, num_groups) are left out.
      num_groups: static number of groups G, at least 1.

    Returns:
      One array of shape [G] for each column, in its dtype.
    """
    parts = _parts(group_id_N.shape[0], num_groups)

    def add(sums: tuple[jax.Array, ...], block: tuple[R, jax.Array]) -> tuple[jax.Array, ...]:
        block_rows, id_N = block
        if parts > 1:
            part_N = jax.lax.broadcasted_iota(jnp.int32, id_N.shape, 0) % parts
            id_N = jnp.where((id_N >= 0) & (id_N < num_groups), part_N * num_groups + id_N, -1)
        added = zip(sums, columns(block_rows), strict=True)
        return tuple(x.at[id_N].add(c, mode="drop", wrap_negative_indices=False) for x, c in added)

    dtypes = [c.dtype for c in jax.eval_shape(columns, rows)]
    sums = fold_rows(add, tuple(jnp.zeros((parts * num_groups,), d) for d in dtypes), (rows, group_id_N))
    while parts > 1:
        parts //= 2
        sums = tuple(x[: parts * num_groups] + x[parts * num_groups :] for x in sums)
    return sums


def group_counts(
    flags: Callable[[R], tuple[jax.Array, jax.Array]],
    column: Callable[[R], jax.Array],
    rows: R,
    group_id_N: jax.Array,
    *,
    num_groups: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many rows of each group are valid, how many passed, and Σ of a column, in two scatters.

    Both counts are packed into one int32, 16 bits each. Where some group has 2¹⁶ members that overflows,
    which shows in the total, and the two are counted apart.

    Args:
      flags: (valid, passed) of a set of rows, bool; a passed row is valid.
      column: float32 column of a set of rows.
      rows: a pytree of arrays of shape [N].
      group_id_N: int32; valid rows have ids in [0, num_groups).
      num_groups: static number of groups G.

    Returns:
      (size_G, passes_G, sum_G), float32.
    """

    def packed_and_column(rows: R) -> tuple[jax.Array, jax.Array]:
        valid_N, passed_N = (flag_N.astype(jnp.int32) for flag_N in flags(rows))
        return valid_N + (passed_N << _HALF), column(rows)

    def apart(rows: R) -> tuple[jax.Array, jax.Array]:
        valid_N, passed_N = (flag_N.astype(jnp.int32) for flag_N in flags(rows))
        return valid_N, passed_N

    def count(total: jax.Array, rows: R) -> jax.Array:
        return total + jnp.sum(flags(rows)[0], dtype=jnp.int32)

    packed_G, sum_G = group_sums(packed_and_column, rows, group_id_N, num_groups=num_groups)
    low_G = packed_G & ((1 << _HALF) - 1)
    counts = (low_G, jax.lax.shift_right_logical(packed_G, jnp.int32(_HALF)))
    if group_id_N.shape[0] >= 1 << _HALF:
        total = fold_rows(count, jnp.zeros((), jnp.int32), rows)
        counts = jax.lax.cond(
            jnp.sum(low_G) == total,
            lambda: counts,
            lambda: group_sums(apart, rows, group_id_N, num_groups=num_groups),
        )
    return counts[0].astype(jnp.float32), counts[1].astype(jnp.float32), sum_G


def fold_rows(add: Callable[[C, R], C], initial: C, rows: R, *, block: int | None = None) -> C:
    """`add(initial, rows)`; on a single CPU device one cache-sized block of rows after another.

    What `add` computes row by row then stays in cache, and is never stored for all rows at once: with
    millions of rows, storing it costs more than the sums. Sharded rows must not go through a loop (each turn
    would need a collective), and other platforms want all rows at once.

    Args:
      add: folds a set of rows into the carry; any split of the rows must give the same result.
      initial: the carry to begin with.
      rows: a pytree of arrays of shape [N].
      block: rows a turn; None decides by device.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    if block is None and (count <= _BLOCK or jax.device_count() > 1):
        return add(initial, rows)
    if block is None:
        blocked = functools.partial(fold_rows, add, block=_BLOCK)
        return jax.lax.platform_dependent(initial, rows, cpu=blocked, default=add)
    blocks = count // block
    head = jax.tree.map(lambda x: x[: blocks * block].reshape(blocks, block), rows)
    carry, _ = jax.lax.scan(lambda carry, turn: (add(carry, turn), None), initial, head)
    if count % block:
        carry = add(carry, jax.tree.map(lambda x: x[blocks * block :], rows))
    return carry


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
