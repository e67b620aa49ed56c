"""Random batches for the tests of group arithmetic. Fixed shapes, so that each program compiles once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """The positional arguments of `group_advantages`, as NumPy arrays."""

    reward: np.ndarray
    passed: np.ndarray
    quality: np.ndarray
    group_id: np.ndarray
    valid: np.ndarray
    external: np.ndarray
    graded: np.ndarray


RUBRIC = np.array([1.0, 0.9, 0.85, 0.625, 0.4, 0.2], np.float32)


def random_batch(rng: np.random.Generator, *, rows: int, groups: int, binary: bool) -> Batch:
    """Ragged groups in any order, some padding, invalid and external rows; rewards binary or shaped."""
    passed = rng.random(rows) < rng.choice([0.1, 0.5, 0.9])
    reward = passed.astype(np.float32)
    if not binary:
        reward = np.where(rng.random(rows) < 0.5, reward - rng.random(rows) * 0.9, reward).astype(np.float32)
    valid = rng.random(rows) < 0.9
    reward = np.where(valid | (rng.random(rows) < 0.5), reward, rng.choice([np.nan, np.inf, -np.inf], rows))
    quality = np.where(rng.random(rows) < 0.7, rng.choice(RUBRIC, rows), rng.uniform(0.05, 1.0, rows))
    return Batch(
        reward=reward.astype(np.float32),
        passed=passed,
        quality=np.where(passed, quality, rng.choice([np.nan, 0.0, 1.0, 7.0], rows)).astype(np.float32),
        group_id=rng.integers(-1, groups + 1, rows).astype(np.int32),
        valid=valid,
        external=rng.random(rows) < 0.08,
        graded=rng.random(groups) < 0.8,
    )


def one_group(reward: list[float], passed: list[int], quality: list[float]) -> Batch:
    """A graded group of valid members."""
    rows = len(reward)
    return Batch(
        reward=np.array(reward, np.float32),
        passed=np.array(passed, bool),
        quality=np.array(quality, np.float32),
        group_id=np.zeros(rows, np.int32),
        valid=np.ones(rows, bool),
        external=np.zeros(rows, bool),
        graded=np.ones(1, bool),
    )
