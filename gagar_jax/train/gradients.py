"""From a loss over packed rows to new weights: predict, add up, divide once, update. Both steps use it.

Gradients are added up over microbatches and divided once by the batch's own count, so that no split of the
batch changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gagar_jax.algo import loss as losses
from gagar_jax.algo.logprob import token_logprobs
from gagar_jax.model.transformer import Transformer, forward
from gagar_jax.train.state import updates_applied

Graph = nnx.GraphDef[Transformer]
Metrics = dict[str, jax.Array]
Weights = tuple[nnx.State, optax.OptState]


class LossRows(NamedTuple):
    """Rows with what the loss needs at position t to judge its prediction of token t + 1."""

    tokens_BT: jax.Array
    position_BT: jax.Array
    segment_BT: jax.Array
    prefix_BT: jax.Array | None
    target_BT: jax.Array
    weight_BT: jax.Array
    behaviour_BT: jax.Array
    advantage_BT: jax.Array
    fresh_BT: jax.Array


class Sums(NamedTuple):
    loss: losses.LossSums
    gap_max: jax.Array  # |log π − log μ| over fresh tokens

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(losses.add(self.loss, other.loss), jnp.maximum(self.gap_max, other.gap_max))


LossFn = Callable[[nnx.State, LossRows], tuple[jax.Array, Sums]]


def ahead(x_BT: jax.Array) -> jax.Array:
    """x[b, t + 1] at [b, t], and 0 in the last column: what position t predicts."""
    return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)))


def predict(graph: Graph, params: nnx.State, rows: LossRows, **settings: Any) -> tuple[jax.Array, jax.Array]:
    """(log π of each next token, entropy of its distribution), [B, T] float32."""
    model = nnx.merge(graph, params)
    hidden_BTD = forward(model, rows.tokens_BT, rows.position_BT, rows.segment_BT, rows.prefix_BT)
    with jax.named_scope("logprobs"):
        return token_logprobs(hidden_BTD, model.unembedding(), rows.target_BT, **settings)


def accumulate(
    loss_fn: LossFn, params: nnx.State, rows: LossRows, microbatch_rows: int, mesh: Mesh
) -> tuple[Sums, nnx.State]:
    """Sums of the loss and of its gradient over all rows, `microbatch_rows` at a time.

    Microbatches without a token of weight (padding up to the bucket, dropped groups) cost nothing.
    """
    total, shards = rows.tokens_BT.shape[0], mesh.shape["data"]
    size = min(microbatch_rows, total)
    if total % size or size % shards:
        raise ValueError(
            f"{total} rows in microbatches of {size} over {shards} devices (mesh.data): each must divide the "
            "one before it; change train.row_bucket or train.microbatch_rows"
        )
    split = NamedSharding(mesh, PartitionSpec(None, "data"))

    def microbatches(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x.reshape(total // size, size, *x.shape[1:]), split)

    def add(carry: tuple[Sums, nnx.State], part: LossRows) -> tuple[tuple[Sums, nnx.State], None]:
        def run() -> tuple[Sums, nnx.State]:
            (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, part)
            return carry[0] + sums, jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[1], grads)

        return jax.lax.cond(jnp.any(part.weight_BT > 0), run, lambda: carry), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = (Sums(losses.zero_sums(), jnp.zeros((), jnp.float32)), zeros)
    (sums, grads), _ = jax.lax.scan(add, start, jax.tree.map(microbatches, rows))
    return sums, grads


def update(
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    weights: Weights,
    grad_sums: nnx.State,
    weight: jax.Array,
) -> tuple[Weights, Metrics]:
    """Divides once, then applies the optimizer; with no weight, or no finite gradient, changes nothing."""
    before, opt_state_before = weights
    with jax.named_scope("update"):
        grads = jax.tree.map(lambda g, p: losses.mean(g, weight).astype(p.dtype), grad_sums, before)
        grad_norm = optax.tree.norm(grads)
        applied = (weight > 0) & jnp.isfinite(grad_norm)

        def apply() -> Weights:
            # optax promotes counters (int32) and scalars to float32 implicitly; everything of ours does not.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                updates, opt_state = optimizer.update(grads, opt_state_before, before)
                return optax.apply_updates(before, updates), opt_state

        params, opt_state = jax.lax.cond(applied, apply, lambda: weights)
    with jax.numpy_dtype_promotion("standard"):
        rate = jnp.asarray(schedule(updates_applied(opt_state_before)), jnp.float32)
    metrics = {
        "grad_norm": grad_norm,
        "lr": rate,
        "update_applied": applied.astype(jnp.float32),
    }
    return (params, opt_state), metrics
