"""The compiled rollout against the training forward pass, through a real (small) Gymnasium environment."""

from __future__ import annotations

import random
import time
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gagar_jax.algo.logprob import token_logprobs
from gagar_jax.config import ModelConfig, RolloutConfig
from gagar_jax.data.tokenizer import END, Tokenizer
from gagar_jax.model import transformer
from gagar_jax.rollout.exchange import EnvPool, Exchange, Finished, Prompt, collect
from gagar_jax.rollout.sampler import Sampler
from gagar_jax.types import Outcome, Status, StopReason, Trajectory

MODEL = ModelConfig(vocab_size=361, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64)
ROLLOUT = RolloutConfig(
    groups=3, group_size=5, lanes=2, lane_slots=3, max_prompt=40, max_observation=14, max_generated=24,
    max_continuation=48, decode_block=3, prefill_chunk=8, prefill_rows=4,
)  # fmt: skip


class EchoEnv(gymnasium.Env[str, str]):
    """Answers every action with its length and a hash of it; ends after three turns."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "final_action": "submit"}
    observation_space = gymnasium.spaces.Text(1000)
    action_space = gymnasium.spaces.Text(1000)

    resets: ClassVar[int] = 0

    def __init__(self, delay_s: float = 0.0, fail_on: str = "") -> None:
        self._delay_s, self._fail_on = delay_s, fail_on

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert options is not None
        self._task, self._turns = options["instance_id"], 0
        if self._task == self._fail_on == "broken-reset":
            raise OSError("disk on fire")
        if self._task == "faulty-once" and self._fail_on:
            EchoEnv.resets += 1
            if EchoEnv.resets == 1:
                return "no prompt at all", {"fault": "disk on fire"}
        return f"task {self._task}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(random.random() * self._delay_s)
        if self._task == self._fail_on:
            raise OSError("disk on fire")
        self._turns += 1
        done = action == "submit" or self._turns == 3
        info: dict[str, Any] = {"tool_s": 0.25}
        if done:
            status = Status.PASSED if len(action) % 2 else Status.FAILED
            info |= {"outcome": Outcome(status, StopReason.SUBMITTED, "x"), "patch": action.encode()}
            info["base_files"] = {"a.py": "x = 1\n"}
        return f"{len(action)} {sum(map(ord, action)) % 97}", 0.0, done, False, info


@pytest.fixture(scope="module")
def parts() -> tuple[Tokenizer, Any, nnx.State, Sampler]:
    tokenizer = Tokenizer.train(["task one two three 0 1 2 3 4 5 6 7 8 9\n"], vocab_size=MODEL.vocab_size)
    graph, params = transformer.create(MODEL, jax.random.key(0))
    # Untrained, END would come once in 361 tokens; a direction that all tokens share, and END most, makes
    # it common.
    table = params["embedding"].get_value()
    params["embedding"].set_value((table + 0.1).at[END].add(0.25))
    return tokenizer, graph, params, Sampler(graph, ROLLOUT, END)


def run(parts: Any, prompts: list[Prompt], *, seed: int = 0, sampler: Sampler | None = None, **env: Any):
    tokenizer, _, params, default = parts
    found: list[Trajectory] = []

    def keep(finished: Finished) -> None:
        found.append(finished.trajectory)

    pool = EnvPool(lambda: EchoEnv(**env), size=ROLLOUT.lanes * ROLLOUT.lane_slots, workers=3)
    exchange = Exchange(ROLLOUT, tokenizer, pool, prompts, version=7, on_finished=keep)
    try:
        collect(sampler or default, params, jax.random.key(seed), exchange)
    finally:
        pool.close()
    return sorted(found, key=lambda t: (t.ticket.group, t.ticket.member)), exchange


PROMPTS = [Prompt(g, name, tuple(range(5))) for g, name in enumerate(["one", "two two", "three 3"])]


def test_every_ticket_finishes_once_and_logprobs_equal_the_training_forward(parts: Any) -> None:
    trajectories, exchange = run(parts, PROMPTS)
    assert [(t.ticket.group, t.ticket.member) for t in trajectories] == [
        (g, m) for g in range(3) for m in range(5)
    ]
    assert exchange.counts["decode_tokens"] == sum(t.generated_tokens for t in trajectories)
    assert len({tuple(t.tokens) for t in trajectories}) > 10  # members differ
    assert {len(t.turns) for t in trajectories} >= {1, 2, 3}
    _, graph, params, _ = parts
    model = nnx.merge(graph, params)
    assert all(t.version == 7 and t.valid for t in trajectories)
    longest = max(len(t.tokens) for t in trajectories)

    def padded(rows: list[list[float]]) -> np.ndarray:
        return np.array([[*row, *[0] * (longest - len(row))] for row in rows])

    tokens = jnp.asarray(padded([t.tokens for t in trajectories]), jnp.int32)
    position = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32)[None], tokens.shape)
    hidden = transformer.forward(model, tokens, position, jnp.ones_like(tokens))
    logprob, _ = token_logprobs(hidden[:, :-1], model.unembedding(), tokens[:, 1:], chunk_tokens=64)
    mask = padded([t.loss_mask for t in trajectories])[:, 1:] == 1
    gap = np.abs(np.asarray(logprob) - padded([t.logprobs for t in trajectories])[:, 1:])[mask]
    assert gap.size > 50
    assert gap.max() <= 1e-4, gap.max()


def test_timing_changes_nothing(parts: Any) -> None:
    quick, _ = run(parts, PROMPTS)
    slow, _ = run(parts, PROMPTS, delay_s=0.05)
    assert [t.tokens for t in quick] == [t.tokens for t in slow]
    assert [t.logprobs for t in quick] == [t.logprobs for t in slow]  # bit for bit


def test_a_member_samples_the_same_whoever_runs_beside_it(parts: Any) -> None:
    everyone, _ = run(parts, PROMPTS)
    some, _ = run(parts, [Prompt(2, "three 3", (4, 1))])
    alone = {t.ticket.member: t for t in some}
    for t in everyone:
        if t.ticket.group == 2 and t.ticket.member in alone:
            assert alone[t.ticket.member].tokens == t.tokens
            assert alone[t.ticket.member].logprobs == t.logprobs


def test_limits_end_episodes_and_are_recorded(parts: Any) -> None:
    trajectories, _ = run(parts, PROMPTS, seed=3)
    stops = {t.outcome.stop for t in trajectories}
    assert StopReason.TOKEN_LIMIT in stops
    for t in trajectories:
        assert t.generated_tokens <= ROLLOUT.max_generated
        continuation = len(t.tokens) - (len(t.tokens) if not t.prompt else t.loss_mask.index(1))
        assert continuation <= ROLLOUT.max_continuation


@pytest.mark.parametrize("where", ["two two", "broken-reset"])
def test_a_broken_environment_is_isolated(parts: Any, where: str) -> None:
    prompts = [Prompt(0, "one", (0, 1)), Prompt(1, where, (0, 1, 2))]
    trajectories, exchange = run(parts, prompts, fail_on=where)
    assert len(trajectories) == 5
    for t in trajectories:
        assert t.valid == (t.ticket.group == 0)
    assert "disk on fire" in trajectories[-1].outcome.reason
    assert exchange.counts["invalid_environment_raised"] == 3


def test_a_fault_of_one_member_is_its_own(parts: Any) -> None:
    """Also of the first, whose text would be the group's prompt."""
    EchoEnv.resets = 0
    trajectories, exchange = run(parts, [Prompt(0, "faulty-once", (0, 1, 2, 3))], fail_on="faulty-once!")
    assert sorted(t.valid for t in trajectories) == [False, True, True, True]
    assert {t.prompt for t in trajectories if t.valid} == {"task faulty-once"}
    assert (exchange.counts["invalid_environment_raised"], exchange.counts["invalid_prompts_differ"]) == (
        1,
        0,
    )


def test_a_prompt_too_long_is_refused_by_name(parts: Any) -> None:
    trajectories, _ = run(parts, [Prompt(0, "one " * 60, (0, 1)), Prompt(1, "one", (0,))])
    assert [t.valid for t in trajectories] == [False, False, True]
    assert "max_prompt" in trajectories[0].outcome.reason


def test_cancel_stops_promptly_and_keeps_what_finished(parts: Any) -> None:
    tokenizer, _, params, sampler = parts
    found: list[Trajectory] = []
    pool = EnvPool(lambda: EchoEnv(delay_s=0.02), size=6, workers=3)

    def keep(finished: Finished) -> None:
        found.append(finished.trajectory)
        if len(found) == 4:
            exchange.cancel()

    many = [Prompt(g, "one", tuple(range(5))) for g in range(50)]
    exchange = Exchange(ROLLOUT, tokenizer, pool, many, version=0, on_finished=keep)
    collect(sampler, params, jax.random.key(0), exchange)
    pool.close()
    assert 4 <= len(found) < 250


def test_a_fault_in_the_exchange_is_raised_to_the_caller(parts: Any) -> None:
    tokenizer, _, params, sampler = parts
    pool = EnvPool(EchoEnv, size=6, workers=2)

    def broken(finished: Finished) -> None:
        raise RuntimeError("cannot write trajectory")

    exchange = Exchange(ROLLOUT, tokenizer, pool, PROMPTS, version=0, on_finished=broken)
    with pytest.raises(RuntimeError, match="cannot write trajectory"):
        collect(sampler, params, jax.random.key(0), exchange)
    pool.close()


def test_one_program_serves_every_run(parts: Any) -> None:
    run(parts, PROMPTS)
    run(parts, PROMPTS[:1], seed=5)
    assert parts[3].programs_compiled == 1


def test_the_first_lanes_prompt_is_prefilled_once_and_shared(parts: Any) -> None:
    """Members of one group start from the same first-token distribution, whichever wave they run in."""
    _, graph, params, _ = parts
    trajectories, _ = run(parts, PROMPTS[:1])
    model = nnx.merge(graph, params)
    t = trajectories[0]
    start = t.loss_mask.index(1)
    tokens = jnp.asarray([t.tokens[:start]], jnp.int32)
    position = jnp.arange(start, dtype=jnp.int32)[None]
    hidden = transformer.forward(model, tokens, position, jnp.ones_like(tokens))
    logprob_V = jax.nn.log_softmax(hidden[0, -1] @ model.unembedding())
    for t in trajectories:
        np.testing.assert_allclose(t.logprobs[start], logprob_V[t.tokens[start]], atol=1e-5)
