"""The rollout as one compiled program: decode a block, exchange with the host, prefill what it sent, repeat.

    while not stop:
        exchange   one io_callback: tokens and log-probs out; observations, prompts and starts in
        prefill    new prompts by lane, then new observations by slot, in chunks
        decode     up to `decode_block` tokens in every live slot

A *slot* is one sequence; the slots of a *lane* share one prefilled prompt. Nothing here knows what a
task or an environment is: the host (`exchange.Exchange`) decides who starts, continues and stops.

Determinism: a token's randomness is folded from (run key, group, member, position), prefill chunks are
cut from the start of each prompt or observation, and no slot's arithmetic reads another slot's state.
So what an episode samples does not depend on its slot, its neighbours, or how long its tools took.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import Mesh

from gagar_jax.config import ModelConfig, RolloutConfig
from gagar_jax.model import cache as kv
from gagar_jax.model import sharding
from gagar_jax.model.transformer import Block, Transformer


class SlotStatus(enum.IntEnum):
    IDLE = 0  # never started
    LIVE = 1  # decoding, or prefilling what it will decode after
    ENDED_TURN = 2  # sampled the end-of-turn token in the last block
    EXHAUSTED = 3  # used up its tokens in the last block
    WAITING = 4  # reported as 2 or 3 earlier; the host has not answered, or has nothing more for the slot


class Command(enum.IntEnum):
    KEEP = 0
    CONTINUE = 1  # prefill an observation, then decode
    START = 2  # begin a new sequence at the end of the lane's prompt


class Report(NamedTuple):
    """Device → host. K = tokens a block; the first count_S[s] places of a row are new."""

    status_S: Any
    count_S: Any
    token_SK: Any
    logprob_SK: Any


class Reply(NamedTuple):
    """Host → device. Lengths of 0 mean nothing new; `stop_1` other than 0 ends the program."""

    stop_1: Any
    prompt_length_P: Any
    prompt_PT: Any
    command_S: Any
    group_S: Any
    member_S: Any
    observation_length_S: Any
    observation_ST: Any


class Host(Protocol):
    def exchange(self, report: Report) -> Reply:
        """NumPy in, NumPy out; must not raise and must return while some slot can decode."""
        ...


class State(NamedTuple):
    """The loop's carry: the cache, where every lane and slot stands, and the last block's output."""

    cache: kv.Cache
    prompt_PT: jax.Array
    prompt_length_P: jax.Array  # tokens the prefix will hold: the prompt without its last token
    prompt_done_P: jax.Array
    prompt_last_P: jax.Array
    status_S: jax.Array
    token_S: jax.Array  # the next token to feed
    place_S: jax.Array  # where in the suffix it goes
    generated_S: jax.Array
    group_S: jax.Array
    member_S: jax.Array
    pending_ST: jax.Array
    pending_length_S: jax.Array
    pending_done_S: jax.Array
    pending_next_S: jax.Array  # the token to feed once the pending ones are in the cache
    count_S: jax.Array
    token_SK: jax.Array
    logprob_SK: jax.Array
    stop_1: jax.Array


def reply_shapes(config: RolloutConfig) -> Reply:
    P, S = config.lanes, config.lanes * config.lane_slots

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return Reply(
        stop_1=ints(1), prompt_length_P=ints(P), prompt_PT=ints(P, config.max_prompt), command_S=ints(S),
        group_S=ints(S), member_S=ints(S), observation_length_S=ints(S),
        observation_ST=ints(S, config.max_observation),
    )  # fmt: skip


def _initial(model: ModelConfig, config: RolloutConfig) -> State:
    P, S, K = config.lanes, config.lanes * config.lane_slots, config.decode_block

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    return State(
        cache=kv.init_cache(
            model, lanes=P, slots=S, max_prompt=config.max_prompt, max_continuation=config.max_continuation
        ),
        prompt_PT=ints(P, config.max_prompt),
        prompt_length_P=ints(P),
        prompt_done_P=ints(P),
        prompt_last_P=ints(P),
        status_S=ints(S),
        token_S=ints(S),
        place_S=ints(S),
        generated_S=ints(S),
        group_S=ints(S),
        member_S=ints(S),
        pending_ST=ints(S, config.max_observation),
        pending_length_S=ints(S),
        pending_done_S=ints(S),
        pending_next_S=ints(S),
        count_S=ints(S),
        token_SK=ints(S, K),
        logprob_SK=jnp.zeros((S, K), jnp.float32),
        stop_1=ints(1),
    )


def _apply(state: State, reply: Reply, lane_slots: int) -> State:
    """The host's answer, written into lanes and slots."""
    fresh_P = reply.prompt_length_P > 0
    last_P = jnp.take_along_axis(reply.prompt_PT, jnp.maximum(reply.prompt_length_P - 1, 0)[:, None], axis=1)[
        :, 0
    ]
    prompt_last_P = jnp.where(fresh_P, last_P, state.prompt_last_P)
    start_S = reply.command_S == Command.START
    resume_S = reply.command_S == Command.CONTINUE
    status = jnp.where(state.status_S >= SlotStatus.ENDED_TURN, SlotStatus.WAITING, state.status_S)
    status = jnp.where(start_S | resume_S, SlotStatus.LIVE, status)
    # The last sampled token is not in the cache yet: it goes in ahead of the observation, whose own
    # last token then waits to be fed by the first decode step.
    pending_ST = jnp.concatenate([state.token_S[:, None], reply.observation_ST[:, :-1]], axis=1)
    end_S1 = jnp.maximum(reply.observation_length_S - 1, 0)[:, None]
    next_S = jnp.take_along_axis(reply.observation_ST, end_S1, axis=1)[:, 0]
    zero_S = jnp.zeros_like(state.place_S)
    return state._replace(
        stop_1=reply.stop_1,
        prompt_PT=jnp.where(fresh_P[:, None], reply.prompt_PT, state.prompt_PT),
        prompt_length_P=jnp.where(fresh_P, reply.prompt_length_P - 1, state.prompt_length_P),
        prompt_done_P=jnp.where(fresh_P, 0, state.prompt_done_P),
        prompt_last_P=prompt_last_P,
        status_S=status.astype(jnp.int32),
        token_S=jnp.where(start_S, jnp.repeat(prompt_last_P, lane_slots), state.token_S),
        place_S=jnp.where(start_S, zero_S, state.place_S),
        generated_S=jnp.where(start_S, zero_S, state.generated_S),
        group_S=jnp.where(start_S, reply.group_S, state.group_S),
        member_S=jnp.where(start_S, reply.member_S, state.member_S),
        pending_ST=jnp.where(resume_S[:, None], pending_ST, state.pending_ST),
        pending_length_S=jnp.where(resume_S, reply.observation_length_S, zero_S),
        pending_done_S=zero_S,
        pending_next_S=jnp.where(resume_S, next_S, state.pending_next_S),
        count_S=zero_S,
    )


def _chunk(tokens_RT: jax.Array, start_R: jax.Array, width: int) -> jax.Array:
    column = jnp.minimum(start_R[:, None] + jnp.arange(width, dtype=jnp.int32)[None], tokens_RT.shape[1] - 1)
    return jnp.take_along_axis(tokens_RT, column, axis=1)


def _prefill_prompts(model: Transformer, layers: list[Block], config: RolloutConfig, state: State) -> State:
    def step(state: State) -> State:
        count_P = jnp.minimum(state.prompt_length_P - state.prompt_done_P, config.prefill_chunk)
        tokens = _chunk(state.prompt_PT, state.prompt_done_P, config.prefill_chunk)
        cache = kv.prefill_prompt(model, layers, state.cache, tokens, state.prompt_done_P, count_P)
        return state._replace(cache=cache, prompt_done_P=state.prompt_done_P + count_P)

    return jax.lax.while_loop(lambda s: jnp.any(s.prompt_done_P < s.prompt_length_P), step, state)


def _prefill_observations(
    model: Transformer, layers: list[Block], config: RolloutConfig, state: State
) -> State:
    """Chunks of the pending observations, `prefill_rows` slots at a time."""
    rows = min(config.prefill_rows, config.lanes * config.lane_slots)

    def step(state: State) -> State:
        left_S = state.pending_length_S - state.pending_done_S
        slot_R = jnp.argsort(left_S <= 0, stable=True)[:rows].astype(jnp.int32)
        done_R = jnp.take(state.pending_done_S, slot_R)
        count_R = jnp.minimum(jnp.take(left_S, slot_R), config.prefill_chunk)
        tokens = _chunk(jnp.take(state.pending_ST, slot_R, axis=0), done_R, config.prefill_chunk)
        start_R = jnp.take(state.place_S, slot_R)
        cache = kv.prefill_suffix(
            model, layers, state.cache, slot_R, tokens, start_R, count_R, state.prompt_length_P
        )
        done_S = state.pending_done_S.at[slot_R].add(count_R)
        finished_S = (done_S >= state.pending_length_S) & (left_S > 0)
        return state._replace(
            cache=cache,
            pending_done_S=done_S,
            place_S=state.place_S.at[slot_R].add(count_R),
            token_S=jnp.where(finished_S, state.pending_next_S, state.token_S),
        )

    return jax.lax.while_loop(lambda s: jnp.any(s.pending_done_S < s.pending_length_S), step, state)


def sample(logits_SV: jax.Array, key_S: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Draws from softmax(logits / temperature): token_S and its log-prob under that same distribution."""
    logprob_SV = jax.nn.log_softmax(logits_SV.astype(jnp.float32) / jnp.float32(temperature), axis=-1)
    noise_SV = jax.vmap(lambda key: jax.random.gumbel(key, logits_SV.shape[-1:], jnp.float32))(key_S)
    token_S = jnp.argmax(logprob_SV + noise_SV, axis=-1).astype(jnp.int32)
    return token_S, jnp.take_along_axis(logprob_SV, token_S[:, None], axis=-1)[:, 0]


def _decode_block(
    model: Transformer, layers: list[Block], config: RolloutConfig, end_id: int, key: jax.Array, state: State
) -> State:
    fold = jax.vmap(jax.random.fold_in)
    key_S = fold(fold(jnp.broadcast_to(key, state.group_S.shape), state.group_S), state.member_S)
    unembedding = model.unembedding()

    def step(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        i, s = carry
        live_S = s.status_S == SlotStatus.LIVE
        hidden_SD, cache = kv.decode(model, layers, s.cache, s.token_S, s.place_S, live_S, s.prompt_length_P)
        with jax.named_scope("sample"):
            token_S, logprob_S = sample(hidden_SD @ unembedding, fold(key_S, s.place_S), config.temperature)
        place_S, generated_S = s.place_S + 1, s.generated_S + 1
        full_S = (generated_S >= config.max_generated) | (place_S >= config.max_continuation)
        status_S = jnp.where(full_S, SlotStatus.EXHAUSTED, SlotStatus.LIVE)
        status_S = jnp.where(token_S == end_id, SlotStatus.ENDED_TURN, status_S).astype(jnp.int32)
        column = jax.lax.dynamic_update_slice_in_dim
        return i + 1, s._replace(
            cache=cache,
            status_S=jnp.where(live_S, status_S, s.status_S),
            token_S=jnp.where(live_S, token_S, s.token_S),
            place_S=jnp.where(live_S, place_S, s.place_S),
            generated_S=jnp.where(live_S, generated_S, s.generated_S),
            count_S=s.count_S + live_S.astype(jnp.int32),
            token_SK=column(s.token_SK, token_S[:, None], i, axis=1),
            logprob_SK=column(s.logprob_SK, logprob_S[:, None], i, axis=1),
        )

    def more(carry: tuple[jax.Array, State]) -> jax.Array:
        return (carry[0] < config.decode_block) & jnp.any(carry[1].status_S == SlotStatus.LIVE)

    return jax.lax.while_loop(more, step, (jnp.int32(0), state))[1]


def rollout_program(
    graph: nnx.GraphDef[Transformer],
    config: RolloutConfig,
    end_id: int,
    exchange: Callable[..., Reply],
    mesh: Mesh | None = None,
) -> Callable[[nnx.State, jax.Array], jax.Array]:
    """The whole rollout as a jittable function of (params, key).

    Args:
      graph: the model's static part.
      config: slots, lengths, chunk sizes, temperature; all static.
      end_id: the token that ends a turn.
      exchange: the host's side, `Report` fields in, `Reply` out, NumPy only.
      mesh: where given, lanes and slots are laid over its data axis.

    Returns:
      A function whose result is the host's last stop value, shape (1,).
    """
    shapes = reply_shapes(config)

    def program(params: nnx.State, key: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        layers = model.layers()  # unstacked once, outside the loop
        state = _initial(model.config, config)
        if mesh is not None:
            rows = jax.tree.map(lambda x: sharding.named(mesh, "batch", *[None] * (x.ndim - 1)), state)
            state = jax.lax.with_sharding_constraint(state, rows._replace(stop_1=sharding.named(mesh, None)))

        def body(state: State) -> State:
            with jax.named_scope("exchange"):
                report = Report(state.status_S, state.count_S, state.token_SK, state.logprob_SK)
                reply = io_callback(exchange, shapes, *report)
                state = _apply(state, reply, config.lane_slots)
            with jax.named_scope("prefill"):
                state = _prefill_prompts(model, layers, config, state)
                state = _prefill_observations(model, layers, config, state)
            with jax.named_scope("decode"):
                return _decode_block(model, layers, config, end_id, key, state)

        return jax.lax.while_loop(lambda s: s.stop_1[0] == 0, body, state).stop_1

    return program


class Sampler:
    """Compiles the rollout once and runs it for one host after another."""

    def __init__(
        self, graph: nnx.GraphDef[Transformer], config: RolloutConfig, end_id: int, mesh: Mesh | None = None
    ) -> None:
        self._host: Host | None = None
        self._program = jax.jit(rollout_program(graph, config, end_id, self._exchange, mesh))

    def _exchange(self, *report: Any) -> Reply:
        assert self._host is not None, "the program runs only inside Sampler.run"
        return self._host.exchange(Report(*(np.asarray(x) for x in report)))

    def run(self, params: nnx.State, key: jax.Array, host: Host) -> None:
        """Runs until the host says stop. One run at a time."""
        if self._host is not None:
            raise RuntimeError("this sampler is already running")
        self._host = host
        try:
            jax.block_until_ready(self._program(params, key))
        finally:
            self._host = None

    @property
    def programs_compiled(self) -> int:
        return self._program._cache_size()  # type: ignore[attr-defined]
