"""The same step over eight devices, by rows and by weights, gives what one device gives."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from gagar_jax.model import sharding
from tests.train.batches import Verdicts, assert_close, by_name, gradient, pack_for, run, settings, state_for
from tests.trajectories import make_groups

GROUPS = make_groups("pfpfpf", "ffpfpp", "pffffi", "ppp", longest=45, seed=4)


@pytest.mark.parametrize(("data", "model"), [(8, 1), (4, 2)])
def test_devices_change_nothing(data: int, model: int) -> None:
    config = settings()
    batch = pack_for(config, GROUPS)
    one, one_metrics, one_credit = run(config, batch, Verdicts())
    verdicts = Verdicts()
    mesh = sharding.make_mesh(data=data, model=model)
    many, many_metrics, many_credit = run(config, batch, verdicts, mesh)
    assert len(verdicts.asked) == 1, "one question a step, whatever the number of devices"
    assert_close(gradient(many), gradient(one), tolerance=1e-5)
    assert_close(by_name(many.params), by_name(one.params), tolerance=1e-3)  # Adam's first step is a sign
    assert many_metrics == pytest.approx(one_metrics, rel=1e-5, abs=1e-6)
    for a, b in zip(many_credit, one_credit, strict=True):
        assert a.tolist() == pytest.approx(b.tolist(), abs=1e-6)


def test_weights_and_moments_lie_as_the_table_says() -> None:
    state = state_for(settings(), sharding.make_mesh(data=4, model=2))
    for tree in (state.params, state.opt_state[1].mu, state.opt_state[1].nu):
        up = tree["blocks"]["up"].get_value()
        assert up.sharding.spec == PartitionSpec(None, None, "model")
        assert up.addressable_shards[0].data.shape == (2, 32, 24)
    assert state.step.sharding.is_fully_replicated


def test_a_microbatch_that_does_not_divide_over_the_mesh_is_refused() -> None:
    config = settings(microbatch_rows=4)
    with pytest.raises(ValueError, match=r"microbatches of 4 over 8 devices \(mesh.data\)"):
        run(config, pack_for(config, GROUPS), Verdicts(), sharding.make_mesh(data=8))


def test_eight_devices_are_there() -> None:
    assert jax.device_count() == 8
