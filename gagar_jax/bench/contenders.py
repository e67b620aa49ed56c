"""What the advantages benchmark compares: ways to turn one batch of rewards into advantages.

Ours, the same method written naively, and other libraries through their own entry points. Timing and tables
live elsewhere. A contender that is not installed is listed with the reason, never left out in silence.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gagar_jax.algo.advantage import group_advantages

logger = logging.getLogger(__name__)

LAMBDA_MAX = 1.5


class Batch(NamedTuple):
    """One benchmark batch, NumPy, in the argument order of `group_advantages`."""

    reward_N: np.ndarray
    passed_N: np.ndarray
    quality_N: np.ndarray
    group_id_N: np.ndarray
    valid_N: np.ndarray
    external_N: np.ndarray
    graded_G: np.ndarray


class Contender(NamedTuple):
    """`prepare(batch, group_size)` returns the call to time; everything before the call is free of charge."""

    name: str
    prepare: Callable[[Batch, int], Callable[[], Any]]
    redistributes: bool  # the whole method, or normalisation only
    any_ids: bool  # arbitrary ids, or equal groups lying side by side only
    slow: bool  # Python loops: not run on millions of rows


def make_batch(
    rows: int, group_size: int, *, ragged: bool, shuffled: bool, shaped: bool, seed: int = 0
) -> Batch:
    """Rewards of half-passed groups, coefficients of the rubric, 3 % invalid, 1 % external, 90 % graded."""
    rng = np.random.default_rng(seed)
    groups = max(rows // group_size, 1)
    ids = rng.integers(0, groups, rows) if ragged else np.arange(rows) // group_size
    ids = np.minimum(ids, groups - 1).astype(np.int32)
    ids = rng.permutation(ids) if shuffled else np.sort(ids)
    passed = rng.random(rows) < 0.5
    reward = passed.astype(np.float32)
    if shaped:
        reward -= np.where(passed, 0.2 * rng.random(rows), 0).astype(np.float32)
    return Batch(
        reward,
        passed,
        rng.choice(np.array([1, 0.9, 0.85, 0.625, 0.4, 0.2], np.float32), rows),
        ids,
        rng.random(rows) < 0.97,
        rng.random(rows) < 0.01,
        rng.random(groups) < 0.9,
    )


def six_segment_sums(  # type: ignore[no-untyped-def]
    reward, passed, quality, ids, valid, external, graded, *, num_groups
):
    """The method written the obvious way in JAX: a segment sum a statistic, indexing to read it."""

    def total(column: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(column, ids, num_groups)

    reward = jnp.where(valid & ~external, reward, 0.0)
    passed = passed & valid & ~external
    size = total(valid.astype(jnp.float32))
    mean = total(reward) / jnp.maximum(size, 1.0)
    passes = total(passed.astype(jnp.float32))
    kept = (passes > 0) & (passes < size)
    centred = jnp.where(valid, reward - mean[ids], 0.0)
    gain = jnp.where(passed, jnp.maximum(centred, 0.0), 0.0)
    before, after = total(gain), total(quality * gain)
    usable = graded & (after > 0)
    scale = jnp.where(usable, jnp.minimum(before / jnp.where(usable, after, 1.0), LAMBDA_MAX), 1.0)
    shared = jnp.where(passed & usable[ids], scale[ids] * quality * gain, centred)
    shared = shared - (total(shared) / jnp.maximum(size, 1.0))[ids]
    return jnp.where(kept[ids] & valid, shared, 0.0), kept, mean, size, before - after, scale


def numpy_bincount(batch: Batch) -> np.ndarray:
    """The whole method with NumPy's bincount, float64 sums."""
    reward, passed, quality, ids, valid, external, graded = batch
    groups = graded.shape[0]
    reward = np.where(valid & ~external, reward, 0)
    passed = passed & valid & ~external
    size = np.bincount(ids, valid, groups)
    members = np.maximum(size, 1)
    passes = np.bincount(ids, passed, groups)
    kept = (passes > 0) & (passes < size)
    centred = np.where(valid, reward - (np.bincount(ids, reward, groups) / members)[ids], 0)
    gain = np.where(passed, np.maximum(centred, 0), 0)
    before, after = np.bincount(ids, gain, groups), np.bincount(ids, quality * gain, groups)
    usable = graded & (after > 0)
    scale = np.where(usable, np.minimum(before / np.where(usable, after, 1), LAMBDA_MAX), 1)
    shared = np.where(passed & usable[ids], scale[ids] * quality * gain, centred)
    shared = shared - (np.bincount(ids, shared, groups) / members)[ids]
    return np.where(kept[ids] & valid, shared, 0).astype(np.float32)


def python_lists(reward, passed, quality, ids, valid, external, graded) -> list[float]:  # type: ignore[no-untyped-def]
    """The whole method in plain Python over lists, as one would write it first; one dictionary of groups."""
    advantage = [0.0] * len(reward)
    members: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(ids):
        if valid[i]:
            members[group].append(i)
    for group, rows in members.items():
        won = [passed[i] and not external[i] for i in rows]
        passes = sum(won)
        if not 0 < passes < len(rows):
            continue
        rewards = [0.0 if external[i] else reward[i] for i in rows]
        mean = sum(rewards) / len(rows)
        shared = [r - mean for r in rewards]
        if graded[group]:
            gain = [max(a, 0.0) if w else 0.0 for a, w in zip(shared, won, strict=True)]
            after = sum(quality[i] * a for i, a in zip(rows, gain, strict=True))
            if after > 0:
                scale = min(sum(gain) / after, LAMBDA_MAX)
                shared = [
                    scale * quality[i] * g if w else a
                    for i, a, g, w in zip(rows, shared, gain, won, strict=True)
                ]
        centre = sum(shared) / len(rows)
        for i, b in zip(rows, shared, strict=True):
            advantage[i] = b - centre
    return advantage


def numpy_reshape(reward_N: np.ndarray, group_size: int) -> np.ndarray:
    """(R − mean) / (std + ε) of equal groups that lie side by side: the least any batch can need."""
    reward = reward_N.reshape(-1, group_size)
    centred = reward - reward.mean(1, keepdims=True)
    return (centred / (reward.std(1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def compiled(function: Callable[..., Any]) -> Callable[[Batch, int], Callable[[], Any]]:
    """A jitted contender with its arguments on the device; the call waits for the result."""

    def prepare(batch: Batch, group_size: int) -> Callable[[], Any]:
        jitted = jax.jit(functools.partial(function, num_groups=batch.graded_G.shape[0]))
        arguments = jax.device_put(tuple(batch))
        return lambda: jax.block_until_ready(jitted(*arguments))

    return prepare


IN_STEP = 10  # how often a compiled step of `in_a_step` computes the advantages


def in_a_step(batch: Batch, group_size: int) -> Callable[[], Any]:
    """`IN_STEP` computations in a row inside one program: the cost without dispatch. Divide by `IN_STEP`."""

    @jax.jit
    def step(reward_N: jax.Array, *rest: jax.Array) -> jax.Array:
        def once(_: jax.Array, reward_N: jax.Array) -> jax.Array:
            advantage_N = group_advantages(reward_N, *rest, num_groups=batch.graded_G.shape[0]).advantage_N
            return reward_N + 0.0 * advantage_N  # the next turn needs this one's result

        return jax.lax.fori_loop(0, IN_STEP, once, reward_N)

    arguments = jax.device_put(tuple(batch))
    return lambda: jax.block_until_ready(step(*arguments))


def copying(batch: Batch, group_size: int) -> Callable[[], Any]:
    """Reads every input once and writes one output: the memory-bandwidth limit of the problem."""

    @jax.jit
    def stream(reward, passed, quality, ids, valid, external, graded):  # type: ignore[no-untyped-def]
        flags = passed.astype(jnp.float32) + valid.astype(jnp.float32) + external.astype(jnp.float32)
        return reward + quality + flags + ids.astype(jnp.float32)

    arguments = jax.device_put(tuple(batch))
    return lambda: jax.block_until_ready(stream(*arguments))


def own() -> list[Contender]:
    """Contenders that need nothing but what this package needs."""

    def lists(batch: Batch, group_size: int) -> Callable[[], Any]:
        columns = [field.tolist() for field in batch]
        return lambda: python_lists(*columns)

    return [
        Contender("gagar_jax", compiled(group_advantages), True, True, False),
        Contender("JAX, six segment sums", compiled(six_segment_sums), True, True, False),
        Contender("NumPy bincount", lambda batch, n: lambda: numpy_bincount(batch), True, True, False),
        Contender("GAGAR in Python lists", lists, True, True, True),
        Contender(
            "NumPy reshape", lambda batch, n: lambda: numpy_reshape(batch.reward_N, n), False, False, False
        ),
    ]


def peers() -> tuple[list[Contender], dict[str, str]]:
    """Other libraries' own functions, and for each absent one why it is absent."""
    found: list[Contender] = []
    absent: dict[str, str] = {}
    for name, module, make in (
        ("verl", "verl.trainer.ppo.core_algos", _verl),
        ("TRL", "torch", _trl),
        ("tunix", "tunix.rl.algo_core", _tunix),
    ):
        try:
            found += make(importlib.import_module(module))
        except ImportError as error:
            absent[name] = f"{module}: {error}"
            logger.info("%s is not measured: %s", name, absent[name])
    return found, absent


def _verl(core_algos: Any) -> list[Contender]:
    import torch  # type: ignore[import-not-found]

    def call(function: Callable[..., Any], text_ids: bool) -> Callable[[Batch, int], Callable[[], Any]]:
        def prepare(batch: Batch, group_size: int) -> Callable[[], Any]:
            reward, mask = torch.from_numpy(batch.reward_N)[:, None], torch.ones(len(batch.reward_N), 1)
            index = batch.group_id_N.astype(object if text_ids else np.int64)
            index = np.array([f"prompt-{i}" for i in index], dtype=object) if text_ids else index
            # The dictionary path writes into its scores, so they are summed anew from the rewards inside.
            return lambda: function(reward, mask, index)

        return prepare

    plain, fast = (
        core_algos.compute_grpo_outcome_advantage,
        core_algos.compute_grpo_vectorized_outcome_advantage,
    )
    return [
        Contender("verl, dictionary", call(plain, False), False, True, True),
        Contender("verl, vectorised, integer ids", call(fast, False), False, True, False),
        Contender("verl, vectorised, string ids", call(fast, True), False, True, True),
    ]


def _trl(torch: Any) -> list[Contender]:
    """TRL (1.16, group scaling) has no function for it: its trainer's formula, in its library."""

    def prepare(batch: Batch, group_size: int) -> Callable[[], Any]:
        reward = torch.from_numpy(batch.reward_N)

        def formula() -> Any:
            grouped = reward.view(-1, group_size)
            mean = grouped.mean(1).repeat_interleave(group_size, 0)
            std = grouped.std(1).repeat_interleave(group_size, 0)
            return (reward - mean) / (std + 1e-4)

        return formula

    return [Contender("TRL's formula in torch", prepare, False, False, False)]


def _tunix(algo_core: Any) -> list[Contender]:
    def prepare(batch: Batch, group_size: int) -> Callable[[], Any]:
        return lambda: algo_core.compute_advantages(batch.reward_N, group_size)

    return [Contender("tunix", prepare, False, False, False)]
