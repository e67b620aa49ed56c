"""Sums over groups and reading them back, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from gagar_jax.algo import segments


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (100, 7), (5000, 3), (5000, 4000), (300_000, 2)])
def test_group_sums(rows, groups):
    rng = np.random.default_rng(rows)
    group_id = rng.integers(-2, groups + 2, rows).astype(np.int32)
    column = rng.standard_normal(rows).astype(np.float32)
    inside = (group_id >= 0) & (group_id < groups)
    expected = np.bincount(group_id[inside], column[inside].astype(np.float64), minlength=groups)
    sums = segments.group_sums(jnp.asarray(column), jnp.asarray(group_id), num_groups=groups)
    assert sums.shape == (groups,)
    np.testing.assert_allclose(sums, expected, rtol=2e-6, atol=2e-5)


def test_large_groups_do_not_lose_precision():
    """0.9 a million times: with a single float32 accumulator it is off by 0.1 % and more."""
    total = segments.group_sums(jnp.full(1_000_000, 0.9), jnp.zeros(1_000_000, jnp.int32), num_groups=1)
    assert float(total[0]) == pytest.approx(1_000_000 * float(np.float32(0.9)), rel=5e-6)


@pytest.mark.parametrize("rows", [1000, 200_000])  # the packed counter overflows in the second
def test_group_counts(rows):
    rng = np.random.default_rng(0)
    group_id = np.where(rng.random(rows) < 0.9, 0, rng.integers(0, 5, rows)).astype(np.int32)
    valid = rng.random(rows) < 0.95
    passed = valid & (rng.random(rows) < 0.5)
    size, passes = segments.group_counts(
        jnp.asarray(valid), jnp.asarray(passed), jnp.asarray(group_id), num_groups=5
    )
    np.testing.assert_array_equal(size, np.bincount(group_id, valid, 5))
    np.testing.assert_array_equal(passes, np.bincount(group_id, passed, 5))


@pytest.mark.parametrize("size", [65_535, 65_536, 131_072])
def test_group_counts_at_the_edge_of_the_packing(size):
    rows = size + 10
    valid = jnp.arange(rows) < size
    got = segments.group_counts(valid, valid, jnp.zeros(rows, jnp.int32), num_groups=2)
    np.testing.assert_array_equal(np.stack(got), [[size, 0], [size, 0]])


def test_to_rows():
    table = jnp.asarray(np.arange(8, dtype=np.float32).reshape(4, 2))
    left, right = segments.to_rows(table, jnp.array([3, 0, 3, 1], jnp.int32))
    np.testing.assert_array_equal(left, [6, 0, 6, 2])
    np.testing.assert_array_equal(right, [7, 1, 7, 3])
