"""Supervised batches: one shape, every demonstration once an epoch, any step by its index."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest

from gagar_jax.data.demonstrations import Example, SupervisedBatches
from gagar_jax.data.packing import Rows

RNG = np.random.default_rng(0)
PROMPTS = [[900 + p] * int(RNG.integers(5, 40)) for p in range(12)]


def example(n: int) -> Example:
    """Demonstration n: its prompt, then the id n as often as it is long."""
    prompt, length = PROMPTS[n % len(PROMPTS)], int(RNG.integers(1, 40))
    return Example(prompt + [n + 5] * length, [0] * len(prompt) + [1] * length)


EXAMPLES = [example(n) for n in range(60)]


def batches(seed: int = 0, **overrides: float) -> SupervisedBatches:
    chosen = {"tokens_per_batch": 512, "row_length": 128, "prompt_weight": 0} | overrides
    return SupervisedBatches(EXAMPLES, seed=seed, **chosen)


def demonstrations(batch: Rows) -> list[tuple[Example, list[int]]]:
    """Each demonstration of a batch as the device sees it, and its positions."""
    found = []
    for b in range(len(batch.tokens_BT)):
        for segment in sorted(set(batch.segment_BT[b]) - {0}):
            own = batch.segment_BT[b] == segment
            if not batch.loss_mask_BT[b, own].any():
                continue
            seen = own | ((batch.segment_BT[b] == batch.prefix_BT[b, own][0]) & (batch.segment_BT[b] > 0))
            arrays = (batch.tokens_BT[b, seen], batch.loss_mask_BT[b, seen], batch.position_BT[b, seen])
            tokens, mask, position = (a.tolist() for a in arrays)
            found.append((Example(tokens, mask), position))
    return found


def test_an_epoch_visits_every_demonstration_whole() -> None:
    source = batches()
    seen: Counter[int] = Counter()
    steps = 0
    while len(seen) < len(EXAMPLES):
        batch = source.batch(steps)
        steps += 1
        assert batch.tokens_BT.shape == (4, 128)
        for found, position in demonstrations(batch):
            number = found.tokens[-1] - 5
            assert found == EXAMPLES[number]
            assert position == list(range(len(position)))
            seen[number] += 1
    tokens = sum(len(e.tokens) for e in EXAMPLES)
    assert steps * 512 < tokens, "prompts are shared, so an epoch is shorter than its demonstrations"
    assert max(seen.values()) <= 2, "only the last batch of an epoch repeats some"


def test_any_step_can_be_asked_for_and_is_the_same() -> None:
    source = batches()
    forward = [source.batch(step) for step in range(20)]
    again = batches()
    for step in (19, 3, 11, 0):
        assert all((a == b).all() for a, b in zip(forward[step], again.batch(step), strict=True))
    assert any((batches(seed=1).batch(step).tokens_BT != forward[step].tokens_BT).any() for step in range(3))


def test_epochs_differ() -> None:
    source = batches()
    first = [source.batch(step).tokens_BT.tobytes() for step in range(40)]
    assert len(set(first)) == 40


def test_rows_divide_over_the_mesh() -> None:
    assert batches(row_multiple=8).batch(0).tokens_BT.shape == (8, 128)


def test_long_demonstrations_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        source = batches(row_length=50)
    assert source.too_long == sum(len(e.tokens) > 50 for e in EXAMPLES)
    assert f"{source.too_long} demonstrations of 60" in caplog.text
    with pytest.raises(ValueError, match="no demonstration of 60 fits 4"):
        batches(row_length=4)


def test_a_prompt_weighs_what_it_is_told_wherever_something_predicts_it() -> None:
    plain, weighted = batches().batch(3), batches(prompt_weight=0.25).batch(3)
    assert (weighted.tokens_BT == plain.tokens_BT).all()
    weight, action = weighted.loss_mask_BT, plain.loss_mask_BT
    assert (weight[action == 1] == 1).all()
    shared = (plain.tokens_BT >= 900) & (plain.prefix_BT == 0) & (plain.position_BT > 0)
    assert shared.any()
    assert (weight[shared] == 0.25).all()
    assert not weight[(action == 0) & ~shared].any()
