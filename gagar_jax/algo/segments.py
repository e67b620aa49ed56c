"""Sums over groups named by id, and reading them back: the only place that scatters and gathers.

The mathematics that uses them lives in `advantage.py`.

Speed on CPUs. A scatter there is one serial loop over rows whose cost hardly depends on how many columns a
row carries, so all columns are added in one scatter of rows; and rows are laid out a block at a time, in a
buffer that stays in cache, because laying out all of them costs more than adding them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_BLOCK = 8192  # rows laid out at once: 128 KiB of four columns, which fits a core's second-level cache
_CELLS = 4096  # few large groups are summed as up to this many partial sums, which keeps float32 accurate


def group_sums(columns: tuple[jax.Array, ...], group_id_N: jax.Array, *, num_groups: int) -> tuple[jax.Array, ...]:
    """Σ of each column over the rows of each group.

    Args:
      columns: arrays of shape [N]: float32, or bool to count.
      group_id_N: int32; rows with an id outside [0, num_groups) are left out.
      num_groups: static number of groups G.

    Returns:
      As many float32 arrays of shape [G].
    """
    rows = group_id_N.shape[0]
    partials = _partials(rows, num_groups)
    if partials > 1:
        cell_N = jax.lax.broadcasted_iota(jnp.int32, (rows,), 0) % partials
        inside_N = (group_id_N >= 0) & (group_id_N < num_groups)
        group_id_N = jnp.where(inside_N, cell_N * num_groups + group_id_N, -1)
    sums_GC = _row_scatter(columns, group_id_N, partials * num_groups)
    while partials > 1:  # pairwise: the error grows with the logarithm
        partials //= 2
        sums_GC = sums_GC[: partials * num_groups] + sums_GC[partials * num_groups :]
    return tuple(sums_GC[:, c] for c in range(len(columns)))


def to_rows(columns: tuple[jax.Array, ...], group_id_N: jax.Array) -> tuple[jax.Array, ...]:
    """Each row's value of its group's columns; rows of no group read 0.

    Args:
      columns: arrays of shape [G].
      group_id_N: int32 ids.

    Returns:
      As many arrays of shape [N], dtypes kept.
    """
    return tuple(
        column_G.at[group_id_N].get(mode="fill", fill_value=0, wrap_negative_indices=False) for column_G in columns
    )


def _partials(rows: int, num_groups: int) -> int:
    """How many partial sums a group is split into: a power of two, 1 for many small groups."""
    partials = 1
    while 2 * partials * num_groups <= _CELLS and rows >= 128 * partials * num_groups:
        partials *= 2
    return partials


def _row_scatter(columns: tuple[jax.Array, ...], id_N: jax.Array, size: int) -> jax.Array:
    """sums_GC by one scatter of rows; in cache-sized blocks on a single CPU device."""
    zeros_GC = jnp.zeros((size, len(columns)), jnp.float32)

    def whole(columns: tuple[jax.Array, ...], id_N: jax.Array) -> jax.Array:
        rows_NC = jnp.stack([c.astype(jnp.float32) for c in columns], axis=-1)
        return _add_rows(zeros_GC, id_N, rows_NC)

    # Blocks are a sequential loop over rows. Rows that are sharded must not go through it (every step would
    # need a collective), and other platforms scatter in parallel.
    if id_N.shape[0] <= _BLOCK or jax.device_count() > 1:
        return whole(columns, id_N)
    return jax.lax.platform_dependent(columns, id_N, cpu=lambda c, i: blocked_row_scatter(c, i, zeros_GC), default=whole)


def blocked_row_scatter(columns: tuple[jax.Array, ...], id_N: jax.Array, zeros_GC: jax.Array) -> jax.Array:
    """`zeros_GC` plus the rows, added block by block. Public for tests, which run on several devices."""
    blocks, rest = divmod(id_N.shape[0], _BLOCK)
    cut = blocks * _BLOCK

    def add(carry: tuple[jax.Array, jax.Array], block: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], None]:
        sums_GC, rows_BC = carry
        *columns, id_B = block
        for c, column in enumerate(columns):
            rows_BC = jax.lax.dynamic_update_slice(rows_BC, column.astype(jnp.float32)[:, None], (0, c))
        return (_add_rows(sums_GC, id_B, rows_BC), rows_BC), None

    head = tuple(x[:cut].reshape(blocks, _BLOCK) for x in (*columns, id_N))
    buffer_BC = jnp.zeros((_BLOCK, len(columns)), jnp.float32)
    (sums_GC, _), _ = jax.lax.scan(add, (zeros_GC, buffer_BC), head)
    if rest:
        tail = jnp.stack([c[cut:].astype(jnp.float32) for c in columns], axis=-1)
        sums_GC = _add_rows(sums_GC, id_N[cut:], tail)
    return sums_GC


def _add_rows(sums_GC: jax.Array, id_N: jax.Array, rows_NC: jax.Array) -> jax.Array:
    return sums_GC.at[id_N].add(rows_NC, mode="drop", wrap_negative_indices=False)
