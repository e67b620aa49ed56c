"""One conversation as tokens: what the model sampled stays as sampled, what the environment says is appended.

    prompt        BOS text ACT
    model's turn  sampled … END
    observation   OBS text ACT

Nothing is re-tokenised: text is decoded from the sampled ids only to hand the environment an action.
"""

from __future__ import annotations

import dataclasses

from gagar_jax.data.tokenizer import ACT, BOS, END, OBS, Tokenizer
from gagar_jax.types import Demonstration, Outcome, Ticket, Trajectory, Turn


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return [BOS, *tokenizer.encode(text), ACT]


def observation_tokens(tokenizer: Tokenizer, text: str, limit: int) -> tuple[list[int], bool]:
    """The tokens of an observation, at most `limit` of them, and whether the middle had to be cut."""
    ids = tokenizer.encode(text)
    room = limit - 2
    cut = len(ids) > room
    if cut:
        head = room // 2
        ids = ids[:head] + ids[len(ids) - (room - head) :]
    return [OBS, *ids, ACT], cut


class Episode:
    """A trajectory while it grows. Raises AssertionError if tokens, mask and log-probs ever fall apart."""

    def __init__(self, ticket: Ticket, *, version: int, prompt: str, tokens: list[int]) -> None:
        self.ticket, self.version, self.prompt = ticket, version, prompt
        self.tokens = list(tokens)
        self.loss_mask = [0] * len(tokens)
        self.logprobs = [0.0] * len(tokens)
        self.turns: list[Turn] = []
        self.prompt_length = self._turn_start = len(tokens)

    @property
    def continuation(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    def add_sampled(self, tokens: list[int], logprobs: list[float]) -> None:
        assert len(tokens) == len(logprobs), f"{self.ticket}: {len(tokens)} tokens, {len(logprobs)} log-probs"
        self.tokens += tokens
        self.loss_mask += [1] * len(tokens)
        self.logprobs += logprobs

    def action(self, tokenizer: Tokenizer) -> str:
        """The text of the turn sampled since the last observation."""
        ids = self.tokens[self._turn_start :]
        return tokenizer.decode([i for i in ids if i != END])

    def add_observation(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.loss_mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self._turn_start = len(self.tokens)

    def finish(self, outcome: Outcome, patch: bytes) -> Trajectory:
        assert len(self.tokens) == len(self.loss_mask) == len(self.logprobs), f"{self.ticket}: misaligned"
        return Trajectory(
            ticket=self.ticket,
            version=self.version,
            tokens=self.tokens,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            prompt=self.prompt,
            turns=self.turns,
            outcome=outcome,
            patch=patch,
        )


def demonstration_tokens(
    tokenizer: Tokenizer, demo: Demonstration, max_observation: int
) -> tuple[list[int], list[int]]:
    """A demonstration as (tokens, loss_mask), laid out exactly as an episode that sampled its actions."""
    prompt = prompt_tokens(tokenizer, demo.prompt)
    episode = Episode(Ticket(-1, 0, demo.instance_id), version=0, prompt=demo.prompt, tokens=prompt)
    for index, (action, observation) in enumerate(demo.turns):
        ids = [*tokenizer.encode(action), END]
        episode.add_sampled(ids, [0.0] * len(ids))
        if index + 1 < len(demo.turns):
            episode.add_observation(observation_tokens(tokenizer, observation, max_observation)[0])
    return episode.tokens, episode.loss_mask


def with_turn(episode: Episode, action: str, observation: str, info: dict[str, object]) -> None:
    """Records a turn as text, for the run folder and the grader."""
    tool_s = info.get("tool_s", 0.0)
    seconds = float(tool_s) if isinstance(tool_s, (int, float)) else 0.0
    episode.turns.append(
        dataclasses.replace(Turn(action, observation), tool_s=seconds, malformed=bool(info.get("malformed")))
    )
