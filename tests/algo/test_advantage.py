"""`group_advantages` against the numbers in print, the oracle in plain loops, and the method's invariants."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gagar_jax.algo import advantage
from gagar_jax.algo.advantage import GroupAdvantages, group_advantages
from tests import reference
from tests.algo.batches import Batch, one_group, random_batch

MODES = ("none", "downweight", "sum_preserving")
ROWS, GROUPS = 24, 4
unhurried = hypothesis.settings(deadline=None)  # the first example compiles


@functools.cache
def compiled(num_groups: int, mode: str = "sum_preserving"):
    return jax.jit(functools.partial(group_advantages, num_groups=num_groups, mode=mode))


def run(batch: Batch, mode: str = "sum_preserving") -> GroupAdvantages:
    return jax.tree.map(np.asarray, compiled(batch.graded.shape[0], mode)(*batch))


def assert_agrees(ours: GroupAdvantages, oracle: dict, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(ours.advantage_N, oracle["advantage"], rtol=0, atol=tolerance)
    np.testing.assert_array_equal(ours.trained_N, oracle["trained"])
    np.testing.assert_array_equal(ours.kept_G, oracle["kept"])
    np.testing.assert_array_equal(ours.size_G, oracle["size"])
    on_the_edge = np.isclose(oracle["scale"], 1.5, rtol=2e-6) & ~np.asarray(ours.capped_G & oracle["capped"])
    np.testing.assert_array_equal(ours.capped_G | on_the_edge, oracle["capped"] | on_the_edge)
    np.testing.assert_allclose(ours.mean_G, oracle["mean"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(ours.deficit_G, oracle["deficit"], rtol=1e-6, atol=5 * tolerance)
    np.testing.assert_allclose(ours.scale_G, oracle["scale"], rtol=2e-6, atol=0)


# Golden values.


@pytest.mark.parametrize(
    ("quality", "passes", "largest"),
    # What the authors' own production run logged for groups of 16: the largest advantage of a group.
    [
        ([1, 0.85, 0.4], None, 1.08333),
        ([1, 0.85, 0.625, 0.4], None, 1.04348),
        ([1, 1, 0.2], None, 1.10795),
        ([1, 0.2], None, 1.32344),
        ([1, 0.85, 0.4, 0.2], None, 1.14023),
    ],
)
def test_largest_advantage_of_the_production_log(quality, passes, largest):
    passed = len(quality)
    batch = one_group(
        [1] * passed + [0] * (16 - passed), [1] * passed + [0] * (16 - passed), quality + [1] * (16 - passed)
    )
    assert float(run(batch).advantage_N.max()) == pytest.approx(largest, abs=1e-5)


def test_golden_group():
    out = run(one_group([1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1, 0.9, 0.625, 0.2, 1, 1, 1, 1]))
    assert float(out.scale_G[0]) == pytest.approx(1.467890, abs=1e-5)
    expected = [0.733945, 0.660550, 0.458716, 0.146789, -0.5, -0.5, -0.5, -0.5]
    np.testing.assert_allclose(out.advantage_N, expected, rtol=0, atol=1e-5)


def test_golden_capped_group():
    out = run(one_group([1, 0, 0, 0, 1], [1, 0, 0, 0, 1], [0.2, 1, 1, 1, 0.4]))
    assert bool(out.capped_G[0])
    np.testing.assert_allclose(out.advantage_N, [0.312, -0.268, -0.268, -0.268, 0.492], rtol=0, atol=1e-5)


def test_golden_shaped_group():
    out = run(one_group([1, 0.1, 0, 0], [1, 1, 0, 0], [1, 0.85, 1, 1]))
    assert float(out.mean_G[0]) == pytest.approx(0.275, abs=1e-6)
    np.testing.assert_allclose(out.advantage_N, [0.68125, -0.04375, -0.31875, -0.31875], rtol=0, atol=1e-5)


# The oracle.


@pytest.mark.parametrize(
    ("mode", "batches"), [("sum_preserving", 10_000), ("downweight", 1_000), ("none", 1_000)]
)
def test_oracle_agreement(mode, batches):
    rng = np.random.default_rng(7)
    made = [random_batch(rng, rows=ROWS, groups=GROUPS, binary=bool(i % 2)) for i in range(batches)]
    stacked = [np.stack(field) for field in zip(*made, strict=True)]
    ours = jax.jit(jax.vmap(functools.partial(group_advantages, num_groups=GROUPS, mode=mode)))(*stacked)
    ours = jax.tree.map(np.asarray, ours)
    kept = 0
    for i, batch in enumerate(made):
        oracle = reference.group_advantages(*batch, num_groups=GROUPS, mode=mode)
        assert_agrees(jax.tree.map(lambda x, i=i: x[i], ours), oracle)
        kept += sum(oracle["kept"])
    assert kept > batches  # the agreement is not about empty groups


def test_many_batches_as_one():
    """Groups do not see one another: batches with shifted ids in one call give what each gives alone."""
    rng = np.random.default_rng(3)
    made = [random_batch(rng, rows=ROWS, groups=GROUPS, binary=bool(i % 2)) for i in range(200)]
    shifted = [
        b._replace(group_id=np.where((b.group_id < 0) | (b.group_id >= GROUPS), -1, b.group_id + GROUPS * i))
        for i, b in enumerate(made)
    ]
    together = run(Batch(*(np.concatenate(field) for field in zip(*shifted, strict=True))))
    alone = np.concatenate([run(b).advantage_N for b in made])
    np.testing.assert_allclose(together.advantage_N, alone, rtol=0, atol=1e-6)


def test_one_pass_equals_two_passes(monkeypatch):
    """Binary rewards take a short cut; it must be invisible."""
    rng = np.random.default_rng(11)
    batch = random_batch(rng, rows=4096, groups=300, binary=True)
    short = run(batch)
    monkeypatch.setattr(advantage, "likely", lambda check, rows: jnp.array(False))
    long = group_advantages(*batch, num_groups=300)
    for a, b in zip(short, long, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-6, atol=1e-6)


# The invariants.


@st.composite
def batches(draw: st.DrawFn, *, binary: bool | None = None) -> Batch:
    seed = draw(st.integers(0, 2**32 - 1))
    is_binary = draw(st.booleans()) if binary is None else binary
    return random_batch(np.random.default_rng(seed), rows=ROWS, groups=GROUPS, binary=is_binary)


def per_group(values: np.ndarray, batch: Batch, where: np.ndarray) -> np.ndarray:
    inside = where & (batch.group_id >= 0) & (batch.group_id < GROUPS)
    return np.bincount(batch.group_id[inside], values[inside].astype(np.float64), minlength=GROUPS)


@unhurried
@hypothesis.given(batch=batches())
def test_sum_preserving_sums_to_zero(batch):
    out = run(batch)
    np.testing.assert_allclose(per_group(out.advantage_N, batch, batch.valid), 0, atol=3e-6)


@unhurried
@hypothesis.given(batch=batches(binary=True))
def test_below_the_cap_credit_is_kept_and_shared_by_quality(batch):
    out, plain = run(batch), run(batch, "none")
    passed = batch.passed & out.trained_N & ~batch.external
    failed = out.trained_N & ~passed
    below = out.kept_G & ~out.capped_G
    total, before = (per_group(o.advantage_N, batch, passed) for o in (out, plain))
    np.testing.assert_allclose(total[below], before[below], atol=3e-6)
    rows_below = out.trained_N & below[np.clip(batch.group_id, 0, GROUPS - 1)]
    np.testing.assert_allclose(
        out.advantage_N[failed & rows_below], plain.advantage_N[failed & rows_below], atol=2e-6
    )
    for g in np.flatnonzero(below & batch.graded):
        here = passed & (batch.group_id == g)
        ratio = out.advantage_N[here] / batch.quality[here]
        np.testing.assert_allclose(ratio, ratio[0], rtol=2e-5)


@unhurried
@hypothesis.given(batch=batches(binary=True))
def test_downweighting_leaves_the_deficit(batch):
    out = run(batch, "downweight")
    np.testing.assert_allclose(per_group(out.advantage_N, batch, batch.valid), -out.deficit_G, atol=3e-6)


@unhurried
@hypothesis.given(batch=batches(binary=True), quality=st.floats(0.01, 1.0))
def test_equal_quality(batch, quality):
    batch = batch._replace(quality=np.full(ROWS, quality, np.float32), graded=np.ones(GROUPS, bool))
    out, plain = run(batch), run(batch, "none")
    if quality >= 0.667:
        np.testing.assert_allclose(out.advantage_N, plain.advantage_N, rtol=0, atol=3e-7)
        assert not out.capped_G.any()
    elif quality < 0.666:
        np.testing.assert_array_equal(out.capped_G, out.kept_G)
        for g in np.flatnonzero(out.kept_G):
            passed = batch.passed & out.trained_N & ~batch.external & (batch.group_id == g)
            assert np.ptp(out.advantage_N[passed]) < 1e-6
            assert (out.advantage_N[passed] < plain.advantage_N[passed]).all()


@unhurried
@hypothesis.given(batch=batches(binary=True))
def test_best_quality_everywhere_is_exactly_none(batch):
    batch = batch._replace(quality=np.ones(ROWS, np.float32))
    np.testing.assert_array_equal(run(batch).advantage_N, run(batch, "none").advantage_N)


@unhurried
@hypothesis.given(batch=batches())
def test_ungraded_groups_are_none(batch):
    batch = batch._replace(graded=np.zeros(GROUPS, bool))
    np.testing.assert_allclose(run(batch).advantage_N, run(batch, "none").advantage_N, rtol=0, atol=1e-7)


@unhurried
@hypothesis.given(batch=batches(), seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES))
def test_order_names_and_padding_change_nothing(batch, seed, mode):
    rng = np.random.default_rng(seed)
    order, names = rng.permutation(ROWS), rng.permutation(GROUPS).astype(np.int32)
    inside = (batch.group_id >= 0) & (batch.group_id < GROUPS)
    renamed = np.where(
        inside, names[np.clip(batch.group_id, 0, GROUPS - 1)], rng.choice([-(2**31), -1, GROUPS, 2**31 - 1])
    )
    graded = np.empty(GROUPS, bool)
    graded[names] = batch.graded
    moved = Batch(*(field[order] for field in batch._replace(group_id=renamed.astype(np.int32))[:-1]), graded)
    plain, shuffled = run(batch, mode), run(moved, mode)
    np.testing.assert_allclose(shuffled.advantage_N, plain.advantage_N[order], rtol=0, atol=1e-6)
    np.testing.assert_allclose(shuffled.scale_G[names], plain.scale_G, rtol=2e-6)


@unhurried
@hypothesis.given(batch=batches(), mode=st.sampled_from(MODES))
def test_invalid_rows_are_as_if_absent(batch, mode):
    absent = batch._replace(group_id=np.where(batch.valid, batch.group_id, -1).astype(np.int32))
    np.testing.assert_array_equal(run(batch, mode).advantage_N, run(absent, mode).advantage_N)
    assert not run(batch, mode).advantage_N[~batch.valid].any()


# Adversarial inputs.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("binary", [True, False])
def test_values_and_gradients_are_finite(mode, binary):
    rng = np.random.default_rng(5)
    awkward = np.array([0.0, 1e-30, 1e-9, -1.0, 2.0, np.nan, np.inf], np.float32)

    def total(reward, quality, passed, *rest):
        out = group_advantages(reward, passed, quality, *rest, num_groups=GROUPS, mode=mode)
        return jnp.sum(out.advantage_N**2) + jnp.sum(out.scale_G) + jnp.sum(out.deficit_G)

    value_and_grad = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    for _ in range(50):
        batch = random_batch(rng, rows=ROWS, groups=GROUPS, binary=binary)
        quality = np.where(rng.random(ROWS) < 0.2, rng.choice(awkward, ROWS), batch.quality)
        value, grads = value_and_grad(batch.reward, quality, batch.passed, *batch[3:])
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in grads)


def test_gradient_is_the_general_formula_also_for_binary_rewards():
    batch = one_group([1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 0], [1, 0.6, 1, 1, 0.9, 1])
    weights = np.linspace(-1, 1, 6, dtype=np.float32)

    def total(reward, quality):
        out = group_advantages(reward, batch.passed, quality, *batch[3:], num_groups=1)
        return jnp.sum(weights * out.advantage_N)

    grads = jax.grad(total, argnums=(0, 1))(batch.reward, batch.quality)
    for argument, grad in enumerate(grads):
        for i in range(6):
            ends = []
            for step in (-1e-3, 1e-3):
                arguments = [batch.reward.copy(), batch.quality.copy()]
                arguments[argument][i] += step
                if argument == 1:
                    arguments[1] = np.minimum(arguments[1], 1.0)
                oracle = reference.group_advantages(
                    arguments[0], batch.passed, arguments[1], *batch[3:], num_groups=1
                )
                ends.append(float(np.dot(weights, oracle["advantage"])))
            if argument == 1 and (not batch.passed[i] or batch.quality[i] == 1):
                continue  # not read, or at the edge of its range
            assert float(grad[i]) == pytest.approx((ends[1] - ends[0]) / 2e-3, abs=2e-3)


def test_a_close_group_keeps_its_difference():
    out = run(one_group([1.00001, 1.0], [1, 0], [1, 1]))
    gap = float(np.float32(1.00001)) - 1.0
    np.testing.assert_allclose(out.advantage_N, [gap / 2, -gap / 2], rtol=1e-3)
    offset = run(one_group([1001.0, 1000.0, 1000.0], [1, 0, 0], [1, 1, 1]))
    np.testing.assert_allclose(offset.advantage_N, [2 / 3, -1 / 3, -1 / 3], atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_degenerate_groups(mode):
    """Groups: one member, empty, all external, invalid with NaN, all passed, all failed, and a real one."""
    group = np.array([0, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], np.int32)
    passed = np.array([1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0], bool)
    reward = np.where(group == 3, np.nan, passed).astype(np.float32)
    batch = Batch(reward, passed, np.ones(11, np.float32), group, group != 3, group == 2, np.ones(7, bool))
    out = run(batch, mode)
    np.testing.assert_array_equal(out.kept_G, [0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(out.size_G, [1, 0, 2, 0, 2, 2, 2])
    np.testing.assert_array_equal(out.advantage_N, [0] * 9 + [0.5, -0.5])


def test_external_row_fails_before_statistics():
    batch = one_group([1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1])._replace(
        external=np.array([1, 0, 0, 0], bool)
    )
    out = run(batch)
    assert float(out.mean_G[0]) == 0.5
    np.testing.assert_allclose(out.advantage_N, [-0.5, 0.5, 0.5, -0.5])
    nan = batch._replace(reward=np.array([np.nan, 1, 1, 0], np.float32))
    np.testing.assert_array_equal(run(nan).advantage_N, out.advantage_N)


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, np.nan, np.inf])
def test_a_coefficient_out_of_range_voids_its_group_only(bad):
    one = one_group([1, 1, 0, 0], [1, 1, 0, 0], [1, 0.4, 1, 1])
    two = Batch(*(np.concatenate((a, a)) for a in one))._replace(
        group_id=np.repeat(np.arange(2, dtype=np.int32), 4)
    )
    quality = two.quality.copy()
    quality[0] = bad
    out, plain = run(two._replace(quality=quality)), run(two, "none")
    np.testing.assert_allclose(out.advantage_N[:4], plain.advantage_N[:4], atol=1e-7)
    np.testing.assert_allclose(out.advantage_N[4:], run(two).advantage_N[4:], atol=1e-7)


@pytest.mark.parametrize("groups", [1, 7, 62_500])
@pytest.mark.parametrize("binary", [True, False])
def test_a_million_shuffled_rows(groups, binary):
    """Also with one group of a million members, where naive float32 sums lose the mean."""
    rng = np.random.default_rng(1)
    rows = 1_000_000
    group_id = rng.permutation(np.arange(rows) % groups).astype(np.int32)
    passed = rng.random(rows) < 0.5
    reward = passed.astype(np.float32)
    if not binary:
        reward = np.where(passed, reward - np.float32(0.1) * (rng.random(rows) < 0.5), 0).astype(np.float32)
    quality = rng.choice(np.array([1, 0.9, 0.7], np.float32), rows)
    ones = np.ones(rows, bool)
    out = run(Batch(reward, passed, quality, group_id, ones, ~ones, np.ones(groups, bool)))
    r = reward.astype(np.float64)
    centred = r - (np.bincount(group_id, r) / np.bincount(group_id))[group_id]
    gain = np.where(passed, np.maximum(centred, 0), 0)
    credit = np.bincount(group_id, quality * gain)
    scale = np.minimum(np.bincount(group_id, gain) / np.where(credit > 0, credit, 1), 1.5)
    shared = np.where(passed, scale[group_id] * quality * gain, centred)
    shared -= (np.bincount(group_id, shared) / np.bincount(group_id))[group_id]
    np.testing.assert_allclose(out.advantage_N, np.where(out.kept_G[group_id], shared, 0), rtol=0, atol=2e-6)


def test_any_dtype_and_weak_types():
    plain = run(one_group([1, 1, 0, 0], [1, 1, 0, 0], [1, 0.5, 1, 1]))
    yes = [True] * 4
    lists = group_advantages(
        [1, 1, 0, 0], [1, 1, 0, 0], [1, 0.5, 1, 1], [0, 0, 0, 0], yes, [0] * 4, [1], num_groups=1
    )
    bfloat = group_advantages(
        jnp.array([1, 1, 0, 0], jnp.bfloat16), jnp.array([1, 1, 0, 0], jnp.uint8),
        jnp.array([1, 0.5, 1, 1], jnp.float16), jnp.zeros(4, jnp.uint8), np.array(yes), np.zeros(4, bool),
        np.ones(1, bool), num_groups=1,
    )  # fmt: skip
    for out in (lists, bfloat):
        np.testing.assert_array_equal(out.advantage_N, plain.advantage_N)
        assert out.advantage_N.dtype == jnp.float32
        assert not out.advantage_N.weak_type


def test_one_trace_serves_every_raggedness():
    traces = 0

    @jax.jit
    def step(*batch):
        nonlocal traces
        traces += 1
        return group_advantages(*batch, num_groups=GROUPS).advantage_N

    for seed in range(5):
        step(*random_batch(np.random.default_rng(seed), rows=ROWS, groups=GROUPS, binary=False))
    assert traces == 1


def test_refuses_what_it_cannot_read():
    batch = one_group([1, 0], [1, 0], [1, 1])
    with pytest.raises(ValueError, match="mode 'gagar'"):
        group_advantages(*batch, num_groups=1, mode="gagar")
    with pytest.raises(ValueError, match="num_groups"):
        group_advantages(*batch, num_groups=0)
    with pytest.raises(AssertionError):
        group_advantages(*batch._replace(reward=np.ones(3, np.float32)), num_groups=1)
    with pytest.raises(AssertionError):
        group_advantages(*batch, num_groups=2)
