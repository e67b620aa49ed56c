"""Groups of trajectories → `TrainBatch`, the only object that crosses to the device for training.

A group's prompt stands once in a row, and the members' continuations that fit beside it read it as their
prefix. Rows are filled first-fit-decreasing and their number is rounded up to a bucket, so that a run has
few shapes and few programs. Nothing is computed from rewards here but which rows can be left out.

Conventions: `loss_mask_BT[b, t] = 1` says that token t was generated; its log-prob is predicted from
token t − 1 (the train step shifts), so a continuation begins with the prompt's last token, and the shared
prefix ends before it. Padding: segment 0, trajectory_id N, group_id G, tickets −1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gagar_jax.data.tokenizer import PAD
from gagar_jax.types import Group, Trajectory

Array = Any  # NumPy as packed, jax once it has crossed, shardings and shapes when a step is described


class Rows(NamedTuple):
    """What a forward pass and a loss mask need: packed rows."""

    tokens_BT: Array  # int32
    position_BT: Array  # int32, a token's place in its sequence
    segment_BT: Array  # int32, 1… in each row, 0 for padding
    prefix_BT: Array  # int32, the segment of the row that this one continues; 0 for none
    loss_mask_BT: Array  # the token's weight in the loss: float32, or int32 0 and 1


class TrainBatch(NamedTuple):
    """One batch of the reinforcement-learning stage: B packed rows, N trajectories, G groups."""

    tokens_BT: Array  # int32
    position_BT: Array  # int32, a token's place in its trajectory
    segment_BT: Array  # int32, 1… in each row, 0 for padding
    prefix_BT: Array  # int32, the segment of the row that this one continues; 0 for none
    loss_mask_BT: Array  # int32
    trajectory_id_BT: Array  # int32 in [0, N); N for padding and for shared prompts
    sampler_logprob_BT: Array  # float32, 0 where nothing was generated
    version_BT: Array  # int32: train steps behind the weights that sampled the token; −1 for padding
    group_id_N: Array  # int32 in [0, G); G for padding
    reward_N: Array  # float32
    passed_N: Array  # bool
    valid_N: Array  # bool
    ticket_N: Array  # int32: Ticket.group of the trajectory; −1 for padding
    member_N: Array  # int32: Ticket.member of the trajectory; −1 for padding
    ticket_G: Array  # int32: Ticket.group; −1 for padding


def check_row_length(row_length: int, *, max_prompt: int, max_continuation: int) -> None:
    """Every trajectory the sampler can make must fit one row. Called when settings are read.

    Raises:
      ValueError: it does not; the message has the numbers.
    """
    context = max_prompt + max_continuation
    if context > row_length:
        raise ValueError(
            f"train.row_length {row_length} is shorter than the longest trajectory: "
            f"rollout.max_prompt {max_prompt} + rollout.max_continuation {max_continuation} = {context}"
        )


def bucket_rows(rows: int, row_bucket: int) -> int:
    """The smallest row_bucket · 2^k that holds `rows`.

    >>> [bucket_rows(n, 8) for n in (0, 8, 9, 17)]
    [8, 8, 16, 32]
    """
    size = row_bucket
    while size < rows:
        size *= 2
    return size


def first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Indices of `lengths` by row: the longest first, each into the first row with room; ties by index.

    >>> first_fit_decreasing([3, 6, 2, 5], 8)
    [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            raise ValueError(f"sequence {index} has {length} tokens, more than a row of {row_length}")
        place = next((r for r, free in enumerate(room) if free >= length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row_length)
        rows[place].append(index)
        room[place] -= length
    return rows


def will_be_dropped(trajectories: Sequence[Trajectory]) -> bool:
    """Whether dynamic sampling drops the group whatever a grader says: no mixed outcome among the valid.

    The device decides for itself from the same rewards (`algo.advantage`); this only saves its rows. A
    group whose passed members all turn out external is dropped there, and its rows carry no weight.
    """
    outcomes = {t.passed for t in trajectories if t.valid}
    return len(outcomes) < 2


def pack(
    groups: Sequence[Group], *, num_trajectories: int, num_groups: int, row_length: int, row_bucket: int
) -> TrainBatch:
    """Packs whole groups. Deterministic in their order; trajectories are numbered group by group.

    Trajectories that cannot be trained on (invalid, or of a group that dynamic sampling drops) take no
    row, but keep their place in the arrays over N: they count in the metrics.

    Args:
      groups: at most `num_groups`, with at most `num_trajectories` members in all.
      num_trajectories: static N.
      num_groups: static G.
      row_length: static T.
      row_bucket: B is this times a power of two.

    Raises:
      ValueError: too many groups or trajectories, a trajectory longer than a row, or one whose arrays
        differ in length or whose first token is marked as generated.
    """
    members = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    if len(groups) > num_groups or len(members) > num_trajectories:
        raise ValueError(
            f"{len(groups)} groups with {len(members)} trajectories: there is room for {num_groups} groups "
            f"with {num_trajectories}"
        )
    dropped = [will_be_dropped(group.trajectories) for group in groups]
    trained = [n for n, (g, t) in enumerate(members) if t.valid and not dropped[g] and any(t.loss_mask)]
    pieces = []
    for n in trained:
        _check(members[n][1], row_length)
        pieces.append(Piece(n, members[n][1].tokens, members[n][1].loss_mask))
    rows = pack_pieces(pieces, row_length)
    batch = _empty(bucket_rows(len(rows), row_bucket), row_length, num_trajectories, num_groups)
    for b, row in enumerate(rows):
        for piece, columns in place(batch, b, row):
            trajectory = members[piece.n][1]
            batch.trajectory_id_BT[b, columns] = piece.n
            batch.sampler_logprob_BT[b, columns] = trajectory.logprobs[piece.split :]
            batch.version_BT[b, columns] = trajectory.version
    for g, group in enumerate(groups):
        batch.ticket_G[g] = group.group
    for n, (g, t) in enumerate(members):
        batch.group_id_N[n] = g
        batch.reward_N[n] = float(t.passed)
        batch.passed_N[n] = t.passed
        batch.valid_N[n] = t.valid
        batch.ticket_N[n] = t.ticket.group
        batch.member_N[n] = t.ticket.member
    return batch


def _check(trajectory: Trajectory, row_length: int) -> None:
    tokens, mask, logprobs = trajectory.tokens, trajectory.loss_mask, trajectory.logprobs
    name = (
        f"{trajectory.ticket.instance_id}, group {trajectory.ticket.group}, member {trajectory.ticket.member}"
    )
    if not len(tokens) == len(mask) == len(logprobs):
        raise ValueError(f"{name}: {len(tokens)} tokens, {len(mask)} mask entries, {len(logprobs)} log-probs")
    if len(tokens) > row_length:
        raise ValueError(f"{name}: {len(tokens)} tokens do not fit train.row_length {row_length}")
    if mask and mask[0]:
        raise ValueError(f"{name}: the first token is marked as generated; nothing predicts it")


def _empty(rows: int, length: int, num_trajectories: int, num_groups: int) -> TrainBatch:
    def table(value: float, dtype: type) -> Array:
        return np.full((rows, length), value, dtype)

    def column(size: int, value: float, dtype: type) -> Array:
        return np.full((size,), value, dtype)

    N, G = num_trajectories, num_groups
    return TrainBatch(
        tokens_BT=table(PAD, np.int32),
        position_BT=table(0, np.int32),
        segment_BT=table(0, np.int32),
        prefix_BT=table(0, np.int32),
        loss_mask_BT=table(0, np.int32),
        trajectory_id_BT=table(N, np.int32),
        sampler_logprob_BT=table(0, np.float32),
        version_BT=table(-1, np.int32),
        group_id_N=column(N, G, np.int32),
        reward_N=column(N, 0, np.float32),
        passed_N=column(N, False, np.bool_),
        valid_N=column(N, False, np.bool_),
        ticket_N=column(N, -1, np.int32),
        member_N=column(N, -1, np.int32),
        ticket_G=column(G, -1, np.int32),
    )


class Piece(NamedTuple):
    """A sequence to pack, under a number of the caller's. At least one token is marked as generated."""

    n: int
    tokens: list[int]
    loss_mask: list[int]

    @property
    def split(self) -> int:
        """Where its continuation starts: the last token of its prompt, which predicts the first generated."""
        return self.loss_mask.index(1) - 1

    @property
    def prefix(self) -> list[int]:
        return self.tokens[: self.split]


Bundle = list[Piece]
"""Pieces of one prompt that share it in a row."""


def pack_pieces(pieces: Sequence[Piece], row_length: int) -> list[list[Bundle]]:
    """Bundles by row: pieces of one prompt together, as many as fit beside it; then first-fit-decreasing.

    Raises:
      ValueError: a piece is longer than a row.
    """
    by_prompt: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        by_prompt.setdefault(tuple(piece.prefix), []).append(piece)
    bundles: list[Bundle] = []
    for prompt, same in by_prompt.items():
        lengths = [len(piece.tokens) - len(prompt) for piece in same]
        bundles += [[same[i] for i in row] for row in first_fit_decreasing(lengths, row_length - len(prompt))]
    lengths = [len(b[0].prefix) + sum(len(p.tokens) - len(b[0].prefix) for p in b) for b in bundles]
    return [[bundles[i] for i in row] for row in first_fit_decreasing(lengths, row_length)]


def place(rows: Rows | TrainBatch, b: int, bundles: Sequence[Bundle]) -> list[tuple[Piece, slice]]:
    """Writes bundles into row b; returns the columns of each piece's continuation."""
    start = segment = 0
    columns = []

    def write(tokens: list[int], first: int, prefix: int) -> slice:
        nonlocal start, segment
        segment += 1
        span = slice(start, start + len(tokens))
        rows.tokens_BT[b, span] = tokens
        rows.position_BT[b, span] = np.arange(first, first + len(tokens))
        rows.segment_BT[b, span] = segment
        rows.prefix_BT[b, span] = prefix
        start = span.stop
        return span

    for bundle in bundles:
        prompt = bundle[0].prefix
        shared = 0
        if prompt:
            write(prompt, 0, 0)
            shared = segment
        for piece in bundle:
            span = write(piece.tokens[len(prompt) :], len(prompt), shared)
            rows.loss_mask_BT[b, span] = piece.loss_mask[len(prompt) :]
            columns.append((piece, span))
    return columns
