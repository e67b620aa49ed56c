"""Groups of trajectories → `TrainBatch`, the only object that crosses to the device for training.

Rows are filled first-fit-decreasing and their number is rounded up to a bucket, so that a run has few
shapes and few programs. Nothing is computed from rewards here but which rows can be left out.

Conventions: `loss_mask_BT[b, t] = 1` says that token t was generated; its log-prob is predicted from
token t − 1 (the train step shifts). Padding: segment 0, trajectory_id N, group_id G, tickets −1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gagar_jax.data.tokenizer import PAD
from gagar_jax.types import Group, Trajectory

Array = np.ndarray


class Rows(NamedTuple):
    """What a forward pass and a loss mask need: packed rows."""

    tokens_BT: Array  # int32
    position_BT: Array  # int32, counts from 0 in each segment
    segment_BT: Array  # int32, 1… in each row, 0 for padding
    loss_mask_BT: Array  # int32


class TrainBatch(NamedTuple):
    """One batch of the reinforcement-learning stage: B packed rows, N trajectories, G groups."""

    tokens_BT: Array  # int32
    position_BT: Array  # int32, counts from 0 in each segment
    segment_BT: Array  # int32, 1… in each row, 0 for padding
    loss_mask_BT: Array  # int32
    trajectory_id_BT: Array  # int32 in [0, N); N for padding
    sampler_logprob_BT: Array  # float32, 0 where nothing was generated
    version_BT: Array  # int32: updates behind the weights that sampled the token; −1 for padding
    group_id_N: Array  # int32 in [0, G); G for padding
    reward_N: Array  # float32
    passed_N: Array  # bool
    valid_N: Array  # bool
    ticket_N: Array  # int32: Ticket.group of the trajectory; −1 for padding
    member_N: Array  # int32: Ticket.member of the trajectory; −1 for padding
    ticket_G: Array  # int32: Ticket.group; −1 for padding

    @property
    def rows(self) -> Rows:
        return Rows(self.tokens_BT, self.position_BT, self.segment_BT, self.loss_mask_BT)


def check_row_length(row_length: int, *, max_prompt: int, max_continuation: int) -> None:
    """Every trajectory the sampler can make must fit one row. Called when settings are read.

    Raises:
      ValueError: it does not; the message has the numbers.
    """
    context = max_prompt + max_continuation
    if context > row_length:
        raise ValueError(
            f"train.row_length {row_length} is shorter than the longest trajectory: rollout.max_prompt {max_prompt} "
            f"+ rollout.max_continuation {max_continuation} = {context}"
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
            f"{len(groups)} groups with {len(members)} trajectories do not fit {num_groups} x {num_trajectories}"
        )
    dropped = [will_be_dropped(group.trajectories) for group in groups]
    packed = [n for n, (g, t) in enumerate(members) if t.valid and not dropped[g]]
    for n in packed:
        _check(members[n][1], row_length)
    rows = first_fit_decreasing([len(members[n][1].tokens) for n in packed], row_length)
    batch = _empty(bucket_rows(len(rows), row_bucket), row_length, num_trajectories, num_groups)
    for b, row in enumerate(rows):
        start = 0
        for segment, index in enumerate(row, 1):
            start = _place(batch, b, start, segment, packed[index], members[packed[index]][1])
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
    name = f"{trajectory.ticket.instance_id}, group {trajectory.ticket.group}, member {trajectory.ticket.member}"
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


def _place(batch: TrainBatch, b: int, start: int, segment: int, n: int, trajectory: Trajectory) -> int:
    """Writes trajectory n into row b from `start` on; returns where it ends."""
    end = start + len(trajectory.tokens)
    span = (b, slice(start, end))
    batch.tokens_BT[span] = trajectory.tokens
    batch.position_BT[span] = np.arange(end - start)
    batch.segment_BT[span] = segment
    batch.loss_mask_BT[span] = trajectory.loss_mask
    batch.trajectory_id_BT[span] = n
    batch.sampler_logprob_BT[span] = trajectory.logprobs
    batch.version_BT[span] = trajectory.version
    return end
