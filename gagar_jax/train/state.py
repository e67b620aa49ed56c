"""What a train step carries from batch to batch, how it is made and where it lies on a mesh.

The steps are in `step.py`; saving is in checkpoint.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from gagar_jax.config import ModelConfig, OptimizerConfig
from gagar_jax.model import sharding, transformer


class TrainState(NamedTuple):
    """`step` counts train steps; a batch in which nothing was kept counts too, though it changes nothing."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array  # int32


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Updates applied → learning rate: linear warm-up from lr / warmup_steps, then constant or cosine."""
    warmup = config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(config.lr)
    else:
        warmup = min(warmup, total_steps)
        after = optax.cosine_decay_schedule(
            config.lr, max(total_steps - warmup, 1), alpha=config.final_lr_ratio
        )
    if not warmup:
        return after
    before = optax.linear_schedule(config.lr / warmup, config.lr, warmup)
    return optax.join_schedules([before, after], [warmup])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW with the global norm clipped first; weight decay acts on matrices, not on norm gains.

    Args:
      config: its settings.
      total_steps: updates of the stage, where the cosine ends.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        optax.scale_by_adam(b1=config.b1, b2=config.b2),
        optax.add_decayed_weights(config.weight_decay, mask=_matrices),
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )


def updates_applied(opt_state: Any) -> jax.Array:
    """How many updates the schedule of `make_optimizer` has counted, int32."""
    return opt_state[-1].count


@jax.jit
def _bits(params: nnx.State) -> jax.Array:
    total = jnp.zeros((), jnp.uint32)
    for place, leaf in enumerate(jax.tree.leaves(params)):
        width = jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint32
        bits = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)
        total += jnp.uint32(2 * place + 1) * jnp.sum(bits, dtype=jnp.uint32)
    return total


def fingerprint(params: nnx.State) -> str:
    """Eight hex digits of all bits of the parameters: what was sampled with them is marked with it."""
    return f"{int(_bits(params)):08x}"


def _matrices(params: nnx.State) -> Any:
    def one(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata()["logical_axes"]
        return variable.replace(len([axis for axis in axes if axis != "layers"]) > 1)

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, key: jax.Array, mesh: Mesh
) -> TrainState:
    """Random parameters and a fresh optimizer, made where they belong: no device holds more than its share.

    Raises:
      ValueError: a dimension does not divide by its mesh axis.
    """

    def make(key: jax.Array) -> TrainState:
        return _fresh(transformer.create(config, key)[1], optimizer)

    return jax.jit(make, out_shardings=state_shardings(config, optimizer, mesh))(key)


def restart(
    config: ModelConfig, optimizer: optax.GradientTransformation, params: nnx.State, mesh: Mesh
) -> TrainState:
    """The start of a stage from another's parameters, which are copied: fresh optimizer, step 0."""

    def make(params: nnx.State) -> TrainState:
        return _fresh(jax.tree.map(jnp.copy, params), optimizer)

    return jax.jit(make, out_shardings=state_shardings(config, optimizer, mesh))(params)


def abstract_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A state of shapes with shardings: what `jit.lower` and a restore need. Nothing is allocated."""
    shapes = _shapes(config, optimizer)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        state_shardings(config, optimizer, mesh),
    )


def state_shardings(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A sharding for every leaf: parameters by the table, their moments alike, counters everywhere."""
    params = sharding.param_shardings(transformer.abstract(config)[1], mesh)
    everywhere = sharding.named(mesh)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, s: s,
        _shapes(config, optimizer).opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params, opt_state, everywhere)  # type: ignore[arg-type]  # a state of shardings


def _shapes(config: ModelConfig, optimizer: optax.GradientTransformation) -> TrainState:
    return jax.eval_shape(lambda params: _fresh(params, optimizer), transformer.abstract(config)[1])


def _fresh(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
