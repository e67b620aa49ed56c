"""Sampling's side of the model: the key/value cache, prefill of prompts and observations, one decode step.

The cache is in two parts because a group shares its prompt: `prefix` holds one prompt a lane, read by
all slots of the lane as one matrix product, and `suffix` holds what each slot added of its own. A
token's position is its place in the whole sequence: prompt length of its lane + place in the suffix.

Heads are folded into the leading axis and keys lie transposed, so that attention is plain batched
products; on a CPU the natural [rows, tokens, heads, d] layout cost six times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gagar_jax.config import ModelConfig
from gagar_jax.model.transformer import MASKED, Block, Transformer, attention


class LayerCache(NamedTuple):
    """One layer's keys [rows · K, d, tokens] and values [rows · K, tokens, d]; a row is a lane or a slot."""

    prefix_k: jax.Array
    prefix_v: jax.Array
    suffix_k: jax.Array
    suffix_v: jax.Array


Cache = tuple[LayerCache, ...]
AttendLayer = Callable[[LayerCache, jax.Array, jax.Array, jax.Array], tuple[jax.Array, LayerCache]]


def init_cache(
    config: ModelConfig, *, lanes: int, slots: int, max_prompt: int, max_continuation: int
) -> Cache:
    def zeros(rows: int, *shape: int) -> jax.Array:
        return jnp.zeros((rows * config.kv_heads, *shape), jnp.dtype(config.compute_dtype))

    def layer() -> LayerCache:
        d = config.head_dim
        return LayerCache(
            prefix_k=zeros(lanes, d, max_prompt),
            prefix_v=zeros(lanes, max_prompt, d),
            suffix_k=zeros(slots, d, max_continuation),
            suffix_v=zeros(slots, max_continuation, d),
        )

    return tuple(layer() for _ in range(config.layers))


def _store(
    k: jax.Array,
    v: jax.Array,
    row_R: jax.Array,
    column_RT: jax.Array,
    new_k_RTKd: jax.Array,
    new_v_RTKd: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes place [r, t] of the new keys and values to row row_R[r] at column_RT[r, t].

    Columns out of range are dropped.
    """
    R, T, K, _ = new_k_RTKd.shape
    row = (row_R[:, None] * K + jnp.arange(K, dtype=jnp.int32)[None]).reshape(R, K, 1)
    row = jnp.broadcast_to(row, (R, K, T))
    column = jnp.broadcast_to(column_RT[:, None], (R, K, T))
    new_k, new_v = (new.swapaxes(1, 2).astype(k.dtype) for new in (new_k_RTKd, new_v_RTKd))
    return (
        k.at[row, :, column].set(new_k, mode="drop", unique_indices=True),
        v.at[row, column].set(new_v, mode="drop", unique_indices=True),
    )


def _rows(table: jax.Array, row_R: jax.Array, kv_heads: int) -> jax.Array:
    """[R, K, …]: the cache rows of some lanes or slots."""
    return jnp.take(table.reshape(-1, kv_heads, *table.shape[1:]), row_R, axis=0, mode="clip")


def _columns(start_R: jax.Array, count_R: jax.Array, width: int, length: int) -> jax.Array:
    """start + 0…width−1 for the first `count` places and `length` (out of range) for the others."""
    place = jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.where(place < count_R[:, None], start_R[:, None] + place, jnp.int32(length))


def _through_layers(
    model: Transformer,
    layers: list[Block],
    cache: Cache,
    tokens_RT: jax.Array,
    position_RT: jax.Array,
    attend: AttendLayer,
) -> tuple[jax.Array, Cache]:
    """Hidden states [R, T, D] before the final norm, and the cache with what `attend` stored in it."""
    x, new = model.embed(tokens_RT), []
    for block, layer in zip(layers, cache, strict=True):

        def attend_here(q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache = layer) -> jax.Array:
            out, stored = attend(layer, q, k, v)
            new.append(stored)
            return out

        x = block(x, position_RT, attend_here)
    return x, tuple(new)


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
    length = cache[0].prefix_v.shape[1]
    column_PT = _columns(start_P, count_P, width, length)
    position_PT = start_P[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    mask = jnp.arange(length, dtype=jnp.int32)[None, None] <= position_PT[:, :, None]

    def attend(layer: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
        K = k.shape[2]
        prefix_k, prefix_v = _store(layer.prefix_k, layer.prefix_v, lane_P, column_PT, k, v)
        out = attention(q, [(_rows(prefix_k, lane_P, K), _rows(prefix_v, lane_P, K), mask)])
        return out, layer._replace(prefix_k=prefix_k, prefix_v=prefix_v)

    return _through_layers(model, layers, cache, tokens_PT, position_PT, attend)[1]


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
    width, prompt, length = tokens_RT.shape[1], cache[0].prefix_v.shape[1], cache[0].suffix_v.shape[1]
    lane_R = slot_R // (cache[0].suffix_v.shape[0] // cache[0].prefix_v.shape[0])
    column_RT = _columns(start_R, count_R, width, length)
    place_RT = start_R[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    prompt_length_R = jnp.take(prompt_length_P, lane_R, mode="clip")
    prefix_mask = jnp.arange(prompt, dtype=jnp.int32)[None, None] < prompt_length_R[:, None, None]
    prefix_mask = jnp.broadcast_to(prefix_mask, (*tokens_RT.shape, prompt))
    suffix_mask = jnp.arange(length, dtype=jnp.int32)[None, None] <= place_RT[:, :, None]

    def attend(layer: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
        K = k.shape[2]
        suffix_k, suffix_v = _store(layer.suffix_k, layer.suffix_v, slot_R, column_RT, k, v)
        prefix = (_rows(layer.prefix_k, lane_R, K), _rows(layer.prefix_v, lane_R, K), prefix_mask)
        suffix = (_rows(suffix_k, slot_R, K), _rows(suffix_v, slot_R, K), suffix_mask)
        return attention(q, [prefix, suffix]), layer._replace(suffix_k=suffix_k, suffix_v=suffix_v)

    position_RT = prompt_length_R[:, None] + place_RT
    return _through_layers(model, layers, cache, tokens_RT, position_RT, attend)[1]


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
    prompt, length = cache[0].prefix_v.shape[1], cache[0].suffix_v.shape[1]
    slot_S = jnp.arange(slots, dtype=jnp.int32)
    column_S1 = jnp.where(active_S, place_S, jnp.int32(length))[:, None]
    position_S1 = (jnp.repeat(prompt_length_P, slots // lanes) + place_S)[:, None]
    prefix_mask = jnp.arange(prompt, dtype=jnp.int32)[None] < prompt_length_P[:, None]
    suffix_mask = jnp.arange(length, dtype=jnp.int32)[None] <= place_S[:, None]

    def attend(layer: LayerCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
        suffix_k, suffix_v = _store(layer.suffix_k, layer.suffix_v, slot_S, column_S1, k, v)
        layer = layer._replace(suffix_k=suffix_k, suffix_v=suffix_v)
        return decode_attention(q[:, 0], layer, prefix_mask, suffix_mask)[:, None], layer

    x, new = _through_layers(model, layers, cache, token_S[:, None], position_S1, attend)
    return model.finish(x)[:, 0], new


def decode_attention(
    q_SHd: jax.Array, cache: LayerCache, prefix_mask_PT: jax.Array, suffix_mask_ST: jax.Array
) -> jax.Array:
    """One new token a slot against its lane's prompt and its own suffix: [S, H, d].

    The M slots of a lane read their prompt's keys as one [M·H/K, d] × [d, T] product, so a prompt is
    fetched once a lane and not once a slot. The two parts meet as in flash attention: each gives its
    weighted values, the sum of its weights, and the maximum that both were scaled by.
    """
    S, H, d = q_SHd.shape
    P = prefix_mask_PT.shape[0]
    K = cache.prefix_k.shape[0] // P
    M, G = S // P, H // K

    def part(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        """q [rows · K, n, d], mask [rows, T] → values [rows, K · n, d]; totals, maxima [rows, K · n, 1]."""
        n, rows, T = q.shape[1], *mask.shape
        score = (q @ k).astype(jnp.float32).reshape(rows, K * n, T)
        score = jnp.where(mask[:, None], score, jnp.float32(MASKED))
        top = score.max(-1, keepdims=True)
        weight = jnp.exp(score - top)
        value = weight.astype(v.dtype).reshape(rows * K, n, T) @ v
        return value.reshape(rows, K * n, d), weight.sum(-1, keepdims=True), top

    q = q_SHd.reshape(P, M, K, G, d)
    by_lane = part(q.swapaxes(1, 2).reshape(P * K, M * G, d), cache.prefix_k, cache.prefix_v, prefix_mask_PT)
    by_slot = part(q.reshape(S * K, G, d), cache.suffix_k, cache.suffix_v, suffix_mask_ST)
    value_p, total_p, top_p = (x.reshape(P, K, M, G, -1).swapaxes(1, 2).reshape(S, H, -1) for x in by_lane)
    value_s, total_s, top_s = by_slot
    top = jnp.maximum(top_p, top_s)
    scale_p, scale_s = jnp.exp(top_p - top), jnp.exp(top_s - top)
    total = total_p * scale_p + total_s * scale_s
    return value_p * (scale_p / total).astype(value_p.dtype) + value_s * (scale_s / total).astype(
        value_s.dtype
    )
