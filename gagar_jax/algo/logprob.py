"""Log-probs and entropy of given tokens without ever holding the logits of a whole batch.

The loss that uses them lives in `loss.py`; the forward pass that makes `hidden` lives in `model`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden_BTD: jax.Array,
    unembedding_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
    entropy_gradient: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """log π(target) and H(π) with π = softmax(hidden @ unembedding / temperature).

    Tokens are taken `chunk_tokens` at a time and recomputed in the backward pass, so logits exist for
    `chunk_tokens` tokens at once, forward and backward. A chunk holds a slice of every row where it
    can, so that rows sharded over devices stay where they are.

    Args:
      hidden_BTD: final hidden states, float32 or bfloat16.
      unembedding_DV: output matrix, cast to the dtype of `hidden_BTD`; products add up in float32.
      targets_BT: int32 in [0, V); any other id has a meaningless log-prob (mask padding afterwards).
      temperature: above 0; the distribution that was sampled from.
      chunk_tokens: at least 1.
      entropy_gradient: False where the entropy is only reported.

    Returns:
      (logprob_BT, entropy_BT), float32, in nats.
    """
    rows, length = hidden_BTD.shape[:2]
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    block = min(rows, chunk_tokens)
    span = min(length, max(1, chunk_tokens // block))
    pad_rows, pad_length = -rows % block, -length % span

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, pad_rows), (0, pad_length)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(x.shape[0] // block, block, x.shape[1] // span, span, *x.shape[2:])
        return jnp.moveaxis(x, 2, 1).reshape(-1, block, span, *x.shape[4:])

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape((rows + pad_rows) // block, -1, block, span)
        return jnp.moveaxis(x, 1, 2).reshape(rows + pad_rows, length + pad_length)[:rows, :length]

    unembedding_DV = unembedding_DV.astype(hidden_BTD.dtype)

    @jax.checkpoint
    def chunk(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, targets = inputs
        logits = jnp.einsum("btd,dv->btv", hidden, unembedding_DV, preferred_element_type=jnp.float32)
        logits = logits / temperature
        # Shifting by the maximum first, not after, keeps the digits of log-probs near 0.
        logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        log_z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
        # A comparison rather than a gather: the vocabulary may be sharded.
        hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        logprob = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1) - log_z
        if not entropy_gradient:
            logits, log_z = jax.lax.stop_gradient((logits, log_z))
        entropy = log_z - jnp.sum(jnp.exp(logits - log_z[..., None]) * logits, axis=-1)
        return logprob, entropy

    logprob, entropy = jax.lax.map(chunk, (split(hidden_BTD), split(targets_BT)))
    return join(logprob), join(entropy)
