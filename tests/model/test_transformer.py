"""The training forward pass: masks as literal matrices, packing, shared prompts, scan; always finite."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gagar_jax.config import ModelConfig
from gagar_jax.model.transformer import attention, create, forward, packed_attention, rotate

SHAPE = {
    "vocab_size": 96, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_width": 48,
}  # fmt: skip
CONFIG = ModelConfig(**SHAPE)


@functools.cache
def hidden_fn(config: ModelConfig) -> Any:
    graph, params = create(config, jax.random.key(0))
    run = jax.jit(lambda p, *rows: forward(nnx.merge(graph, p), *rows))
    return functools.partial(run, params)


def ids(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(5, 96, shape).astype(np.int32)


def alone(tokens: np.ndarray) -> np.ndarray:
    """Hidden states of one sequence in a row of its own, padded to 32 so that one program serves all."""
    row = np.zeros((1, 32), np.int32)
    row[0, : len(tokens)] = tokens
    segment = (np.arange(32) < len(tokens)).astype(np.int32)[None]
    position = np.arange(32, dtype=np.int32)[None] * segment
    return np.asarray(hidden_fn(CONFIG)(row, position, segment))[0, : len(tokens)]


@functools.partial(jax.jit, static_argnames="block")
def weights(segment_BT: jax.Array, prefix_BT: jax.Array | None, block: int) -> jax.Array:
    """How much each query reads of each key when all score alike: v is the identity."""
    B, T = segment_BT.shape
    zeros = jnp.zeros((B, T, 1, T), jnp.float32)
    identity = jnp.eye(T, dtype=jnp.float32).reshape(1, T, 1, T)
    return packed_attention(zeros, zeros, identity, segment_BT, prefix_BT, block=block)[0, :, 0]


def seen_matrix(segment: list[int], prefix: list[int] | None, block: int) -> list[list[int]]:
    rows = [None if x is None else np.asarray([x], np.int32) for x in (segment, prefix)]
    return (np.asarray(weights(*rows, block=block)) > 0).astype(int).tolist()


@pytest.mark.parametrize("block", [4, 128])
def test_a_token_sees_its_segment_up_to_itself(block: int) -> None:
    assert seen_matrix([1, 1, 2, 2, 2, 0], None, block) == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("block", [3, 128])
def test_a_continuation_sees_its_prefix_and_not_its_sisters(block: int) -> None:
    assert seen_matrix([1, 1, 2, 2, 3, 0], [0, 0, 1, 1, 1, 0], block) == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_packed_attention_is_attention_under_the_mask(kv_heads: int) -> None:
    T = 40
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, T, heads, 8)).astype(np.float32) for heads in (4, kv_heads, kv_heads))
    segment = np.asarray([[1] * 17 + [2] * 20 + [0] * 3, [1] * T], np.int32)
    seen = (segment[:, :, None] == segment[:, None]) & np.tril(np.ones((T, T), bool))

    def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, [(k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), seen)])

    def blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return packed_attention(q, k, v, segment, None, block=16)

    def with_gradient(function: Any) -> Any:
        def total(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = function(*x)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(q, k, v)

    ((_, a), a_grads), ((_, b), b_grads) = with_gradient(whole), with_gradient(blocked)
    assert a.shape == b.shape == (2, T, 4, 8)
    np.testing.assert_allclose(a, b, atol=2e-6)
    for x, y in zip(a_grads, b_grads, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_packing_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    sequences = [ids(rng, n) for n in (11, 4, 14)]
    row = np.zeros((3, 32), np.int32)
    tokens, position, segment = row[:1].copy(), row[:1].copy(), row[:1].copy()
    start, spans = 0, []
    for n, sequence in enumerate(sequences, 1):
        span = slice(start, start + len(sequence))
        tokens[0, span], position[0, span], segment[0, span] = sequence, np.arange(len(sequence)), n
        start = span.stop
        spans.append(span)
    packed = np.asarray(hidden_fn(CONFIG)(tokens, position, segment))[0]
    for span, sequence in zip(spans, sequences, strict=True):
        np.testing.assert_allclose(packed[span], alone(sequence), atol=2e-5)
    assert np.isfinite(packed).all()


def test_a_shared_prompt_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    prompt, tails = ids(rng, 9), [ids(rng, n) for n in (7, 3, 10)]
    tokens = np.concatenate([prompt, *tails, np.zeros(3, np.int32)])[None]
    lengths = [len(t) for t in tails]
    own = np.concatenate([np.arange(9, 9 + n) for n in lengths])
    position = np.concatenate([np.arange(9), own, np.zeros(3)]).astype(np.int32)[None]
    segment = np.repeat([1, 2, 3, 4, 0], [9, *lengths, 3]).astype(np.int32)[None]
    prefix = np.where(segment > 1, 1, 0).astype(np.int32)
    packed = np.asarray(hidden_fn(CONFIG)(tokens, position, segment, prefix))[0]
    start = 9
    for tail in tails:
        expected = alone(np.concatenate([prompt, tail]))
        np.testing.assert_allclose(packed[:9], expected[:9], atol=2e-5)
        np.testing.assert_allclose(packed[start : start + len(tail)], expected[9:], atol=2e-5)
        start += len(tail)


@functools.cache
def gradient_of(**change: bool) -> list[np.ndarray]:
    graph, params = create(ModelConfig(**SHAPE, **change), jax.random.key(0))
    tokens = ids(np.random.default_rng(2), 2, 32)
    rows = (tokens, np.tile(np.arange(32, dtype=np.int32), (2, 1)), np.ones_like(tokens))

    def loss(p: nnx.State) -> jax.Array:
        return jnp.sum(jnp.square(forward(nnx.merge(graph, p), *rows)[:, :, :5]))

    return jax.tree.leaves(jax.device_get(jax.jit(jax.grad(loss))(params)))


@pytest.mark.parametrize("change", [{"scan_layers": True}, {"scan_layers": True, "remat": True}])
def test_scan_and_remat_change_only_how_it_is_compiled(change: dict[str, bool]) -> None:
    for a, b in zip(gradient_of(), gradient_of(**change), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(a).max())


def test_a_row_of_padding_is_finite_and_so_is_its_gradient() -> None:
    graph, params = create(CONFIG, jax.random.key(0))
    nothing = np.zeros((2, 16), np.int32)

    def loss(p: nnx.State) -> jax.Array:
        return jnp.sum(forward(nnx.merge(graph, p), nothing, nothing, nothing, nothing))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_rotation_depends_on_distance_alone() -> None:
    q, k = jax.random.normal(jax.random.key(3), (2, 1, 1, 1, 8), jnp.float32)

    @jax.jit
    def score(a: jax.Array, b: jax.Array) -> jax.Array:
        at = [jnp.full((1, 1), place, jnp.int32) for place in (a, b)]
        return jnp.sum(rotate(q, at[0], 1e4) * rotate(k, at[1], 1e4))

    assert float(score(3, 10)) == pytest.approx(float(score(103, 110)), abs=1e-4)
    assert float(score(3, 10)) != pytest.approx(float(score(3, 11)), abs=1e-3)
