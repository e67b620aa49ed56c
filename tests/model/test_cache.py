"""Sampling's side of the model gives the training forward's hidden states, however the tokens arrive."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from gagar_jax.config import ModelConfig
from gagar_jax.model import cache as kv
from gagar_jax.model.transformer import create, forward

LANES, SLOTS, PROMPT, CONTINUATION = 2, 4, 16, 12
SHAPE = {"vocab_size": 96, "width": 32, "layers": 2, "heads": 4, "head_dim": 8, "mlp_width": 48}


class Parts(NamedTuple):
    config: ModelConfig
    forward: Any
    prefill_prompt: Any
    prefill_suffix: Any
    decode: Any


@functools.cache
def parts(kv_heads: int) -> Parts:
    config = ModelConfig(**SHAPE, kv_heads=kv_heads)
    graph, params = create(config, jax.random.key(0))

    def with_layers(function: Any) -> Any:
        def run(params: nnx.State, *args: Any) -> Any:
            model = nnx.merge(graph, params)
            return function(model, model.layers(), *args)

        return functools.partial(jax.jit(run), params)

    whole = functools.partial(jax.jit(lambda p, *rows: forward(nnx.merge(graph, p), *rows)), params)
    return Parts(config, whole, *map(with_layers, (kv.prefill_prompt, kv.prefill_suffix, kv.decode)))


def i32(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def empty(config: ModelConfig) -> kv.Cache:
    return kv.init_cache(config, lanes=LANES, slots=SLOTS, max_prompt=PROMPT, max_continuation=CONTINUATION)


def prefill(p: Parts, prompts: list[np.ndarray], chunk: int) -> kv.Cache:
    """Both lanes' prompts, `chunk` tokens at a time; the shorter one idles at the end."""
    cache = empty(p.config)
    for start in range(0, max(map(len, prompts)), chunk):
        tokens, counts = np.zeros((LANES, chunk), np.int32), []
        for lane, prompt in enumerate(prompts):
            piece = prompt[start : start + chunk]
            tokens[lane, : len(piece)] = piece
            counts.append(len(piece))
        cache = p.prefill_prompt(cache, tokens, i32(*[start] * LANES), i32(*counts))
    return cache


def sequences() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts by lane and continuations by slot; slots 0, 1 are lane 0's."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 96, n).astype(np.int32) for n in (13, 6)]
    return prompts, [rng.integers(5, 96, CONTINUATION).astype(np.int32) for _ in range(SLOTS)]


@functools.cache
def expected(p: Parts) -> np.ndarray:
    """Hidden states of the continuations, from whole rows: [S, continuation, D]."""
    prompts, tails = sequences()
    out = []
    for slot, tail in enumerate(tails):
        prompt = prompts[slot // (SLOTS // LANES)]
        tokens = np.zeros((1, PROMPT + CONTINUATION), np.int32)
        length = len(prompt) + len(tail)
        tokens[0, :length] = np.concatenate([prompt, tail])
        position = np.arange(tokens.shape[1], dtype=np.int32)[None]
        hidden = p.forward(tokens, position, (position < length).astype(np.int32))
        out.append(np.asarray(hidden)[0, len(prompt) : length])
    return np.stack(out)


@pytest.mark.parametrize(("kv_heads", "chunk"), [(2, 5), (4, 16)])
def test_prefill_and_decode_are_the_forward_pass(kv_heads: int, chunk: int) -> None:
    p = parts(kv_heads)
    prompts, tails = sequences()
    cache, lengths = prefill(p, prompts, chunk), i32(*map(len, prompts))
    everyone = np.ones((SLOTS,), bool)
    for place in range(CONTINUATION):
        tokens = i32(*(int(tail[place]) for tail in tails))
        hidden, cache = p.decode(cache, tokens, i32(*[place] * SLOTS), everyone, lengths)
        np.testing.assert_allclose(hidden, expected(p)[:, place], atol=3e-5)


def test_an_observation_in_chunks_is_the_same_as_token_by_token() -> None:
    """Slot 1 decodes 2, reads 7 in chunks of 4, decodes on; slot 2 only decodes; rows of nothing stay out."""
    p = parts(2)
    prompts, tails = sequences()
    cache, lengths = prefill(p, prompts, 16), i32(*map(len, prompts))
    for place in range(2):
        tokens = i32(*(int(tail[place]) for tail in tails))
        _, cache = p.decode(cache, tokens, i32(*[place] * SLOTS), np.ones((SLOTS,), bool), lengths)
    for start, count in ((2, 4), (6, 3)):
        rows = np.zeros((2, 4), np.int32)
        rows[0, :count] = tails[1][start : start + count]
        rows[1] = 77  # a row that asks for nothing, for a slot in use
        cache = p.prefill_suffix(cache, i32(1, 2), rows, i32(start, 2), i32(count, 0), lengths)
    only = np.asarray([False, True, True, False])
    places = {1: 9, 2: 2}
    for _ in range(3):
        tokens = [0, int(tails[1][places[1]]), int(tails[2][places[2]]), 0]
        hidden, cache = p.decode(cache, i32(*tokens), i32(0, places[1], places[2], 0), only, lengths)
        for slot in places:
            np.testing.assert_allclose(hidden[slot], expected(p)[slot, places[slot]], atol=3e-5)
            places[slot] += 1


def test_idle_slots_and_lanes_are_untouched() -> None:
    p = parts(2)
    prompts, _ = sequences()
    cache = prefill(p, prompts, 16)
    lengths = i32(*map(len, prompts))
    idle = np.zeros((SLOTS,), bool)
    hidden, after = p.decode(cache, i32(9, 9, 9, 9), i32(0, 0, 0, 0), idle, lengths)
    after = p.prefill_prompt(after, np.full((LANES, 4), 9, np.int32), i32(0, 0), i32(0, 0))
    after = p.prefill_suffix(after, i32(0, 3), np.full((2, 4), 9, np.int32), i32(0, 0), i32(0, 0), lengths)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(hidden).all()


def test_a_reused_slot_remembers_nothing() -> None:
    """What an earlier episode left in the suffix, beyond the place reached, is not read."""
    p = parts(2)
    prompts, tails = sequences()
    lengths = i32(*map(len, prompts))
    fresh = prefill(p, prompts, 16)
    used = tuple(
        layer._replace(suffix_k=layer.suffix_k + 3.0, suffix_v=layer.suffix_v - 5.0) for layer in fresh
    )
    tokens, start, everyone = i32(*(int(t[0]) for t in tails)), i32(0, 0, 0, 0), np.ones((SLOTS,), bool)
    a, _ = p.decode(fresh, tokens, start, everyone, lengths)
    b, _ = p.decode(used, tokens, start, everyone, lengths)
    np.testing.assert_array_equal(a, b)
