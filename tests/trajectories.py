"""Trajectories and groups with given outcomes and random tokens, for tests that need no environment."""

from __future__ import annotations

import numpy as np

from gagar_jax.types import Group, Outcome, Status, StopReason, Ticket, Trajectory

STATUS = {"p": Status.PASSED, "f": Status.FAILED, "i": Status.INVALID}


def make_trajectory(
    group: int,
    member: int,
    status: str,
    prompt: list[int],
    rng: np.random.Generator,
    *,
    length: int,
    vocab: int = 96,
    version: int = 0,
) -> Trajectory:
    """`length` tokens after the prompt: generated, with an observation in the middle where it fits."""
    mask = np.ones(length, int)
    if length >= 6:
        mask[length // 3 : length // 2] = 0
    reason = "" if status == "p" else "because the test says so"
    return Trajectory(
        ticket=Ticket(group, member, f"task-{group}"),
        version=version,
        tokens=prompt + rng.integers(5, vocab, length).tolist(),
        loss_mask=[0] * len(prompt) + mask.tolist(),
        logprobs=[0.0] * len(prompt) + (mask * rng.normal(-4.0, 0.3, length)).tolist(),
        prompt="",
        turns=[],
        outcome=Outcome(STATUS[status], StopReason.SUBMITTED, reason),
        patch=b"",
    )


def make_groups(
    *outcomes: str, seed: int = 0, prompt: int = 9, longest: int = 20, vocab: int = 96, first: int = 30
) -> list[Group]:
    """One group for each string, one member for each letter: p passed, f failed, i invalid.

    Lengths, prompts and tokens are random and depend on the seed alone.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for g, letters in enumerate(outcomes):
        shared = rng.integers(5, vocab, prompt).tolist()
        members = [
            make_trajectory(
                first + g, m, letter, shared, rng, length=int(rng.integers(1, longest + 1)), vocab=vocab
            )
            for m, letter in enumerate(letters)
        ]
        groups.append(Group(first + g, {}, members))
    return groups
