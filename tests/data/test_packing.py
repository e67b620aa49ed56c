"""What a TrainBatch holds, read back trajectory by trajectory; literal rows; what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gagar_jax.config import RolloutConfig, TrainConfig
from gagar_jax.data.packing import TrainBatch, check_row_length, first_fit_decreasing, pack
from gagar_jax.types import Group, Outcome, Status, StopReason, Ticket, Trajectory
from tests.trajectories import make_groups


def read_back(batch: TrainBatch, n: int) -> dict[str, list]:
    """Trajectory n as the device sees it: its prefix, then its own tokens, in order."""
    rows, columns = np.nonzero(batch.trajectory_id_BT == n)
    assert len(set(rows)) == 1
    b = rows[0]
    prefixes = set(batch.prefix_BT[b, columns])
    assert len(prefixes) == 1
    prefix = np.flatnonzero((batch.segment_BT[b] == prefixes.pop()) & (batch.segment_BT[b] > 0))
    prefix = prefix[batch.trajectory_id_BT[b, prefix] != n]
    assert (prefix < columns.min()).all()
    places = np.concatenate([prefix, columns])
    assert (batch.position_BT[b, places] == np.arange(len(places))).all()
    assert (batch.loss_mask_BT[b, prefix] == 0).all()
    return {
        "tokens": batch.tokens_BT[b, places].tolist(),
        "loss_mask": batch.loss_mask_BT[b, places].tolist(),
        "logprobs": batch.sampler_logprob_BT[b, places].tolist(),
        "own": columns.tolist(),
    }


@settings(max_examples=60, deadline=None)
@given(
    outcomes=st.lists(st.text("pfi", min_size=1, max_size=6), min_size=1, max_size=4),
    prompt=st.integers(1, 12),
    row_length=st.integers(32, 80),
    seed=st.integers(0, 1000),
)
def test_every_trajectory_is_there_once_and_whole(
    outcomes: list[str], prompt: int, row_length: int, seed: int
) -> None:
    groups = make_groups(*outcomes, prompt=prompt, seed=seed)
    batch = pack(groups, num_trajectories=24, num_groups=4, row_length=row_length, row_bucket=2)
    members = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    for n, (g, t) in enumerate(members):
        mixed = {"p", "f"} <= set(outcomes[g])
        if not (mixed and t.valid):
            assert not (batch.trajectory_id_BT == n).any()
            continue
        found = read_back(batch, n)
        assert (found["tokens"], found["loss_mask"]) == (t.tokens, t.loss_mask)
        np.testing.assert_array_equal(found["logprobs"], np.float32(t.logprobs))
    packed = (batch.trajectory_id_BT < 24).sum()
    assert packed <= batch.segment_BT.astype(bool).sum()
    padding = batch.segment_BT == 0
    assert not batch.tokens_BT[padding].any()
    assert not batch.loss_mask_BT[padding].any()
    assert (batch.version_BT[padding] == -1).all()


def test_rows_are_these() -> None:
    """One prompt of three tokens, whose last belongs to the continuations."""

    def member(m: int, status: Status, extra: list[int]) -> Trajectory:
        return Trajectory(
            Ticket(7, m, "t"), 4,
            [10, 11, 2, *extra], [0, 0, 0] + [1] * len(extra), [0.0] * 3 + [-1.0] * len(extra),
            "", [], Outcome(status, StopReason.SUBMITTED, "r"), b"",
        )  # fmt: skip

    group = Group(7, {}, [member(0, Status.PASSED, [20]), member(1, Status.FAILED, [30, 31])])
    batch = pack([group], num_trajectories=3, num_groups=2, row_length=9, row_bucket=1)
    expected = {
        "tokens_BT": [[10, 11, 2, 30, 31, 2, 20, 0, 0]],
        "position_BT": [[0, 1, 2, 3, 4, 2, 3, 0, 0]],
        "segment_BT": [[1, 1, 2, 2, 2, 3, 3, 0, 0]],
        "prefix_BT": [[0, 0, 1, 1, 1, 1, 1, 0, 0]],
        "loss_mask_BT": [[0, 0, 0, 1, 1, 0, 1, 0, 0]],
        "trajectory_id_BT": [[3, 3, 1, 1, 1, 0, 0, 3, 3]],
        "sampler_logprob_BT": [[0, 0, 0, -1, -1, 0, -1, 0, 0]],
        "version_BT": [[-1, -1, 4, 4, 4, 4, 4, -1, -1]],
        "group_id_N": [0, 0, 2],
        "reward_N": [1, 0, 0],
        "passed_N": [True, False, False],
        "valid_N": [True, True, False],
        "ticket_N": [7, 7, -1],
        "member_N": [0, 1, -1],
        "ticket_G": [7, -1],
    }
    assert {name: value.tolist() for name, value in batch._asdict().items()} == expected


def test_a_shared_prompt_saves_rows() -> None:
    groups = make_groups("pfpfpfpf", prompt=30, longest=10)
    batch = pack(groups, num_trajectories=8, num_groups=1, row_length=64, row_bucket=1)
    alone = sum(len(t.tokens) for t in groups[0].trajectories)
    assert (batch.segment_BT > 0).sum() < 0.6 * alone


def test_packing_is_deterministic() -> None:
    groups = make_groups("pfpf", "ffp", seed=3)
    one, two = (pack(groups, num_trajectories=8, num_groups=2, row_length=64, row_bucket=2) for _ in range(2))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_a_batch_without_trainable_trajectories_keeps_its_shape() -> None:
    batch = pack(make_groups("ppp", "i"), num_trajectories=4, num_groups=2, row_length=64, row_bucket=8)
    assert batch.tokens_BT.shape == (8, 64)
    assert not batch.segment_BT.any()
    assert batch.passed_N.tolist() == [True] * 3 + [False]


@pytest.mark.parametrize("lengths", [[8] * 5, [1, 7, 2, 6, 3, 5], []])
def test_rows_are_full_when_they_can_be(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, 8)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert len(rows) == -(-sum(lengths) // 8)


def test_what_does_not_fit_is_an_error_that_names_it() -> None:
    groups = make_groups("pf", prompt=40, longest=30, seed=1)
    with pytest.raises(ValueError, match=r"task-30, group 30, member \d: \d+ tokens .*row_length 41"):
        pack(groups, num_trajectories=2, num_groups=1, row_length=41, row_bucket=1)
    with pytest.raises(ValueError, match="1 groups with 2 trajectories"):
        pack(groups, num_trajectories=1, num_groups=1, row_length=128, row_bucket=1)


def test_a_trajectory_whose_arrays_disagree_is_refused() -> None:
    (group,) = make_groups("pf")
    good = group.trajectories[0]
    for bad, message in (
        (dataclasses.replace(good, logprobs=good.logprobs[:-1]), "log-probs"),
        (dataclasses.replace(good, loss_mask=[1, *good.loss_mask[1:]]), "first token"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(
                [dataclasses.replace(group, trajectories=[bad, group.trajectories[1]])],
                num_trajectories=2,
                num_groups=1,
                row_length=64,
                row_bucket=1,
            )


def test_settings_whose_trajectories_do_not_fit_a_row_are_refused() -> None:
    rollout, train = RolloutConfig(), TrainConfig()
    limits = {"max_prompt": rollout.max_prompt, "max_continuation": rollout.max_continuation}
    check_row_length(train.row_length, **limits)
    with pytest.raises(ValueError, match=r"row_length 511.*256.*256 = 512"):
        check_row_length(511, **limits)
