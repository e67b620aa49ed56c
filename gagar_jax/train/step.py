"""The train step: one compiled, sharded program from a packed batch to new parameters.

Verdicts are redeemed from the host inside it, group statistics and advantages follow, then gradients are
added up over microbatches and divided once by the batch's own count, so that no split of the batch (into
microbatches or over devices) changes the result. The supervised warm start shares all but the first part.
The arithmetic is in algo/, the forward pass in model/, what a batch holds in data/packing.py.

A step in which no token has weight, or whose gradient is not finite, changes neither parameters nor
optimizer, says so in `update_applied` and still counts as a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import Mesh

from gagar_jax.algo import loss as losses
from gagar_jax.algo.advantage import GroupAdvantages, group_advantages
from gagar_jax.config import Config
from gagar_jax.data.packing import Rows, TrainBatch
from gagar_jax.model import sharding
from gagar_jax.train.gradients import (
    Graph,
    LossRows,
    Metrics,
    Sums,
    Weights,
    accumulate,
    ahead,
    predict,
    update,
)
from gagar_jax.train.state import (
    TrainState,
    learning_rate,
    make_optimizer,
    state_shardings,
)

Redeem = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""(ticket_N, member_N, ticket_G) → (quality_N float32, external_N int32, graded_G int32).

Runs on the host in the middle of the step: NumPy only, no jax, no exceptions. It may wait, bounded.
"""


class Credit(NamedTuple):
    """What each trajectory and group of the batch came to, for the run folder."""

    advantage_N: jax.Array
    quality_N: jax.Array
    external_N: jax.Array  # bool
    kept_G: jax.Array  # bool
    graded_G: jax.Array  # bool
    scale_G: jax.Array
    capped_G: jax.Array  # bool


def make_train_step(
    config: Config, graph: Graph, mesh: Mesh, redeem: Redeem
) -> Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics, Credit]]:
    """The reinforcement-learning step, compiled once for every shape of batch.

    Args:
      config: `train`, `rollout.temperature` and `model` are read.
      graph: the model's static part, from `transformer.create` or `abstract`.
      mesh: rows are split over its "data" axis, weights as the table in sharding.py says.
      redeem: asked once a step for the batch's verdicts.

    Returns:
      A jitted (state, batch) → (state, metrics, credit). The state is donated. Metrics are float32 scalars.

    Raises:
      ValueError (when called): the batch's rows do not divide into microbatches, or those over the mesh.
    """
    settings = config.train
    optimizer = make_optimizer(settings.optimizer, settings.updates)
    schedule = learning_rate(settings.optimizer, settings.updates)

    def policy_loss(params: nnx.State, rows: LossRows) -> tuple[jax.Array, Sums]:
        logprob_BT, entropy_BT = predict(
            graph,
            params,
            rows,
            temperature=config.rollout.temperature,
            chunk_tokens=settings.vocab_chunk_tokens,
            entropy_gradient=settings.entropy_coef > 0,
        )
        sums = losses.policy_loss(
            logprob_BT,
            rows.behaviour_BT,
            rows.advantage_BT,
            rows.weight_BT,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            entropy_BT=entropy_BT,
        )
        gap = jnp.abs(jax.lax.stop_gradient(logprob_BT) - rows.behaviour_BT)
        gap_max = jnp.max(jnp.where(rows.fresh_BT, gap, 0.0))
        return sums.loss - settings.entropy_coef * sums.entropy, Sums(sums, gap_max)

    def step(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics, Credit]:
        with jax.named_scope("redeem"):
            quality_N, external_N, graded_G = _redeem(redeem, batch)
        with jax.named_scope("advantages"):
            advantages = group_advantages(
                batch.reward_N,
                batch.passed_N,
                quality_N,
                batch.group_id_N,
                batch.valid_N,
                external_N,
                graded_G,
                num_groups=batch.ticket_G.shape[0],
                mode=settings.mode,
                lambda_max=settings.lambda_max,
            )
        rows = _policy_rows(batch, advantages, state.step)

        def one_pass(carry: Weights, _: None) -> tuple[Weights, tuple[Sums, Metrics]]:
            sums, grads = accumulate(policy_loss, carry[0], rows, settings.microbatch_rows, mesh)
            weights, metrics = update(optimizer, schedule, carry, grads, sums.loss.weight)
            return weights, (sums, metrics)

        weights, (sums, metrics) = jax.lax.scan(
            one_pass, (state.params, state.opt_state), length=settings.updates_per_batch
        )
        credit = Credit(
            advantages.advantage_N,
            quality_N,
            external_N,
            advantages.kept_G,
            graded_G,
            advantages.scale_G,
            advantages.capped_G,
        )
        first, last = (jax.tree.map(lambda x, i=i: x[i], (sums, metrics)) for i in (0, -1))
        applied = jnp.min(metrics["update_applied"])
        metrics = _token_metrics(first[0]) | first[1] | _drift_metrics(last[0]) | {"update_applied": applied}
        metrics |= _group_metrics(batch, advantages, graded_G)
        return TrainState(*weights, state.step + 1), metrics, credit

    shardings = state_shardings(config.model, optimizer, mesh)
    everywhere = sharding.named(mesh)
    in_batch = TrainBatch(
        **{
            name: sharding.named(mesh, "batch", "tokens") if name.endswith("_BT") else everywhere
            for name in TrainBatch._fields
        }
    )
    return jax.jit(
        step,
        in_shardings=(shardings, in_batch),
        out_shardings=(shardings, everywhere, everywhere),
        donate_argnums=0,
    )


def make_sft_step(
    config: Config, graph: Graph, mesh: Mesh
) -> Callable[[TrainState, Rows], tuple[TrainState, Metrics]]:
    """The supervised step: mean negative log-likelihood, in nats, of the tokens whose mask is 1.

    Args and result as for `make_train_step`; `sft` and `model` of the settings are read, and the batch is
    one microbatch. Metrics: nll, entropy, loss_tokens, grad_norm, lr, update_applied.
    """
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    schedule = learning_rate(config.sft.optimizer, config.sft.steps)

    def supervised_loss(params: nnx.State, rows: LossRows) -> tuple[jax.Array, Sums]:
        logprob_BT, entropy_BT = predict(
            graph,
            params,
            rows,
            temperature=1.0,
            chunk_tokens=config.train.vocab_chunk_tokens,
            entropy_gradient=False,
        )
        total = -jnp.sum(rows.weight_BT * logprob_BT)
        sums = losses.zero_sums()._replace(
            loss=total, weight=jnp.sum(rows.weight_BT), entropy=jnp.sum(rows.weight_BT * entropy_BT)
        )
        return total, Sums(sums, jnp.zeros((), jnp.float32))

    def step(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        weight_BT = ahead(batch.loss_mask_BT).astype(jnp.float32)
        nothing = jnp.zeros_like(weight_BT)
        rows = LossRows(
            batch.tokens_BT,
            batch.position_BT,
            batch.segment_BT,
            batch.prefix_BT,
            target_BT=ahead(batch.tokens_BT),
            weight_BT=weight_BT,
            behaviour_BT=nothing,
            advantage_BT=nothing,
            fresh_BT=nothing > 0,
        )
        sums, grads = accumulate(supervised_loss, state.params, rows, batch.tokens_BT.shape[0], mesh)
        weights, updated = update(
            optimizer, schedule, (state.params, state.opt_state), grads, sums.loss.weight
        )
        metrics = {
            "nll": losses.mean(sums.loss.loss, sums.loss.weight),
            "entropy": losses.mean(sums.loss.entropy, sums.loss.weight),
            "loss_tokens": sums.loss.weight,
        }
        return TrainState(*weights, state.step + 1), metrics | updated

    shardings = state_shardings(config.model, optimizer, mesh)
    by_row = sharding.named(mesh, "batch", "tokens")
    return jax.jit(
        step,
        in_shardings=(shardings, by_row),
        out_shardings=(shardings, sharding.named(mesh)),
        donate_argnums=0,
    )


def programs_compiled(step: Callable[..., Any]) -> int:
    """How many programs a step of `make_train_step` or `make_sft_step` has compiled: one a shape of batch."""
    return step._cache_size()  # type: ignore[attr-defined]


def _redeem(redeem: Redeem, batch: TrainBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The verdicts of this batch from the host: (quality_N, external_N bool, graded_G bool)."""
    N, G = batch.ticket_N.shape[0], batch.ticket_G.shape[0]
    # Integers, not bools, and no scalars: what a callback inside a sharded program may return.
    shapes = (
        jax.ShapeDtypeStruct((N,), jnp.float32),
        jax.ShapeDtypeStruct((N,), jnp.int32),
        jax.ShapeDtypeStruct((G,), jnp.int32),
    )

    def call(ticket_N: Any, member_N: Any, ticket_G: Any) -> tuple[np.ndarray, ...]:
        answer = redeem(np.asarray(ticket_N), np.asarray(member_N), np.asarray(ticket_G))
        return tuple(np.asarray(a, s.dtype) for a, s in zip(answer, shapes, strict=True))

    quality_N, external_N, graded_G = io_callback(
        call, shapes, batch.ticket_N, batch.member_N, batch.ticket_G
    )
    return quality_N, external_N != 0, graded_G != 0


def _policy_rows(batch: TrainBatch, advantages: GroupAdvantages, step: jax.Array) -> LossRows:
    advantage_BT, mask_BT = losses.fan_out(advantages, batch.trajectory_id_BT, batch.loss_mask_BT)
    weight_BT = losses.token_weights(
        mask_BT, batch.trajectory_id_BT, batch.group_id_N, num_groups=batch.ticket_G.shape[0]
    )
    return LossRows(
        batch.tokens_BT,
        batch.position_BT,
        batch.segment_BT,
        batch.prefix_BT,
        target_BT=ahead(batch.tokens_BT),
        weight_BT=ahead(weight_BT),
        behaviour_BT=ahead(batch.sampler_logprob_BT),
        advantage_BT=ahead(advantage_BT),
        fresh_BT=ahead(mask_BT & (batch.version_BT == step)),
    )


def _token_metrics(sums: Sums) -> Metrics:
    """Means over the tokens in the loss; the maximum over the fresh ones. Of a batch's first pass."""
    total = sums.loss
    return {
        "pg_loss": losses.mean(total.loss, total.weight),
        "entropy": losses.mean(total.entropy, total.weight),
        "logprob_gap_max": sums.gap_max,
        "loss_tokens": total.weight,
    }


def _drift_metrics(sums: Sums) -> Metrics:
    """How far the policy is from the one that sampled, of a batch's last pass: before its last update."""
    total = sums.loss
    return {
        "clip_fraction": losses.mean(total.clipped, total.weight),
        "kl": losses.mean(total.kl, total.weight),
        "ratio_mean": losses.mean(total.ratio, total.weight),
        "ratio_max": total.ratio_max,
    }


def _group_metrics(batch: TrainBatch, advantages: GroupAdvantages, graded_G: jax.Array) -> Metrics:
    """Counts of groups; scale and cap over the kept groups that have a verdict."""

    def count(x: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32))

    kept_G, graded_G = advantages.kept_G, graded_G & advantages.kept_G
    return {
        "pass_rate": losses.mean(count(batch.passed_N & batch.valid_N), count(batch.valid_N)),
        "kept_groups": count(kept_G),
        "dropped_groups": count(~kept_G & (batch.ticket_G >= 0)),
        "graded_groups": count(graded_G),
        "redistributed_groups": count(kept_G & (advantages.deficit_G > 0)),
        "scale_mean": losses.mean(jnp.sum(jnp.where(graded_G, advantages.scale_G, 0.0)), count(graded_G)),
        "capped_share": losses.mean(count(advantages.capped_G), count(graded_G)),
    }
