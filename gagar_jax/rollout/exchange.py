"""The host's side of the compiled rollout: which episode is in which slot, and what its environment says.

Environments are stepped in threads; the callback itself only moves tokens. A block costs the device the
same for one live slot as for all, so while most episodes are with their environments the callback waits
for more of them, though no longer than the last block took: at worst that doubles a block's time, and a
minute-long test run stalls its own slot only.

Whatever an environment does wrong ends its own episode as INVALID, with the reason, logged and counted;
a fault of this file ends the program and is raised by `collect`. No jax here: NumPy in, NumPy out.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import gymnasium
import numpy as np

from gagar_jax.config import RolloutConfig
from gagar_jax.data.tokenizer import Tokenizer
from gagar_jax.rollout.episode import Episode, observation_tokens, prompt_tokens, with_turn
from gagar_jax.rollout.sampler import Command, Reply, Report, Sampler, SlotStatus, reply_shapes
from gagar_jax.types import Outcome, Status, StopReason, Ticket, Trajectory

log = logging.getLogger(__name__)
R = TypeVar("R")

INVALID_CAUSES = ("environment_raised", "prompt_too_long", "prompts_differ", "no_outcome", "judging")
"""Why a trajectory is masked out; counted as `invalid_<cause>`."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One group to sample: the run-wide number of its prompt, the task, and the members still wanted."""

    group: int
    instance_id: str
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished trajectory, with the text before any edit of the files it touched."""

    trajectory: Trajectory
    base_files: dict[str, str]


class EnvPool:
    """Environments, one a slot, and the threads that step them. Made once a run, closed at its end."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], *, size: int, workers: int) -> None:
        self._make = make
        self._envs: list[gymnasium.Env[Any, Any] | None] = [None] * size
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="env")

    def __getitem__(self, slot: int) -> gymnasium.Env[Any, Any]:
        env = self._envs[slot]
        if env is None:
            env = self._envs[slot] = self._make()
        return env

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        for env in self._envs:
            if env is not None:
                env.close()


@dataclasses.dataclass
class _Lane:
    prompt: Prompt | None = None
    waiting: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    open: int = 0  # members now in a slot
    tokens: list[int] | None = None
    text: str = ""


@dataclasses.dataclass
class _Slot:
    ticket: Ticket | None = None
    episode: Episode | None = None
    decoding: bool = False  # the device can go on without us


@dataclasses.dataclass(frozen=True)
class _Result:
    """What a worker thread found. `observation` is the prompt after a reset."""

    slot: int
    kind: str  # "reset" | "step"
    observation: str = ""
    action: str = ""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    done: bool = False
    error: BaseException | None = None


class Exchange:
    """Answers the sampler until every member of every prompt has finished.

    Args:
      config: the sampler's shapes and limits.
      tokenizer: turns observations into tokens and sampled tokens into actions.
      pool: one environment a slot.
      prompts: the groups, in the order they should start; drawn from as lanes fall free.
      version: train steps behind the weights in use, recorded in each trajectory.
      on_finished: called, in the callback's thread, with each trajectory as it ends.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Tokenizer,
        pool: EnvPool,
        prompts: Iterable[Prompt],
        *,
        version: int,
        on_finished: Callable[[Finished], None],
    ) -> None:
        self._config, self._tokenizer, self._pool = config, tokenizer, pool
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._version, self._on_finished = version, on_finished
        self._lanes = [_Lane() for _ in range(config.lanes)]
        self._slots = [_Slot() for _ in range(config.lanes * config.lane_slots)]
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._shapes = reply_shapes(config)
        self._cancelled = threading.Event()
        self.error: BaseException | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self.wait_s = 0.0
        self._replied: float | None = None
        self._block_s = 0.1  # what the device took since the last reply; before the first one, a guess

    def cancel(self) -> None:
        """Ends the program at its next exchange; finished trajectories have been handed over already."""
        self._cancelled.set()

    # ---- the callback

    def exchange(self, report: Report) -> Reply:
        reply = Reply(*(np.zeros(s.shape, np.int32) for s in self._shapes))
        if self._replied is not None:
            self._block_s = time.monotonic() - self._replied
        try:
            self._absorb(report)
            self._answer(reply)
        except (
            BaseException
        ) as error:  # an exception in a callback would reach XLA as an opaque text: carry it out
            self.error = error
            reply.stop_1[0] = 1
        self._replied = time.monotonic()
        return reply

    def _absorb(self, report: Report) -> None:
        """Takes in what the last block sampled; slots that ended a turn go to their environment."""
        for index, slot in enumerate(self._slots):
            count = int(report.count_S[index])
            if slot.episode is None or not count:
                continue
            slot.episode.add_sampled(
                report.token_SK[index, :count].tolist(),
                report.logprob_SK[index, :count].astype(float).tolist(),
            )
            self.counts["decode_tokens"] += count
            status = report.status_S[index]
            if status in (SlotStatus.ENDED_TURN, SlotStatus.EXHAUSTED):
                slot.decoding = False
                exhausted = status == SlotStatus.EXHAUSTED
                action = slot.episode.action(self._tokenizer)
                self._pool.threads.submit(self._step, index, action, exhausted)

    def _answer(self, reply: Reply) -> None:
        """Fills the reply, once enough slots can decode or the wait for more has lasted a block's time."""
        until = time.monotonic() + self._block_s
        while True:
            if self._cancelled.is_set():
                reply.stop_1[0] = 1
                return
            while not self._results.empty():
                self._deliver(self._results.get_nowait(), reply)
            self._fill_lanes()
            decoding = sum(slot.decoding for slot in self._slots)
            away = sum(slot.ticket is not None for slot in self._slots) - decoding
            if not decoding and not away:
                reply.stop_1[0] = 1
                return
            patience = 0.5 if not decoding else until - time.monotonic()
            if decoding and (decoding >= away or patience <= 0):
                return
            start = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._deliver(self._results.get(timeout=patience), reply)
            self.wait_s += time.monotonic() - start

    # ---- lanes and slots

    def _fill_lanes(self) -> None:
        """Free lanes take the next prompt, free slots of a lane its next member."""
        width = self._config.lane_slots
        for number, lane in enumerate(self._lanes):
            while lane.open == 0 and not lane.waiting:
                prompt = next(self._prompts, None)
                if prompt is None:
                    break
                lane.prompt, lane.tokens, lane.text = prompt, None, ""
                lane.waiting.extend(prompt.members)
            for index in range(number * width, (number + 1) * width):
                if not lane.waiting:
                    break
                if self._slots[index].ticket is None:
                    assert lane.prompt is not None
                    ticket = Ticket(lane.prompt.group, lane.waiting.popleft(), lane.prompt.instance_id)
                    self._slots[index].ticket = ticket
                    lane.open += 1
                    self._pool.threads.submit(self._reset, index, ticket.instance_id)

    def _reset(self, slot: int, instance_id: str) -> None:
        try:
            text, info = self._pool[slot].reset(options={"instance_id": instance_id})
            self._results.put(_Result(slot, "reset", observation=text, info=info))
        except Exception as error:
            self._results.put(_Result(slot, "reset", error=error))

    def _step(self, slot: int, action: str, exhausted: bool) -> None:
        """Steps a slot's environment; out of tokens, the state is judged as it stands."""
        try:
            env = self._pool[slot]
            if exhausted:
                self._results.put(self._judge_now(slot, action))
                return
            observation, _, terminated, truncated, info = env.step(action)
            self._results.put(_Result(slot, "step", observation, action, info, done=terminated or truncated))
        except Exception as error:
            self._results.put(_Result(slot, "step", action=action, error=error))

    def _judge_now(self, slot: int, action: str) -> _Result:
        env = self._pool[slot]
        final = env.metadata.get("final_action")
        if final is None:
            outcome = Outcome(
                Status.FAILED, StopReason.TOKEN_LIMIT, "out of tokens; the environment has no final action"
            )
            return _Result(slot, "step", action=action, info={"outcome": outcome}, done=True)
        info = env.step(final)[4]
        judged = info.get("outcome")
        if isinstance(judged, Outcome) and judged.stop is StopReason.SUBMITTED:
            info = {**info, "outcome": dataclasses.replace(judged, stop=StopReason.TOKEN_LIMIT)}
        return _Result(slot, "step", action=action, info=info, done=True)

    # ---- results

    def _deliver(self, result: _Result, reply: Reply) -> bool:
        """Writes one result into the reply. True when the device gets something to do."""
        slot = self._slots[result.slot]
        assert slot.ticket is not None
        if result.error is not None:
            log.error("%s: environment raised in %s", slot.ticket, result.kind, exc_info=result.error)
            return self._invalid(result.slot, "environment_raised", f"environment raised {result.error!r}")
        return self._begin(result, reply) if result.kind == "reset" else self._continue(result, reply)

    def _begin(self, result: _Result, reply: Reply) -> bool:
        slot, number = self._slots[result.slot], result.slot // self._config.lane_slots
        lane = self._lanes[number]
        assert slot.ticket is not None
        if fault := result.info.get("fault"):  # what came with it may not be the prompt
            return self._invalid(result.slot, "environment_raised", str(fault))
        if lane.tokens is None:
            tokens = prompt_tokens(self._tokenizer, result.observation)
            if len(tokens) > self._config.max_prompt:
                why = f"prompt of {len(tokens)} tokens; rollout.max_prompt is {self._config.max_prompt}"
                return self._invalid(result.slot, "prompt_too_long", why)
            lane.tokens, lane.text = tokens, result.observation
            reply.prompt_length_P[number] = len(tokens)
            reply.prompt_PT[number, : len(tokens)] = tokens
        if result.observation != lane.text:
            why = "the environment gave two members of one group different prompts"
            return self._invalid(result.slot, "prompts_differ", why)
        slot.episode = Episode(slot.ticket, version=self._version, prompt=lane.text, tokens=lane.tokens)
        slot.decoding = True
        reply.command_S[result.slot] = Command.START
        reply.group_S[result.slot] = slot.ticket.group
        reply.member_S[result.slot] = slot.ticket.member
        return True

    def _continue(self, result: _Result, reply: Reply) -> bool:
        slot, limits = self._slots[result.slot], self._config
        episode = slot.episode
        assert episode is not None
        with_turn(episode, result.action, result.observation, result.info)
        if result.done:
            outcome = result.info.get("outcome")
            if not isinstance(outcome, Outcome):
                why = 'the environment ended the episode without a gagar_jax.types.Outcome in info["outcome"]'
                return self._invalid(result.slot, "no_outcome", why)
            if outcome.status is Status.INVALID:
                self.counts["invalid_judging"] += 1
                log.warning("%s: invalid: %s", slot.ticket, outcome.reason)
            self._end(result.slot, outcome, result.info)
            return False
        tokens, cut = observation_tokens(self._tokenizer, result.observation, limits.max_observation)
        self.counts["observations_cut"] += cut
        generated = sum(episode.loss_mask)
        if generated >= limits.max_generated or episode.continuation + len(tokens) >= limits.max_continuation:
            self._pool.threads.submit(self._step, result.slot, "", True)
            return False
        episode.add_observation(tokens)
        slot.decoding = True
        reply.command_S[result.slot] = Command.CONTINUE
        reply.observation_length_S[result.slot] = len(tokens)
        reply.observation_ST[result.slot, : len(tokens)] = tokens
        return True

    def _invalid(self, index: int, cause: str, why: str) -> bool:
        """Ends an episode that nobody can judge. False: the device gets nothing to do."""
        slot = self._slots[index]
        log.warning("%s: invalid: %s", slot.ticket, why)
        self.counts[f"invalid_{cause}"] += 1
        self._end(index, Outcome(Status.INVALID, StopReason.FAULT, why), {})
        return False

    def _end(self, index: int, outcome: Outcome, info: dict[str, Any]) -> None:
        slot, lane = self._slots[index], self._lanes[index // self._config.lane_slots]
        assert slot.ticket is not None
        episode = slot.episode or Episode(slot.ticket, version=self._version, prompt="", tokens=[])
        self._on_finished(
            Finished(episode.finish(outcome, info.get("patch", b"")), info.get("base_files", {}))
        )
        slot.ticket, slot.episode, slot.decoding = None, None, False
        lane.open -= 1


def collect(sampler: Sampler, params: Any, key: Any, exchange: Exchange) -> None:
    """Runs the rollout to its end.

    The program runs in a thread of its own so that Ctrl-C reaches this one: the rollout then stops at
    its next exchange, and what has finished has already been handed to `on_finished`.

    Raises:
      KeyboardInterrupt: after the program has ended.
      BaseException: whatever went wrong inside the exchange.
    """
    wait_for(lambda: sampler.run(params, key, exchange), on_interrupt=exchange.cancel)
    if exchange.error is not None:
        raise exchange.error


def wait_for(program: Callable[[], R], *, on_interrupt: Callable[[], None]) -> R:
    """Runs a compiled program in a thread of its own, so that Ctrl-C reaches this one.

    Args:
      program: called once; it may call back to the host.
      on_interrupt: called if the wait is interrupted; should let the program end soon. It is waited for.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="program") as thread:
        running = thread.submit(program)
        try:
            while not running.done():
                with contextlib.suppress(TimeoutError):
                    running.exception(timeout=0.1)
        except BaseException:
            on_interrupt()
            raise
        return running.result()
