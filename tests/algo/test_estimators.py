"""Every estimator against its plain-loop definition, group by group."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gagar_jax.algo.estimators import ESTIMATORS
from tests import reference
from tests.algo.batches import one_group, random_batch

ROWS, GROUPS = 60, 8
PLAIN = {
    "grpo": lambda r, p, q, graded: reference.grpo(r),
    "trl": lambda r, p, q, graded: reference.trl(r),
    "verl": lambda r, p, q, graded: reference.verl(r),
    "dr_grpo": lambda r, p, q, graded: reference.dr_grpo(r),
    "rloo": lambda r, p, q, graded: reference.rloo(r),
    "gopo": lambda r, p, q, graded: reference.gopo(r),
    "papo": lambda r, p, q, graded: reference.papo(r, p, q) if graded else reference.grpo(r),
    "edas": lambda r, p, q, graded: reference.edas(r, p, q) if graded else reference.dr_grpo(r),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_against_plain_loops(name):
    assert PLAIN.keys() == ESTIMATORS.keys()
    rng = np.random.default_rng(2)
    for trial in range(6):
        batch = random_batch(rng, rows=ROWS, groups=GROUPS, binary=bool(trial % 2))
        batch = batch._replace(quality=rng.uniform(0, 1, ROWS).astype(np.float32))
        out = ESTIMATORS[name](*batch, num_groups=GROUPS)
        expected = np.zeros(ROWS)
        for g in range(GROUPS):
            members = [
                i
                for i in range(ROWS)
                if batch.group_id[i] == g
                and batch.valid[i]
                and (math.isfinite(batch.reward[i]) or batch.external[i])
            ]
            if not members:
                continue
            reward = [0.0 if batch.external[i] else float(batch.reward[i]) for i in members]
            passed = [bool(batch.passed[i]) and not batch.external[i] for i in members]
            quality = [float(batch.quality[i]) for i in members]
            expected[members] = PLAIN[name](reward, passed, quality, bool(batch.graded[g]))
        # A group whose members are all equal but for rounding has a standard deviation of rounding's size.
        np.testing.assert_allclose(out.advantage_N, expected, rtol=2e-5, atol=2e-5)
        assert not np.asarray(out.advantage_N)[~np.asarray(out.trained_N)].any()


def test_conventions_differ_where_they_are_said_to():
    one = one_group([1], [1], [1])
    assert [
        float(ESTIMATORS[n](*one, num_groups=1).advantage_N[0]) for n in ("grpo", "trl", "rloo", "gopo")
    ] == [0] * 4
    assert float(ESTIMATORS["verl"](*one, num_groups=1).advantage_N[0]) == pytest.approx(1.0, abs=1e-5)
    two = one_group([1, 0], [1, 0], [1, 1])
    first = {n: float(f(*two, num_groups=1).advantage_N[0]) for n, f in ESTIMATORS.items()}
    assert first["grpo"] == pytest.approx(0.5 / (0.5 + 1e-6), abs=1e-6)
    assert first["trl"] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4), abs=1e-6)
    assert first["verl"] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6), abs=1e-6)
    assert first["rloo"] == 1.0
    assert first["gopo"] == 2.0
