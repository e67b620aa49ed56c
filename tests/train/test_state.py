"""Schedules and the optimizer: literal values, and what weight decay and clipping touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gagar_jax.config import OptimizerConfig
from gagar_jax.train.state import abstract_state, learning_rate, make_optimizer
from tests.train.batches import one_device, settings, state_for


def rates(config: OptimizerConfig, steps: int) -> list[float]:
    with jax.numpy_dtype_promotion("standard"):
        schedule = learning_rate(config, steps)
        return [float(schedule(n)) for n in range(steps + 1)]


def test_constant_schedule_warms_up_and_stays() -> None:
    config = OptimizerConfig(lr=0.4, warmup_steps=4)
    assert rates(config, 6) == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4, 0.4])


def test_cosine_schedule_ends_where_it_should() -> None:
    config = OptimizerConfig(lr=0.2, warmup_steps=0, schedule="cosine", final_lr_ratio=0.1)
    assert rates(config, 4) == pytest.approx([0.2, 0.1736396, 0.11, 0.0463604, 0.02], rel=1e-5)


@pytest.mark.parametrize("steps", [2, 10])
def test_a_constant_schedule_does_not_depend_on_the_length_of_the_stage(steps: int) -> None:
    """So a run of 5 steps that goes on to 10 has trained as a run of 10 does."""
    values = rates(OptimizerConfig(lr=1.0, warmup_steps=4), steps)
    assert values[:3] == pytest.approx([0.25, 0.4375, 0.625])


def test_a_cosine_shorter_than_its_warm_up_still_warms_up() -> None:
    values = rates(OptimizerConfig(lr=1.0, warmup_steps=50, schedule="cosine"), 2)
    assert values == pytest.approx([0.5, 0.75, 1.0])


def test_weight_decay_leaves_norm_gains_alone() -> None:
    config = settings(optimizer={"weight_decay": 0.5, "lr": 1.0})
    optimizer = make_optimizer(config.train.optimizer, 10)
    state = state_for(config, one_device())
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(optimizer.update)(zeros, state.opt_state, state.params)
    assert not np.asarray(updates["final_norm"].get_value()).any()
    assert not np.asarray(updates["blocks"]["attention_norm"].get_value()).any()
    for name in ("query", "down"):
        np.testing.assert_allclose(
            updates["blocks"][name].get_value(), -0.5 * np.asarray(state.params["blocks"][name].get_value())
        )


def test_the_gradient_is_clipped_by_its_global_norm() -> None:
    config = settings(optimizer={"grad_clip": 2.0})
    optimizer = make_optimizer(config.train.optimizer, 10)
    state = state_for(config, one_device())
    grads = jax.tree.map(jnp.ones_like, state.params)
    with jax.numpy_dtype_promotion("standard"):
        _, opt_state = jax.jit(optimizer.update)(grads, state.opt_state, state.params)
    moments = np.concatenate([np.ravel(m) for m in jax.tree.leaves(opt_state[1].mu)]) * 10
    assert np.linalg.norm(moments) == pytest.approx(2.0, rel=1e-4)


def test_the_abstract_state_describes_the_real_one() -> None:
    config, mesh = settings(), one_device()
    optimizer = make_optimizer(config.train.optimizer, config.train.updates)
    abstract, real = abstract_state(config.model, optimizer, mesh), state_for(config, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, len(a.shape))
