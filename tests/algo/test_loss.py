"""Losses as sums: against loops, for any split of the batch, with every kind of empty mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gagar_jax.algo import loss
from gagar_jax.algo.advantage import group_advantages
from tests import reference

B, T, N, G = 8, 12, 10, 3
CLIPPED = functools.partial(loss.policy_loss, clip_low=0.2, clip_high=0.28)
TRUNCATED = functools.partial(loss.truncated_policy_loss, ratio_cap=1.5)
MASKED = functools.partial(loss.masked_policy_loss, ratio_low=0.5, ratio_high=2.0)


def tokens(seed: int = 0) -> dict[str, np.ndarray]:
    """Trajectories in pieces over several rows, with prompts between and padding at the end."""
    rng = np.random.default_rng(seed)
    trajectory = rng.integers(0, N + 1, (B, T)).astype(np.int32)
    return {
        "logprob": rng.normal(-2, 1, (B, T)).astype(np.float32),
        "behaviour": rng.normal(-2, 1, (B, T)).astype(np.float32),
        "advantage": rng.normal(0, 1, (B, T)).astype(np.float32),
        "entropy": rng.uniform(0, 3, (B, T)).astype(np.float32),
        "trajectory": trajectory,
        "group": np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, G], np.int32),
        "mask": (rng.random((B, T)) < 0.6) & (trajectory < N - 1),
    }


def weights(x: dict[str, np.ndarray], aggregation: str = "token") -> jax.Array:
    return loss.token_weights(
        x["mask"],
        jnp.asarray(x["trajectory"]),
        jnp.asarray(x["group"]),
        num_groups=G,
        aggregation=aggregation,
    )


def arguments(x: dict[str, np.ndarray], weight: jax.Array) -> tuple[jax.Array, ...]:
    return *(jnp.asarray(x[k]) for k in ("logprob", "behaviour", "advantage")), weight


def token_losses(x: dict[str, np.ndarray], kind: str) -> list[list[float]]:
    """The three objectives, one token at a time."""
    out = []
    for b in range(B):
        row = []
        for t in range(T):
            logprob, a = float(x["logprob"][b, t]), float(x["advantage"][b, t])
            r = np.exp(logprob - float(x["behaviour"][b, t]))
            if kind == "clipped":
                row.append(-min(r * a, min(max(r, 0.8), 1.28) * a))
            elif kind == "truncated":
                row.append(-min(r, 1.5) * a * logprob)
            else:
                row.append(-r * a * logprob if 0.5 <= r <= 2.0 else 0.0)
        out.append(row)
    return out


@pytest.mark.parametrize(
    ("kind", "function"), [("clipped", CLIPPED), ("truncated", TRUNCATED), ("masked", MASKED)]
)
def test_token_mean_and_prompt_mean(kind, function):
    x = tokens()
    expected = token_losses(x, kind)
    sums = function(*arguments(x, weights(x)))
    assert float(sums.loss / sums.weight) == pytest.approx(
        reference.token_mean(expected, x["mask"].tolist()), abs=1e-5
    )
    assert float(sums.weight) == x["mask"].sum()  # also of tokens that clip or mask stops

    group = np.append(x["group"], G)[x["trajectory"]]
    sums = function(*arguments(x, weights(x, "prompt")))
    prompt = reference.prompt_mean(expected, x["mask"].tolist(), group.tolist())
    assert float(sums.loss / sums.weight) == pytest.approx(prompt, abs=1e-5)
    assert float(sums.weight) == pytest.approx(G, abs=1e-5)


@pytest.mark.parametrize("function", [CLIPPED, TRUNCATED, MASKED])
@pytest.mark.parametrize("aggregation", ["token", "prompt"])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_any_microbatch_split_gives_the_same_sums(function, aggregation, splits):
    x = tokens()
    batch = (*arguments(x, weights(x, aggregation)), jnp.asarray(x["entropy"]))
    whole = function(*batch[:4], entropy_BT=batch[4])
    total = loss.zero_sums()
    for part in zip(*(np.split(np.asarray(a), splits) for a in batch), strict=True):
        part = [jnp.asarray(a) for a in part]
        total = loss.add(total, function(*part[:4], entropy_BT=part[4]))
    for name, a, b in zip(whole._fields, whole, total, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("devices", [2, 8])
def test_any_device_count_gives_the_same_sums_and_gradients(devices):
    x = tokens()
    batch = arguments(x, weights(x, "prompt"))
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    spread = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in batch]

    @jax.jit
    def value_and_grad(logprob, *rest):
        def mean_loss(logprob):
            sums = CLIPPED(logprob, *rest)
            return loss.mean(sums.loss, sums.weight)

        return jax.value_and_grad(mean_loss)(logprob)

    for a, b in zip(value_and_grad(*batch), value_and_grad(*spread), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients():
    x = tokens()
    weight = weights(x)
    mask = np.asarray(weight) > 0
    ratio = np.exp(x["logprob"] - x["behaviour"])

    def gradient(function):
        return jax.grad(lambda lp: function(lp, *arguments(x, weight)[1:]).loss)(jnp.asarray(x["logprob"]))

    stopped = ((ratio > 1.28) & (x["advantage"] > 0)) | ((ratio < 0.8) & (x["advantage"] < 0))
    np.testing.assert_allclose(
        gradient(CLIPPED), np.where(mask & ~stopped, -ratio * x["advantage"], 0), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        gradient(TRUNCATED), np.where(mask, -np.minimum(ratio, 1.5) * x["advantage"], 0), rtol=1e-4, atol=1e-6
    )
    inside = (ratio >= 0.5) & (ratio <= 2.0)
    np.testing.assert_allclose(
        gradient(MASKED), np.where(mask & inside, -ratio * x["advantage"], 0), rtol=1e-4, atol=1e-6
    )
    assert float(CLIPPED(*arguments(x, weight)).clipped) == (stopped & mask).sum()
    assert float(MASKED(*arguments(x, weight)).clipped) == (~inside & mask).sum()


def test_fresh_data_has_ratio_one():
    x = tokens()
    x["behaviour"] = x["logprob"]
    sums = CLIPPED(*arguments(x, weights(x)))
    assert float(sums.ratio / sums.weight) == 1.0
    assert float(sums.ratio_max) == 1.0
    assert float(sums.kl) == 0.0
    assert float(sums.clipped) == 0.0


@pytest.mark.parametrize("function", [CLIPPED, TRUNCATED, MASKED])
def test_tokens_without_weight_may_hold_anything(function):
    x = tokens()
    clean = function(*arguments(x, weights(x)), entropy_BT=jnp.asarray(x["entropy"]))
    for name in ("logprob", "behaviour", "advantage", "entropy"):
        x[name] = np.where(x["mask"], x[name], np.nan)
    args = arguments(x, weights(x))
    dirty = function(*args, entropy_BT=jnp.asarray(x["entropy"]))
    np.testing.assert_array_equal(np.stack(dirty), np.stack(clean))
    gradient = jax.grad(lambda lp: function(lp, *args[1:]).loss)(args[0])
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("function", [CLIPPED, TRUNCATED, MASKED])
def test_nothing_to_train_on(function):
    x = tokens()
    x["mask"] = np.zeros((B, T), bool)
    for aggregation in ("token", "prompt"):
        args = arguments(x, weights(x, aggregation))

        def mean_loss(logprob, args=args):
            sums = function(logprob, *args[1:])
            return loss.mean(sums.loss, sums.weight)

        value, gradient = jax.value_and_grad(mean_loss)(args[0])
        assert float(value) == 0.0
        assert not gradient.any()


def test_absurd_ratios_stay_finite():
    far = jnp.full((1, 2), 300.0)
    advantage = jnp.array([[1.0, -1.0]])
    for function in (CLIPPED, TRUNCATED, MASKED):
        for logprob in (far - 301.0, -far):
            sums = function(logprob, -logprob - 301.0, advantage, jnp.ones((1, 2)))
            assert all(np.isfinite(s) for s in sums)


def test_fan_out_gives_every_row_of_a_trajectory_its_one_vote():
    """Trajectory 0 lies in two rows: one vote in its group's mean, and both rows carry its advantage."""
    out = group_advantages(
        jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([True, False, False, True]), jnp.ones(4),
        jnp.array([0, 0, 0, 1]), jnp.ones(4, bool), jnp.zeros(4, bool), jnp.ones(2, bool), num_groups=2,
    )  # fmt: skip
    trajectory = jnp.array([[0, 0, 1, 4], [0, 2, 3, -1]])
    loss_mask = jnp.array([[0, 1, 1, 1], [1, 1, 1, 1]])
    advantage, mask = loss.fan_out(out, trajectory, loss_mask)
    np.testing.assert_allclose(advantage, [[0, 2 / 3, -1 / 3, 0], [2 / 3, -1 / 3, 0, 0]], atol=1e-6)
    # Prompts, padding and the dropped group 1 (one member) are in no denominator.
    np.testing.assert_array_equal(mask, [[False, True, True, False], [True, True, False, False]])
    np.testing.assert_array_equal(
        loss.token_weights(mask, trajectory, jnp.array([0, 0, 0, 1]), num_groups=2), mask.astype(np.float32)
    )
    prompt = loss.token_weights(mask, trajectory, jnp.array([0, 0, 0, 1]), num_groups=2, aggregation="prompt")
    np.testing.assert_allclose(prompt, np.asarray(mask) / 4)


def test_refuses_an_unknown_aggregation():
    with pytest.raises(ValueError, match="aggregation"):
        weights(tokens(), "sequence")
