"""Sampling's side of the model: the key/value cache, prefill of prompts and observations, one decode step.

The cache is in two parts because a group shares its prompt: `prefix` holds one prompt a lane, read by
all slots of the lane as one matrix product, and `suffix` holds what each slot added of its own. A
token's position is its place in the whole sequence: prompt length of its lane + place in the suffix.

Heads are folded into the leading axis ([rows · K, tokens, d]) so that attention is one plain batched
product; on a CPU the natural [rows, tokens, heads, d] layout cost six times as much.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gagar_jax.config import ModelConfig
from gagar_jax.model.transformer import MASKED, Block, Transformer, attention


class LayerCache(NamedTuple):
    """Keys and values of one layer: prefix_* [P·K, prompt length, d], suffix_* [S·K, continuation, d]."""

    prefix_k: jax.Array
    prefix_v: jax.Array
    suffix_k: jax.Array
    suffix_v: jax.Array


Cache = tuple[LayerCache, ...]


def init_cache(
    config: ModelConfig, *, lanes: int, slots: int, max_prompt: int, max_continuation: int
) -> Cache:
    def zeros(rows: int, length: int) -> jax.Array:
        return jnp.zeros((rows * config.kv_heads, length, config.head_dim), jnp.dtype(config.compute_dtype))

    def layer() -> LayerCache:
        prefix, suffix = (lanes, max_prompt), (slots, max_continuation)
        return LayerCache(zeros(*prefix), zeros(*prefix), zeros(*suffix), zeros(*suffix))

    return tuple(layer() for _ in range(config.layers))


def _store(table: jax.Array, row_R: jax.Array, column_RT: jax.Array, new_RTKd: jax.Array) -> jax.Array:
    """Writes new_RTKd[r, t] to rows row_R[r]·K… at column_RT[r, t]; out-of-range columns are dropped."""
    R, T, K, _ = new_RTKd.shape
    row = (row_R[:, None] * K + jnp.arange(K, dtype=jnp.int32)[None]).reshape(R, K, 1)
    row = jnp.broadcast_to(row, (R, K, T))
    column = jnp.broadcast_to(column_RT[:, None], (R, K, T))
    return table.at[row, column].set(
        new_RTKd.swapaxes(1, 2).astype(table.dtype), mode="drop", unique_indices=True
    )


def _rows(table: jax.Array, row_R: jax.Array, kv_heads: int) -> jax.Array:
    """[R, K, tokens, d]: the cache rows of some lanes or slots."""
    return jnp.take(table.reshape(-1, kv_heads, *table.shape[1:]), row_R, axis=0, mode="clip")


def _columns(start_R: jax.Array, count_R: jax.Array, width: int, length: int) -> jax.Array:
    """start + 0…width−1 for the first `count` places and `length` (out of range) for the others."""
    place = jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.where(place < count_R[:, None], start_R[:, None] + place, jnp.int32(length))


def prefill_prompt(
    model: Transformer,
    layers: list[Block],
    cache: Cache,
    tokens_PT: jax.Array,
    start_P: jax.Array,
    count_P: jax.Array,
) -> Cache:
    """Adds the next chunk of every lane's prompt. Lanes with count 0 are untouched."""
    lanes, width = tokens_PT.shape
    lane_P = jnp.arange(lanes, dtype=jnp.int32)
    length = cache[0].prefix_k.shape[1]
    column_PT = _columns(start_P, count_P, width, length)
    position_PT = start_P[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    key_T = jnp.arange(length, dtype=jnp.int32)
    mask = key_T[None, None] <= position_PT[:, :, None]
    x, new = model.embed(tokens_PT), []
    for block, layer in zip(layers, cache, strict=True):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache = layer) -> jax.Array:
            layer = layer._replace(
                prefix_k=_store(layer.prefix_k, lane_P, column_PT, k),
                prefix_v=_store(layer.prefix_v, lane_P, column_PT, v),
            )
            new.append(layer)
            K = k.shape[2]
            return attention(q, [(_rows(layer.prefix_k, lane_P, K), _rows(layer.prefix_v, lane_P, K), mask)])

        x = block(x, position_PT, attend)
    return tuple(new)


def prefill_suffix(
    model: Transformer,
    layers: list[Block],
    cache: Cache,
    slot_R: jax.Array,
    tokens_RT: jax.Array,
    start_R: jax.Array,
    count_R: jax.Array,
    prompt_length_P: jax.Array,
) -> Cache:
    """Adds a chunk of observation to some slots' suffixes. Rows with count 0 are untouched.

    Args:
      slot_R: which slot each row is; lane = slot // (slots a lane).
      tokens_RT: the chunk; places past count_R are ignored.
      start_R: tokens already in the slot's suffix.
      count_R: tokens of this chunk.
      prompt_length_P: tokens in each lane's prefix.
    """
    width, kv_heads = tokens_RT.shape[1], model.config.kv_heads
    prompt, length = cache[0].prefix_k.shape[1], cache[0].suffix_k.shape[1]
    lane_R = slot_R // (cache[0].suffix_k.shape[0] // cache[0].prefix_k.shape[0])
    column_RT = _columns(start_R, count_R, width, length)
    place_RT = start_R[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    position_RT = jnp.take(prompt_length_P, lane_R, mode="clip")[:, None] + place_RT
    prompt_mask = (
        jnp.arange(prompt, dtype=jnp.int32)[None, None] < jnp.take(prompt_length_P, lane_R)[:, None, None]
    )
    prompt_mask = jnp.broadcast_to(prompt_mask, (*tokens_RT.shape, prompt))
    suffix_mask = jnp.arange(length, dtype=jnp.int32)[None, None] <= place_RT[:, :, None]
    x, new = model.embed(tokens_RT), []
    for block, layer in zip(layers, cache, strict=True):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache = layer) -> jax.Array:
            layer = layer._replace(
                suffix_k=_store(layer.suffix_k, slot_R, column_RT, k),
                suffix_v=_store(layer.suffix_v, slot_R, column_RT, v),
            )
            new.append(layer)
            prefix = (
                _rows(layer.prefix_k, lane_R, kv_heads),
                _rows(layer.prefix_v, lane_R, kv_heads),
                prompt_mask,
            )
            suffix = (
                _rows(layer.suffix_k, slot_R, kv_heads),
                _rows(layer.suffix_v, slot_R, kv_heads),
                suffix_mask,
            )
            return attention(q, [prefix, suffix])

        x = block(x, position_RT, attend)
    return tuple(new)


def decode(
    model: Transformer,
    layers: list[Block],
    cache: Cache,
    token_S: jax.Array,
    place_S: jax.Array,
    active_S: jax.Array,
    prompt_length_P: jax.Array,
) -> tuple[jax.Array, Cache]:
    """One token a slot: stores it at `place_S` of the suffix and returns hidden_SD (final norm applied).

    Slots that are not active store nothing; their hidden state is finite and means nothing.
    """
    slots, lanes = token_S.shape[0], prompt_length_P.shape[0]
    length = cache[0].suffix_k.shape[1]
    slot_S = jnp.arange(slots, dtype=jnp.int32)
    column_S1 = jnp.where(active_S, place_S, jnp.int32(length))[:, None]
    position_S1 = (jnp.repeat(prompt_length_P, slots // lanes) + place_S)[:, None]
    prefix_mask = jnp.arange(cache[0].prefix_k.shape[1], dtype=jnp.int32)[None] < prompt_length_P[:, None]
    suffix_mask = jnp.arange(length, dtype=jnp.int32)[None] <= place_S[:, None]
    x, new = model.embed(token_S[:, None]), []
    for block, layer in zip(layers, cache, strict=True):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache = layer) -> jax.Array:
            layer = layer._replace(
                suffix_k=_store(layer.suffix_k, slot_S, column_S1, k),
                suffix_v=_store(layer.suffix_v, slot_S, column_S1, v),
            )
            new.append(layer)
            return decode_attention(q[:, 0], layer, prefix_mask, suffix_mask)[:, None]

        x = block(x, position_S1, attend)
    return model.finish(x)[:, 0], tuple(new)


def decode_attention(
    q_SHd: jax.Array, cache: LayerCache, prefix_mask_PT: jax.Array, suffix_mask_ST: jax.Array
) -> jax.Array:
    """One new token a slot against its lane's prompt and its own suffix: [S, H, d].

    The M slots of a lane read their prompt's keys as one [M·H/K, d] × [d, T] product, so a prompt is
    fetched once a lane and not once a slot. Softmax runs over both parts together, in float32.
    """
    S, H, d = q_SHd.shape
    P, prompt = prefix_mask_PT.shape
    K = cache.prefix_k.shape[0] // P
    M, G = S // P, H // K
    q = q_SHd.reshape(P, M, K, G, d)
    lane_q = q.transpose(0, 2, 1, 3, 4).reshape(P * K, M * G, d)
    prefix = (lane_q @ cache.prefix_k.swapaxes(1, 2)).reshape(P, K, M, G, prompt)
    prefix = jnp.where(prefix_mask_PT[:, None, None, None], prefix.astype(jnp.float32), jnp.float32(MASKED))
    suffix = (q.reshape(S * K, G, d) @ cache.suffix_k.swapaxes(1, 2)).reshape(P, M, K, G, -1)
    suffix_mask = suffix_mask_ST.reshape(P, M, 1, 1, -1)
    suffix = jnp.where(suffix_mask, suffix.astype(jnp.float32), jnp.float32(MASKED)).transpose(0, 2, 1, 3, 4)
    top = jnp.maximum(prefix.max(-1, keepdims=True), suffix.max(-1, keepdims=True))
    prefix, suffix = jnp.exp(prefix - top), jnp.exp(suffix - top)
    total = prefix.sum(-1, keepdims=True) + suffix.sum(-1, keepdims=True)
    prefix_w = (prefix / total).astype(cache.prefix_v.dtype).reshape(P * K, M * G, prompt)
    suffix_w = (suffix / total).astype(cache.suffix_v.dtype).transpose(0, 2, 1, 3, 4).reshape(S * K, G, -1)
    from_prefix = (prefix_w @ cache.prefix_v).reshape(P, K, M, G, d).transpose(0, 2, 1, 3, 4)
    from_suffix = (suffix_w @ cache.suffix_v).reshape(P, M, K, G, d)
    return (from_prefix + from_suffix).reshape(S, H, d)
