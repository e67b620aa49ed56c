"""The decoder, in reading order: weights → rotary → attention → block → model → forward.

One set of layers serves two uses: `forward` here reads whole packed rows (training), and `cache.py`
reads new tokens against stored keys (sampling). They share every weight and every line of a block;
only the `attend` function they hand it differs, so their log-probs agree to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gagar_jax.config import ModelConfig

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v [B, T, heads, d] → [B, T, H, d]
MASKED = -1e30  # finite, so that a row with nothing to attend to gives no NaN


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, scale: float, dtype: Any
) -> nnx.Param:
    """A parameter with normal(0, scale) values and the logical axes `sharding.RULES` places."""
    value = (scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
    return nnx.Param(value, logical_axes=axes)


def rms_norm(x: jax.Array, gain: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x²) + ε) · gain over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + jnp.float32(epsilon))
    gain32 = gain.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + gain.shape)
    return (x32 * scale * gain32).astype(x.dtype)


def rotate(x_BTHd: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding: halves of the head rotate as (x₁, x₂) pairs by position · θ^(−2i/d)."""
    half = x_BTHd.shape[-1] // 2
    frequency = jnp.float32(theta) ** (-jnp.arange(half, dtype=jnp.float32) / jnp.float32(half))
    angle = position_BT.astype(jnp.float32)[..., None, None] * frequency.reshape(1, 1, 1, half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = x_BTHd[..., :half].astype(jnp.float32), x_BTHd[..., half:].astype(jnp.float32)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTHd.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); squared ReLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, dtype = config, jnp.dtype(config.param_dtype)
        make = functools.partial(weight, rngs, dtype=dtype)
        into, out = c.width**-0.5, (2 * c.layers) ** -0.5
        self.attention_norm = nnx.Param(jnp.ones((c.width,), dtype), logical_axes=("width",))
        self.query = make((c.width, c.heads * c.head_dim), ("width", "heads"), scale=into)
        self.key = make((c.width, c.kv_heads * c.head_dim), ("width", "kv_heads"), scale=into)
        self.value = make((c.width, c.kv_heads * c.head_dim), ("width", "kv_heads"), scale=into)
        self.output = make(
            (c.heads * c.head_dim, c.width), ("heads", "width"), scale=out * (c.heads * c.head_dim) ** -0.5
        )
        self.mlp_norm = nnx.Param(jnp.ones((c.width,), dtype), logical_axes=("width",))
        self.up = make((c.width, c.mlp_width), ("width", "mlp"), scale=into)
        self.down = make((c.mlp_width, c.width), ("mlp", "width"), scale=out * c.mlp_width**-0.5)
        self.config = config

    def __call__(self, x_BTD: jax.Array, position_BT: jax.Array, attend: Attend) -> jax.Array:
        c = self.config
        B, T, D = x_BTD.shape
        dtype = jnp.dtype(c.compute_dtype)
        # Rows and time are flattened before every product: one large matmul instead of B small ones.
        x = x_BTD.reshape(B * T, D)
        with jax.named_scope("attention"):
            h = rms_norm(x, self.attention_norm[...]).astype(dtype)
            q = (h @ self.query[...].astype(dtype)).reshape(B, T, c.heads, c.head_dim)
            k = (h @ self.key[...].astype(dtype)).reshape(B, T, c.kv_heads, c.head_dim)
            v = (h @ self.value[...].astype(dtype)).reshape(B, T, c.kv_heads, c.head_dim)
            q, k = rotate(q, position_BT, c.rope_theta), rotate(k, position_BT, c.rope_theta)
            mixed = attend(q * jnp.asarray(c.head_dim**-0.5, dtype), k, v).reshape(
                B * T, c.heads * c.head_dim
            )
            x = x + mixed @ self.output[...].astype(dtype)
        with jax.named_scope("mlp"):
            h = rms_norm(x, self.mlp_norm[...]).astype(dtype)
            h = jnp.square(jax.nn.relu(h @ self.up[...].astype(dtype)))
            x = x + h @ self.down[...].astype(dtype)
        return x.reshape(B, T, D)


class Transformer(nnx.Module):
    """Embedding, `config.layers` blocks stacked on a leading axis, final norm; the embedding unembeds too."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, dtype = config, jnp.dtype(config.param_dtype)
        self.embedding = weight(
            rngs, (c.vocab_size, c.width), ("vocab", "width"), scale=c.width**-0.5, dtype=dtype
        )
        self.final_norm = nnx.Param(jnp.ones((c.width,), dtype), logical_axes=("width",))
        blocks = [Block(c, rngs) for _ in range(c.layers)]
        graph = nnx.graphdef(blocks[0])
        states = [nnx.state(block) for block in blocks]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        self.blocks = nnx.merge(graph, stacked)
        for _, param in nnx.iter_graph(self.blocks):
            if isinstance(param, nnx.Param):
                param.set_metadata("logical_axes", ("layers", *param.get_metadata()["logical_axes"]))
        self.config = config

    def layers(self) -> list[Block]:
        graph, stacked = nnx.split(self.blocks)
        return [
            nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(self.config.layers)
        ]

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        table = self.embedding[...].astype(jnp.dtype(self.config.compute_dtype))
        return jnp.take(table, tokens_BT, axis=0) * jnp.asarray(self.config.width**0.5, table.dtype)

    def unembedding(self) -> jax.Array:
        """[D, V], in the compute dtype."""
        return self.embedding[...].astype(jnp.dtype(self.config.compute_dtype)).T

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        return rms_norm(x_BTD, self.final_norm[...])


def create(config: ModelConfig, key: jax.Array) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    """A fresh model as (static graph, parameters). `nnx.merge` puts them together again."""
    return nnx.split(Transformer(config, nnx.Rngs(params=key)))


def abstract(config: ModelConfig) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    """As `create`, with shapes in place of arrays: nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=jax.random.key(0)))))


def attention(q_BQHd: jax.Array, parts: list[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """Softmax attention over several stretches of keys at once, grouped queries, float32 softmax.

    Args:
      q_BQHd: queries, already scaled.
      parts: (k [B, K, d, T], v [B, K, T, d], mask [B, Q, T]) for each stretch.

    Returns:
      [B, Q, H, d] in the dtype of v.
    """
    B, Q, H, d = q_BQHd.shape
    K = parts[0][0].shape[1]
    q = q_BQHd.reshape(B, Q, K, H // K, d).transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * Q, d)
    scores = []
    for k, _, mask in parts:
        score = (q @ k).reshape(B, K, H // K, Q, k.shape[3]).astype(jnp.float32)
        scores.append(jnp.where(mask[:, None, None], score, jnp.float32(MASKED)))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out, start = jnp.zeros((B, K, H // K * Q, d), parts[0][1].dtype), 0
    for _, v, _ in parts:
        span = weights[..., start : start + v.shape[2]].astype(v.dtype)
        out = out + span.reshape(B, K, H // K * Q, v.shape[2]) @ v
        start += v.shape[2]
    return out.reshape(B, K, H // K, Q, d).transpose(0, 3, 1, 2, 4).reshape(B, Q, H, d)


def packed_attention(
    q_BTHd: jax.Array,
    k_BTKd: jax.Array,
    v_BTKd: jax.Array,
    segment_BT: jax.Array,
    prefix_BT: jax.Array | None,
    *,
    block: int = 128,
) -> jax.Array:
    """`attention` over whole packed rows, under the mask that `forward` describes.

    Queries go in blocks against the keys up to their end, so no score of a later block is computed and a
    block's scores stay in a CPU's cache; the softmax divides after the product with v. On a CPU a
    gradient costs half of what the whole T × T square costs at T = 512.

    Args:
      q_BTHd: queries, already scaled.
      k_BTKd, v_BTKd: keys and values; K divides H.
      segment_BT, prefix_BT: as for `forward`.
      block: queries at a time.

    Returns:
      [B, T, H, d] in the dtype of v.
    """
    B, T, H, d = q_BTHd.shape
    K = k_BTKd.shape[2]
    q = q_BTHd.reshape(B, T, K, H // K, d).transpose(0, 2, 3, 1, 4).reshape(B * K, H // K, T, d)
    k = k_BTKd.transpose(0, 2, 1, 3).reshape(B * K, T, d)
    v = v_BTKd.transpose(0, 2, 1, 3).reshape(B * K, T, d)
    place_T, out = jnp.arange(T, dtype=jnp.int32), []
    for start in range(0, T, block):
        end = min(start + block, T)
        seen = segment_BT[:, start:end, None] == segment_BT[:, None, :end]
        if prefix_BT is not None:
            prefix = jnp.where(prefix_BT > 0, prefix_BT, -1)[:, start:end, None]
            seen = seen | (prefix == segment_BT[:, None, :end])
        seen = seen & (place_T[None, start:end, None] >= place_T[None, None, :end])
        score = (q[:, :, start:end].reshape(B * K, -1, d) @ k[:, :end].swapaxes(1, 2)).astype(jnp.float32)
        score = jnp.where(seen[:, None], score.reshape(B, H, end - start, end), jnp.float32(MASKED))
        weight = jnp.exp(score - jax.lax.stop_gradient(score.max(-1, keepdims=True)))
        total = weight.sum(-1).reshape(B * K, -1, 1)
        mixed = weight.astype(v.dtype).reshape(B * K, -1, end) @ v[:, :end]
        out.append((mixed / total.astype(v.dtype)).reshape(B, H, end - start, d))
    return jnp.concatenate(out, axis=2).transpose(0, 2, 1, 3)


def forward(
    model: Transformer,
    tokens_BT: jax.Array,
    position_BT: jax.Array,
    segment_BT: jax.Array,
    prefix_BT: jax.Array | None = None,
) -> jax.Array:
    """Hidden states of packed rows.

    A token attends to earlier tokens of its own segment, itself included, and to all of its prefix: an
    earlier segment of the row that several segments continue (a prompt that a group shares).

    Args:
      tokens_BT: int32 ids.
      position_BT: int32, a token's place in its sequence; a segment with a prefix goes on where that ends.
      segment_BT: int32, 0 for padding, 1… for the segments packed in a row.
      prefix_BT: int32, the segment that a token's segment continues; 0, or no array, for none.

    Returns:
      hidden_BTD after the final norm; rows of padding hold finite values of no meaning.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return packed_attention(q, k, v, segment_BT, prefix_BT)

    def layer(block: Block, x: jax.Array) -> jax.Array:
        return block(x, position_BT, attend)

    run = nnx.remat(layer) if model.config.remat else layer
    x_BTD = model.embed(tokens_BT)
    if model.config.scan_layers:
        x_BTD = nnx.scan(lambda x, block: run(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x_BTD, model.blocks
        )
    else:
        for block in model.layers():
            x_BTD = run(block, x_BTD)
    return model.finish(x_BTD)
