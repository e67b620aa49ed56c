"""Sums over groups named by id, and reading them back: the only place that scatters and gathers.

The mathematics that uses them lives in `advantage.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

R = TypeVar("R")  # a pytree of rows
C = TypeVar("C")  # a pytree that rows are folded into
Columns = tuple[jax.Array, ...]

_CELLS = 4096  # few large groups are summed as up to this many partial sums, which keeps float32 accurate
_BLOCK = 65_536  # rows a turn: a few columns of them fit a core's caches
_RADIX = 4096  # a packed count is the members plus this times the passes
_EXACT = 1 << 24  # float32 has every integer below


def group_sum(column_N: jax.Array, group_id_N: jax.Array, *, num_groups: int) -> jax.Array:
    """`group_sums` of one column that is there already."""
    return group_sums(lambda column_N: (column_N,), column_N, group_id_N, num_groups=num_groups)[0]


def group_sums(
    columns: Callable[[R], Columns], rows: R, group_id_N: jax.Array, *, num_groups: int
) -> Columns:
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
    return _sums_and(columns, _nothing, (), rows, group_id_N, num_groups=num_groups)[0]


def _nothing(carry: C, rows: Any) -> C:
    return carry


def _sums_and(
    columns: Callable[[R], Columns],
    beside: Callable[[C, R], C],
    initial: C,
    rows: R,
    group_id_N: jax.Array,
    *,
    num_groups: int,
) -> tuple[Columns, C]:
    """`group_sums` and, in the same reading of the rows, `beside` folded over them."""
    parts = _parts(group_id_N.shape[0], num_groups)

    def add(tables: Columns, added: Columns, id_N: jax.Array) -> Columns:
        if parts > 1:
            part_N = jax.lax.broadcasted_iota(jnp.int32, id_N.shape, 0) % parts
            id_N = jnp.where((id_N >= 0) & (id_N < num_groups), part_N * num_groups + id_N, -1)
        return tuple(
            x.at[id_N].add(c, mode="drop", wrap_negative_indices=False)
            for x, c in zip(tables, added, strict=True)
        )

    def empty(like: Columns) -> Columns:
        return tuple(jnp.zeros((parts * num_groups,), c.dtype) for c in like)

    def at_once(rows: R, group_id_N: jax.Array) -> tuple[Columns, C]:
        added = columns(rows)
        return add(empty(added), added, group_id_N), beside(initial, rows)

    def in_blocks(rows: R, group_id_N: jax.Array) -> tuple[Columns, C]:
        def add_block(carry: tuple[Columns, C], block: tuple[R, jax.Array]) -> tuple[Columns, C]:
            (tables, aside), (rows, id_N) = carry, block
            return add(tables, _paired(columns(rows)), id_N), beside(aside, rows)

        shapes = jax.eval_shape(columns, rows)
        start = (empty(jax.eval_shape(_paired, shapes)), initial)
        tables, aside = fold_rows(add_block, start, (rows, group_id_N), block=_BLOCK)
        return _unpaired(tables, shapes), aside

    sums, aside = _by_device(in_blocks, at_once, rows, group_id_N)
    while parts > 1:
        parts //= 2
        sums = tuple(x[: parts * num_groups] + x[parts * num_groups :] for x in sums)
    return sums, aside


def group_counts(
    flags: Callable[[R], tuple[jax.Array, jax.Array]],
    column: Callable[[R], jax.Array],
    check: Callable[[R], jax.Array],
    rows: R,
    group_id_N: jax.Array,
    *,
    num_groups: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """How many rows of each group are valid, how many passed, and Σ of a column: one reading of the rows.

    Both counts are packed into one float32. Where some group has thousands of members they may not fit,
    which shows, and the two are counted apart.

    Args:
      flags: (valid, passed) of a set of rows, bool; a passed row is valid.
      column: float32 column of a set of rows.
      check: bool of each of a set of rows.
      rows: a pytree of arrays of shape [N].
      group_id_N: int32; valid rows have ids in [0, num_groups).
      num_groups: static number of groups G.

    Returns:
      (size_G, passes_G, sum_G), float32, and whether every row passes the check.
    """

    def packed_and_column(rows: R) -> Columns:
        valid_N, passed_N = (flag_N.astype(jnp.float32) for flag_N in flags(rows))
        return valid_N + _RADIX * passed_N, column(rows)

    def apart(rows: R) -> Columns:
        valid_N, passed_N = (flag_N.astype(jnp.int32) for flag_N in flags(rows))
        return valid_N, passed_N

    def overall(carry: tuple[jax.Array, jax.Array], rows: R) -> tuple[jax.Array, jax.Array]:
        total, holds = carry
        return total + jnp.sum(flags(rows)[0], dtype=jnp.int32), holds & jnp.all(check(rows))

    start = (jnp.int32(0), jnp.array(True))
    (packed_G, sum_G), (total, holds) = _sums_and(
        packed_and_column, overall, start, rows, group_id_N, num_groups=num_groups
    )
    whole_G = packed_G.astype(jnp.int32)
    counts: Columns = (whole_G % _RADIX, whole_G // _RADIX)
    if group_id_N.shape[0] >= _RADIX:
        # Below _EXACT the sums are exact, and a size that ran over into the passes is missing here.
        fits = (jnp.max(packed_G) < _EXACT) & (jnp.sum(counts[0]) == total)
        counts = jax.lax.cond(
            fits, lambda: counts, lambda: group_sums(apart, rows, group_id_N, num_groups=num_groups)
        )
    return counts[0].astype(jnp.float32), counts[1].astype(jnp.float32), sum_G, holds


def likely(check: Callable[[R], jax.Array], rows: R) -> jax.Array:
    """Whether a check holds for all rows; where blocks pay, for the first block's, which costs nothing."""

    def first_block(rows: R) -> jax.Array:
        return jnp.all(check(jax.tree.map(lambda x: x[:_BLOCK], rows)))

    return _by_device(first_block, lambda rows: jnp.all(check(rows)), rows)


def fold_rows(add: Callable[[C, R], C], initial: C, rows: R, *, block: int) -> C:
    """`add(initial, rows)`, one block of rows after another.

    What `add` computes row by row then stays in a core's cache and is never stored for all rows: with
    millions of rows, storing it costs more than the sums.

    Args:
      add: folds a set of rows into the carry; any split of the rows must give the same result.
      initial: the carry to begin with.
      rows: a pytree of arrays of shape [N].
      block: rows a turn.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    blocks = count // block

    def turn(index: jax.Array, carry: C) -> C:
        return add(carry, jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * block, block), rows))

    carry = jax.lax.fori_loop(0, blocks, turn, initial)
    if count % block:
        carry = add(carry, jax.tree.map(lambda x: x[blocks * block :], rows))
    return carry


def _by_device(in_blocks: Callable[..., C], at_once: Callable[..., C], *operands: Any) -> C:
    """Many rows in blocks on a single CPU device. Not sharded rows: each turn would need a collective."""
    count = max(leaf.shape[0] for leaf in jax.tree.leaves(operands) if leaf.ndim)
    if count <= _BLOCK or jax.device_count() > 1:
        return at_once(*operands)
    return jax.lax.platform_dependent(*operands, cpu=in_blocks, default=at_once)


def _paired(columns: Columns) -> Columns:
    """Float32 columns two by two as complex numbers: a scatter is one serial loop, and then adds both."""
    floats = [c for c in columns if c.dtype == jnp.float32]
    pairs = [jax.lax.complex(a, b) for a, b in zip(floats[::2], floats[1::2], strict=False)]
    odd = floats[-1:] if len(floats) % 2 else []
    return (*pairs, *odd, *(c for c in columns if c.dtype != jnp.float32))


def _unpaired(sums: Columns, like: Columns) -> Columns:
    """The sums of `_paired(like)`, in the order of `like`."""
    floats = [part for x in sums if x.dtype == jnp.complex64 for part in (x.real, x.imag)]
    floats += [x for x in sums if x.dtype == jnp.float32]
    others = [x for x in sums if x.dtype not in (jnp.float32, jnp.complex64)]
    return tuple((floats if c.dtype == jnp.float32 else others).pop(0) for c in like)


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
