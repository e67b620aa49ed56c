"""Sums over groups and reading them back, against NumPy."""

from __future__ import annotations

import subprocess
import sys

import jax
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
    sums = segments.group_sum(jnp.asarray(column), jnp.asarray(group_id), num_groups=groups)
    assert sums.shape == (groups,)
    np.testing.assert_allclose(sums, expected, rtol=2e-6, atol=2e-5)


def test_large_groups_do_not_lose_precision():
    """0.9 a million times: with a single float32 accumulator it is off by 0.1 % and more."""
    total = segments.group_sum(jnp.full(1_000_000, 0.9), jnp.zeros(1_000_000, jnp.int32), num_groups=1)
    assert float(total[0]) == pytest.approx(1_000_000 * float(np.float32(0.9)), rel=5e-6)


def counts(valid, passed, column, group_id, groups):
    rows = (jnp.asarray(valid), jnp.asarray(passed), jnp.asarray(column))
    return segments.group_counts(
        lambda r: (r[0], r[1]), lambda r: r[2], lambda r: r[2] < 1, rows, jnp.asarray(group_id),
        num_groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1000, 200_000])  # the packed counter overflows in the second
def test_group_counts(rows):
    rng = np.random.default_rng(0)
    group_id = np.where(rng.random(rows) < 0.9, 0, rng.integers(0, 5, rows)).astype(np.int32)
    valid = rng.random(rows) < 0.95
    passed = valid & (rng.random(rows) < 0.5)
    column = rng.random(rows).astype(np.float32)
    size, passes, total, below_one = counts(valid, passed, column, group_id, 5)
    assert below_one
    assert not counts(valid, passed, np.append(column[:-1], np.float32(1)), group_id, 5)[3]
    np.testing.assert_array_equal(size, np.bincount(group_id, valid, 5))
    np.testing.assert_array_equal(passes, np.bincount(group_id, passed, 5))
    np.testing.assert_allclose(total, np.bincount(group_id, column, 5), rtol=5e-6)


@pytest.mark.parametrize("size", [4_095, 4_096, 8_191, 65_536, 131_072])
def test_group_counts_at_the_edge_of_the_packing(size):
    rows = size + 10
    valid = np.arange(rows) < size
    got = counts(valid, valid, valid.astype(np.float32), np.zeros(rows, np.int32), 2)[:3]
    np.testing.assert_array_equal(np.stack(got), [[size, 0]] * 3)


@pytest.mark.parametrize("block", [8, 64, 99])
def test_folding_in_blocks_equals_folding_at_once(block):
    """Also the gradient, and a last block that is shorter."""
    rng = np.random.default_rng(4)
    column, group_id = rng.random(100).astype(np.float32), rng.integers(0, 7, 100).astype(np.int32)

    def total(column, block):
        def add(sums, rows):
            return sums.at[rows[1]].add(rows[0] ** 2)

        sums = segments.fold_rows(add, jnp.zeros(7), (column, jnp.asarray(group_id)), block=block)
        return jnp.sum(sums**2), sums

    (_, one), one_gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(column), 100)
    (_, many), many_gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(column), block)
    np.testing.assert_allclose(many, one, rtol=1e-6)
    np.testing.assert_allclose(many_gradient, one_gradient, rtol=1e-6)


ALONE = """
import functools, jax, numpy as np
from gagar_jax.algo.advantage import group_advantages
from tests.algo.batches import random_batch
assert jax.device_count() == 1
def kind(**settings):
    return random_batch(np.random.default_rng(0), rows=100_000, groups=3_000, **settings)
binary, shaped = kind(binary=True), kind(binary=False)
late = binary._replace(reward=np.where(np.arange(100_000) < 70_000, binary.reward, shaped.reward))
for batch in (binary, shaped, late):  # the last looks binary as far as its first block goes
    program = jax.jit(functools.partial(group_advantages, num_groups=3_000)).lower(*batch).compile()
    assert "while" in program.as_text()
    whole = np.asarray(program(*batch).advantage_N)
    for g in np.array_split(np.arange(3_000), 3):
        part = batch._replace(valid=batch.valid & np.isin(batch.group_id, g))
        rows = np.flatnonzero(np.isin(batch.group_id, g))
        few = [x[rows] for x in part[:-1]]
        alone = group_advantages(*few, batch.graded, num_groups=3_000).advantage_N
        np.testing.assert_allclose(whole[rows], alone, rtol=0, atol=1e-6)
print("equal")
"""


def test_a_single_device_folds_in_blocks(user_environment):
    """What one CPU device does (these tests have eight): large batches in blocks, small ones at once."""
    run = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=user_environment | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "equal\n", run.stderr


@pytest.mark.parametrize("passes", [0, 1, 2047, 4095])
@pytest.mark.parametrize("sizes", [(4_096, 5), (5_000, 4_200), (9_000, 9_000, 1)])
def test_sizes_that_run_over_the_packing_are_noticed(passes, sizes):
    """Members that carry into the passes, with few passes and many, in one group or several."""
    group_id = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    valid = np.ones(len(group_id), bool)
    passed = np.concatenate([np.arange(size) < min(passes, size) for size in sizes])
    got = counts(valid, passed, passed.astype(np.float32), group_id, len(sizes))[:3]
    expected = [min(passes, size) for size in sizes]
    np.testing.assert_array_equal(np.stack(got), [sizes, expected, expected])


def test_columns_come_back_as_they_went():
    """Any mixture of dtypes, paired or not."""
    f, i = jnp.arange(3.0), jnp.arange(3, dtype=jnp.int32)
    for columns in [(f,), (f, i), (f, f + 1), (i, f, f + 1, i + 1, f + 2), (f, f + 1, f + 2, f + 3)]:
        back = segments._unpaired(segments._paired(columns), columns)
        for a, b in zip(columns, back, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_to_rows():
    table = jnp.asarray(np.arange(8, dtype=np.float32).reshape(4, 2))
    left, right = segments.to_rows(table, jnp.array([3, 0, 3, 1], jnp.int32))
    np.testing.assert_array_equal(left, [6, 0, 6, 2])
    np.testing.assert_array_equal(right, [7, 1, 7, 3])
