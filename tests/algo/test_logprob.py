"""Chunked log-probs and entropy against the dense computation, in values, gradients and memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gagar_jax.algo.logprob import token_logprobs

B, T, D, V = 3, 13, 8, 50


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (B, T, D), dtype)
    unembedding = jax.random.normal(keys[1], (D, V), dtype)
    return hidden, unembedding, jax.random.randint(keys[2], (B, T), 0, V, jnp.int32)


def dense(hidden, unembedding, targets, temperature):
    logits = jnp.einsum("btd,dv->btv", hidden, unembedding) / temperature
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0], entropy


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 12, 39, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_dense(chunk_tokens, temperature):
    ours = token_logprobs(*inputs(), temperature=temperature, chunk_tokens=chunk_tokens)
    for a, b in zip(ours, dense(*inputs(), temperature), strict=True):
        assert a.shape == (B, T)
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("chunk_tokens", [2, 8, 1000])
def test_gradients_equal_dense(chunk_tokens):
    hidden, unembedding, targets = inputs()
    weights = jax.random.normal(jax.random.key(1), (2, B, T))

    def total(function):
        def loss(hidden, unembedding):
            logprob, entropy = function(hidden, unembedding, targets)
            return jnp.sum(weights[0] * logprob + weights[1] * entropy)

        return jax.grad(loss, argnums=(0, 1))(hidden, unembedding)

    ours = total(functools.partial(token_logprobs, temperature=0.8, chunk_tokens=chunk_tokens))
    for a, b in zip(ours, total(functools.partial(dense, temperature=0.8)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_entropy_gradient_can_be_left_out():
    hidden, unembedding, targets = inputs()

    def gradient(of_entropy: bool, keep: bool):
        def loss(hidden):
            outputs = token_logprobs(hidden, unembedding, targets, chunk_tokens=8, entropy_gradient=keep)
            return jnp.sum(outputs[1 if of_entropy else 0])

        return jax.grad(loss)(hidden)

    assert not gradient(True, keep=False).any()
    assert gradient(True, keep=True).any()
    np.testing.assert_array_equal(gradient(False, keep=False), gradient(False, keep=True))


def test_entropy_limits():
    hidden = jnp.zeros((1, 2, 1)).at[0, 1, 0].set(200.0)
    unembedding = jnp.zeros((1, V)).at[0, 0].set(1.0)
    _, entropy = token_logprobs(hidden, unembedding, jnp.zeros((1, 2), jnp.int32), chunk_tokens=4)
    np.testing.assert_allclose(entropy, [[np.log(V), 0.0]], atol=1e-5)


def test_bfloat16_adds_up_in_float32():
    hidden, unembedding, targets = inputs(jnp.bfloat16)
    logprob, _ = token_logprobs(hidden, unembedding.astype(jnp.float32), targets, chunk_tokens=8)
    exact, _ = dense(hidden.astype(jnp.float32), unembedding.astype(jnp.float32), targets, 1.0)
    assert logprob.dtype == jnp.float32
    np.testing.assert_allclose(logprob, exact, atol=1e-4)


def test_memory_grows_with_the_chunk_and_not_with_the_batch():
    """Forward and backward: logits of `chunk_tokens` tokens, never of all of them."""
    vocabulary, width = 4096, 16

    def temporaries(tokens: int, chunk_tokens: int) -> int:
        def loss(hidden, unembedding, targets):
            logprob, entropy = token_logprobs(hidden, unembedding, targets, chunk_tokens=chunk_tokens)
            return jnp.sum(logprob) + jnp.sum(entropy)

        shapes = (
            jax.ShapeDtypeStruct((4, tokens // 4, width), jnp.float32),
            jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
            jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32),
        )
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, long, coarse = temporaries(1024, 64), temporaries(4096, 64), temporaries(4096, 512)
    logits = 4096 * vocabulary * 4
    assert long < logits / 4
    assert long - small < logits / 16  # four times the tokens: only the hidden states grow
    assert coarse > long + 400 * vocabulary * 4  # the measurement sees the logits of a chunk


def test_refuses_an_empty_chunk():
    with pytest.raises(ValueError, match="chunk_tokens"):
        token_logprobs(*inputs(), chunk_tokens=0)
