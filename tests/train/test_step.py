"""The compiled step against a naive one, its invariances, and the batches in which nothing can be learned."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gagar_jax.config import Config
from gagar_jax.data.packing import Piece, Rows, pack_pieces, place
from gagar_jax.model import transformer
from gagar_jax.train.state import make_optimizer, restart
from gagar_jax.train.step import make_sft_step
from gagar_jax.types import Group, Trajectory
from tests import reference
from tests.train.batches import (
    Verdicts,
    assert_close,
    by_name,
    compiled,
    floats,
    gradient,
    one_device,
    pack_for,
    run,
    settings,
    state_for,
)  # fmt: skip
from tests.trajectories import make_groups

OUTCOMES = ("pfpf", "ppi", "ppfffp", "fff")
GROUPS = make_groups(*OUTCOMES)


LONGEST = 32


class Alone(NamedTuple):
    """One trajectory, not packed, padded at its end to `LONGEST`: what position t predicts of token t + 1."""

    tokens_T: jax.Array
    target_T: jax.Array
    mask_T: jax.Array
    behaviour_T: jax.Array


def alone(t: Trajectory) -> Alone:
    def pad(values: list[int] | list[float], dtype: Any) -> jax.Array:
        return jnp.asarray(np.pad(np.asarray(values, dtype), (0, LONGEST - len(values))))

    return Alone(
        pad(t.tokens, np.int32),
        pad(t.tokens[1:], np.int32),
        pad(t.loss_mask[1:], np.float32),
        pad(t.logprobs[1:], np.float32),
    )


def naive_logprobs(
    config: Config, params: nnx.State, one: Alone, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(log π of each target, entropy of each prediction), from whole logits."""
    model = nnx.merge(transformer.abstract(config.model)[0], params)
    position_1T = jnp.arange(LONGEST, dtype=jnp.int32)[None]
    hidden = transformer.forward(model, one.tokens_T[None], position_1T, jnp.ones_like(position_1T))[0]
    logp = jax.nn.log_softmax(hidden @ model.unembedding() / temperature, axis=-1)
    return logp[jnp.arange(LONGEST), one.target_T], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


@functools.cache
def naive_policy(config: Config) -> Any:
    """(parameters, trajectory, advantage) → its summed loss and that sum's gradient."""

    def loss(params: nnx.State, one: Alone, advantage: jax.Array) -> jax.Array:
        logprob, entropy = naive_logprobs(config, params, one, config.rollout.temperature)
        ratio = jnp.exp(jnp.where(one.mask_T > 0, logprob - one.behaviour_T, 0.0))
        bounded = jnp.clip(ratio, 1 - config.train.clip_low, 1 + config.train.clip_high)
        token = -jnp.minimum(ratio * advantage, bounded * advantage)
        return jnp.sum(one.mask_T * (token - config.train.entropy_coef * entropy))

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def naive_supervised(config: Config) -> Any:
    def loss(params: nnx.State, one: Alone) -> jax.Array:
        return -jnp.sum(one.mask_T * naive_logprobs(config, params, one, 1.0)[0])

    return jax.jit(jax.value_and_grad(loss))


def mean_of(parts: list[tuple[Any, nnx.State]], tokens: int) -> tuple[float, dict[str, np.ndarray]]:
    """Σ loss and Σ gradient over the trajectories, divided once."""
    grads = [by_name(g) for _, g in parts]
    return (
        sum(float(value) for value, _ in parts) / tokens,
        {name: sum(g[name] for g in grads) / np.float32(tokens) for name in grads[0]},
    )


def naive_step(
    params: nnx.State, config: Config, groups: list[Group], verdicts: Verdicts
) -> tuple[float, dict[str, np.ndarray]]:
    """The step as the paper's lines say it, one trajectory at a time."""
    parts, tokens = [], 0
    for group in groups:
        members = group.trajectories
        quality = verdicts.quality[np.arange(len(members)) % len(verdicts.quality)].tolist()
        columns = reference.group_advantages(
            [float(t.passed) for t in members], [t.passed for t in members], quality, [0] * len(members),
            [t.valid for t in members], [False] * len(members), [verdicts.graded], num_groups=1,
            mode=config.train.mode, lambda_max=config.train.lambda_max,
        )  # fmt: skip
        for advantage, t in zip(columns["advantage"], members, strict=True):
            if columns["kept"][0] and t.valid:
                parts.append(naive_policy(config)(params, alone(t), jnp.float32(advantage)))
                tokens += sum(t.loss_mask)
    return mean_of(parts, tokens)


@pytest.mark.parametrize(
    ("mode", "entropy_coef"), [("none", 0.0), ("downweight", 0.02), ("sum_preserving", 0.0)]
)
def test_loss_and_gradient_are_the_naive_ones(mode: str, entropy_coef: float) -> None:
    config, verdicts = settings(mode=mode, entropy_coef=entropy_coef), Verdicts()
    params = state_for(config, one_device()).params
    loss, grads = naive_step(params, config, GROUPS, verdicts)
    state, metrics, _ = run(config, pack_for(config, GROUPS), verdicts)
    assert metrics["pg_loss"] - entropy_coef * metrics["entropy"] == pytest.approx(loss, abs=2e-6)
    assert_close(gradient(state), grads, tolerance=2e-5)


def test_the_result_depends_neither_on_the_microbatch_nor_on_the_bucket() -> None:
    groups = make_groups("pfpfpf", "ffpfpp", "pffffp", longest=45, seed=4)
    whole, split = settings(), settings(microbatch_rows=2, row_bucket=32)
    batch = pack_for(whole, groups)
    assert (batch.segment_BT.max(axis=1) > 0).sum() > 4, "several microbatches must hold something"
    a, a_metrics, _ = run(whole, batch, Verdicts())
    b, b_metrics, _ = run(split, pack_for(split, groups), Verdicts())
    assert_close(gradient(a), gradient(b), tolerance=2e-6)
    assert a_metrics == pytest.approx(b_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("outcomes", [("ppp", "ff"), ("i", "iii"), ()])
def test_a_batch_without_a_kept_group_changes_nothing(outcomes: tuple[str, ...]) -> None:
    config = settings()
    before = jax.device_get(state_for(config, one_device()))
    after, metrics, credit = run(config, pack_for(config, make_groups(*outcomes)), Verdicts())
    for a, b in zip(
        jax.tree.leaves((before.params, before.opt_state)),
        jax.tree.leaves((after.params, after.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert int(after.step) == 1
    assert np.isfinite(list(metrics.values())).all()
    assert (metrics["update_applied"], metrics["kept_groups"]) == (0, 0)
    assert metrics["dropped_groups"] == len(outcomes)
    assert not credit.advantage_N.any()


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    config = settings()
    state = state_for(config, one_device())
    table = state.params["embedding"]
    table.set_value(table.get_value().at[7].set(jnp.nan))
    after, metrics, _ = run(config, pack_for(config, GROUPS), Verdicts(), state=state)
    assert metrics["update_applied"] == 0
    assert np.isnan(metrics["grad_norm"])
    assert not np.asarray(after.opt_state[1].mu["embedding"].get_value()).any()
    assert np.isnan(np.asarray(after.params["embedding"].get_value())).sum() == config.model.width


def test_device_and_host_agree_on_what_is_dropped() -> None:
    rng = np.random.default_rng(0)
    config = settings()
    for seed in range(5):
        outcomes = ["".join(rng.choice(list("pfi"), rng.integers(1, 7))) for _ in range(4)]
        batch = pack_for(config, make_groups(*outcomes, seed=seed))
        _, metrics, credit = run(config, batch, Verdicts())
        kept = [{"p", "f"} <= set(letters) for letters in outcomes]
        assert credit.kept_G.tolist() == kept
        rows = set(batch.group_id_N[batch.trajectory_id_BT[batch.trajectory_id_BT < 24]].tolist())
        assert rows == {g for g, k in enumerate(kept) if k}
        assert metrics["loss_tokens"] == batch.loss_mask_BT.sum()


def test_verdicts_are_asked_for_by_ticket_and_used() -> None:
    config, verdicts = settings(), Verdicts()
    batch = pack_for(config, GROUPS)
    _, metrics, credit = run(config, batch, verdicts)
    (asked,) = verdicts.asked
    tickets = (batch.ticket_N, batch.member_N, batch.ticket_G)
    assert [a.tolist() for a in asked] == [t.tolist() for t in tickets]
    # Group 0: R = 1 0 1 0 and f = 1, .4 of the passed; λ = 2 / 1.4.
    np.testing.assert_allclose(credit.advantage_N[:4], [1 / 1.4, -0.5, 0.4 / 1.4, -0.5], rtol=1e-6)
    assert credit.scale_G[0] == pytest.approx(2 / 1.4)
    assert metrics["graded_groups"] == metrics["kept_groups"] == 2
    assert metrics["redistributed_groups"] == 2
    assert metrics["pass_rate"] == pytest.approx(7 / 15)


@pytest.mark.parametrize("case", ["ungraded", "nan"])
def test_a_group_without_a_usable_verdict_is_binary_grpo(case: str) -> None:
    verdicts = Verdicts(graded=False) if case == "ungraded" else Verdicts((np.nan,) * 4)
    config = settings()
    _, metrics, credit = run(config, pack_for(config, GROUPS), verdicts)
    np.testing.assert_allclose(credit.advantage_N[:4], [0.5, -0.5, 0.5, -0.5], atol=1e-7)
    assert metrics["redistributed_groups"] == 0
    assert metrics["update_applied"] == 1


def test_an_external_answer_counts_as_failed() -> None:
    config, verdicts = settings(), Verdicts()
    verdicts.external = {(30, 0), (30, 2)}
    _, metrics, credit = run(config, pack_for(config, GROUPS), verdicts)
    assert credit.external_N[:4].tolist() == [True, False, True, False]
    assert credit.kept_G.tolist() == [False, False, True, False]
    assert not credit.advantage_N[:4].any()
    assert metrics["loss_tokens"] == sum(sum(t.loss_mask) for t in GROUPS[2].trajectories)


def as_sampled(config: Config, groups: list[Group], version: int) -> list[Group]:
    """The same groups with the log-probs that the initial parameters give."""
    params = state_for(config, one_device()).params
    predict = jax.jit(lambda p, one: naive_logprobs(config, p, one, config.rollout.temperature)[0])
    changed = []
    for group in groups:
        members = []
        for t in group.trajectories:
            logprob = np.asarray(predict(params, alone(t)))[: len(t.tokens) - 1]
            values = [0.0, *(logprob * np.float32(t.loss_mask[1:])).tolist()]
            members.append(dataclasses.replace(t, logprobs=values, version=version))
        changed.append(dataclasses.replace(group, trajectories=members))
    return changed


def test_on_fresh_data_the_ratio_is_one_and_the_gap_nothing() -> None:
    config = settings()
    _, metrics, _ = run(config, pack_for(config, as_sampled(config, GROUPS, version=0)), Verdicts())
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["clip_fraction"] == 0
    assert 0 <= metrics["kl"] < 1e-6


def test_the_gap_is_measured_on_fresh_tokens_only() -> None:
    config = settings()
    stale = [
        dataclasses.replace(g, trajectories=[dataclasses.replace(t, version=-1) for t in g.trajectories])
        for g in GROUPS
    ]
    _, fresh_metrics, _ = run(config, pack_for(config, GROUPS), Verdicts())
    _, stale_metrics, _ = run(config, pack_for(config, stale), Verdicts())
    assert fresh_metrics["logprob_gap_max"] > 0.05
    assert stale_metrics["logprob_gap_max"] == 0
    assert stale_metrics["ratio_max"] == pytest.approx(fresh_metrics["ratio_max"])


def test_one_program_serves_every_batch_of_a_shape_and_the_state_is_donated() -> None:
    config, mesh = settings(), one_device()
    step, desk = compiled(config, mesh)
    desk.verdicts = Verdicts()
    first = state = state_for(config, mesh)
    for seed in range(3):
        state, metrics, _ = step(state, pack_for(config, make_groups("pf", "ppff", seed=seed)))
        programs = step._cache_size()
        assert floats(metrics)["lr"] == pytest.approx(1e-3)
    assert step._cache_size() == programs
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert int(state.step) == 3


def test_rows_that_do_not_divide_are_refused_with_the_numbers() -> None:
    config = settings(microbatch_rows=3)
    with pytest.raises(ValueError, match="8 rows in microbatches of 3 over 1 devices"):
        run(config, pack_for(config, GROUPS), Verdicts())


# ---- supervised


def supervised_batch(rows: int = 4) -> Rows:
    pieces = [Piece(n, t.tokens, t.loss_mask) for n, t in enumerate(GROUPS[2].trajectories)]
    batch = Rows(*(np.zeros((rows, 64), np.int32) for _ in Rows._fields))
    for b, bundles in enumerate(pack_pieces(pieces, 64)):
        place(batch, b, bundles)
    return batch


def test_the_supervised_loss_is_the_naive_one_and_falls() -> None:
    config, mesh = settings(), one_device()
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    params = state_for(config, mesh).params
    state = restart(config.model, optimizer, params, mesh)

    members = GROUPS[2].trajectories
    loss, grads = mean_of(
        [naive_supervised(config)(params, alone(t)) for t in members], sum(sum(t.loss_mask) for t in members)
    )
    step = make_sft_step(config, transformer.abstract(config.model)[0], mesh)
    state, metrics = step(state, supervised_batch())
    assert floats(metrics)["nll"] == pytest.approx(loss, rel=1e-5)
    assert_close(gradient(jax.device_get(state)), grads, tolerance=2e-5)
    for _ in range(19):
        state, metrics = step(state, supervised_batch())
    assert floats(metrics)["nll"] < 0.8 * loss


def test_a_stage_starts_from_copies() -> None:
    """The warm start's parameters survive the donation of the next stage's state."""
    config, mesh = settings(), one_device()
    warm = state_for(config, mesh)
    state = restart(config.model, make_optimizer(config.train.optimizer, 20), warm.params, mesh)
    run(config, pack_for(config, GROUPS), Verdicts(), state=state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(warm))


def test_two_updates_of_one_batch_are_two_steps_on_it() -> None:
    """Every pass compares with the sampler's log-probs and asks the optimizer anew; the batch counts once."""
    once, twice = settings(), settings(updates_per_batch=2)
    batch, verdicts = pack_for(once, GROUPS), Verdicts()
    first, before, _ = run(once, batch, verdicts)
    second, after, credit = run(once, batch, verdicts, state=jax.tree.map(jnp.asarray, first))
    asked = len(verdicts.asked)
    both, metrics, credit_both = run(twice, batch, verdicts)
    assert len(verdicts.asked) == asked + 1
    assert_close(by_name(both.params), by_name(second.params), tolerance=1e-6)
    np.testing.assert_allclose(credit_both.advantage_N, credit.advantage_N, atol=1e-6)
    assert (int(both.step), int(both.opt_state[-1].count)) == (1, 2)
    for name in ("pg_loss", "entropy", "grad_norm", "logprob_gap_max"):
        assert metrics[name] == pytest.approx(before[name], rel=1e-4), name
    for name in ("kl", "ratio_mean", "ratio_max", "clip_fraction"):
        assert metrics[name] == pytest.approx(after[name], rel=1e-4), name
    assert metrics["ratio_max"] != before["ratio_max"]


def test_the_learning_rate_told_is_the_one_used() -> None:
    """Adam's first update is the rate, entry by entry, whatever the gradient."""
    config = settings(optimizer={"warmup_steps": 5, "lr": 1e-3})
    before = by_name(state_for(config, one_device()).params)
    state, metrics, _ = run(config, pack_for(config, GROUPS), Verdicts())
    assert metrics["lr"] == pytest.approx(2e-4)
    moved = max(np.abs(a - before[name]).max() for name, a in by_name(state.params).items())
    assert moved == pytest.approx(2e-4, rel=0.05)
