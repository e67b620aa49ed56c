"""The length penalty and the segment penalty against plain loops, and what they promise to keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gagar_jax.algo.shaping import length_penalty, segment_penalty
from tests import reference

RECIPE = {"strength": 0.2, "slack": 0.0, "span": 1.0, "power": 1.5, "min_pass_rate": 0.5}


@pytest.mark.parametrize("slack", [0.0, 0.25])
def test_length_penalty(slack):
    rng = np.random.default_rng(0)
    rows, groups = 200, 12
    group = rng.integers(-1, groups + 1, rows).astype(np.int32)
    passed, valid = rng.random(rows) < 0.6, rng.random(rows) < 0.9
    length = rng.integers(0, 500, rows).astype(np.int32)
    reward = passed.astype(np.float32)
    recipe = RECIPE | {"slack": slack}
    out = np.asarray(
        length_penalty(reward, passed, length, group, valid, num_groups=groups, quantile=0.3, **recipe)
    )
    penalised = 0
    for g in range(groups):
        members = np.flatnonzero((group == g) & valid)
        expected = reference.length_penalty(
            reward[members].tolist(), passed[members].tolist(), length[members].tolist(), q=0.3, **recipe
        )
        np.testing.assert_allclose(out[members], expected, atol=1e-6)
        penalised += int((out[members] < reward[members]).sum())
    assert penalised > 10
    outside = ~valid | (group < 0) | (group >= groups)
    np.testing.assert_array_equal(out[outside], reward[outside])


def test_length_penalty_of_the_longest_is_all_of_it():
    out = length_penalty(
        jnp.ones(3),
        jnp.ones(3, bool),
        jnp.array([10.0, 10.0, 40.0]),
        jnp.zeros(3, int),
        jnp.ones(3, bool),
        num_groups=1,
    )
    np.testing.assert_allclose(out, [1, 1, 0.8], atol=1e-6)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 5, 9], [3, 3, 3]])
def test_length_penalty_is_finite(lengths):
    def total(reward, length):
        ones = jnp.ones(3, bool)
        return jnp.sum(length_penalty(reward, ones, length, jnp.zeros(3, int), ones, num_groups=2))

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(
        jnp.ones(3), jnp.asarray(lengths, jnp.float32)
    )
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)


def test_length_penalty_refuses_an_empty_span():
    ones = jnp.ones(2, bool)
    with pytest.raises(ValueError, match="span"):
        length_penalty(jnp.ones(2), ones, jnp.ones(2), jnp.zeros(2, int), ones, num_groups=1, slack=1.0)


def test_segment_penalty():
    rng = np.random.default_rng(1)
    advantage = rng.normal(0, 1, (6, 20)).astype(np.float32)
    malformed, mask = rng.random((6, 20)) < 0.2, rng.random((6, 20)) < 0.8
    out = np.asarray(segment_penalty(jnp.asarray(advantage), malformed, jnp.asarray(mask)))
    live = np.where(mask, advantage, 0)
    expected = reference.segment_penalty(
        live.ravel().tolist(), malformed.ravel().tolist(), mask.ravel().tolist(), kappa=2.0
    )
    np.testing.assert_allclose(out.ravel(), expected, atol=1e-5)
    for sign in (1, -1):
        before, after = (np.where(a * sign > 0, a, 0)[mask].sum() for a in (advantage, out))
        assert after == pytest.approx(before, rel=1e-5)
    assert not (out[malformed & mask] > 0).any()


def test_segment_penalty_with_nothing_left():
    advantage, yes = jnp.array([1.0, -1.0]), jnp.ones(2, bool)
    np.testing.assert_allclose(segment_penalty(advantage, yes, yes), [0.0, -1.0])
    np.testing.assert_allclose(segment_penalty(advantage, ~yes, ~yes), [0.0, 0.0])
