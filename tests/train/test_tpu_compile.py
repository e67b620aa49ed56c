"""The train step, callback included, compiles ahead of time for a TPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tpu import needs_libtpu, run_with_libtpu

PROGRAM = """
import json
import jax, numpy as np
from jax.experimental import topologies
from gagar_jax.config import parse
from gagar_jax.data.packing import pack
from gagar_jax.model import sharding, transformer
from gagar_jax.train.state import abstract_state, make_optimizer
from gagar_jax.train.step import make_train_step
from tests.train.batches import Verdicts
from tests.trajectories import make_groups

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
mesh = sharding.make_mesh(data=2, model=2, devices=topology.devices)
config = parse({
    "model": {"width": 256, "layers": 2, "head_dim": 64, "mlp_width": 512, "compute_dtype": "bfloat16"},
    "train": {"row_length": 256, "row_bucket": 8, "microbatch_rows": 4},
})
optimizer = make_optimizer(config.train.optimizer, config.train.updates)
step = make_train_step(config, transformer.abstract(config.model)[0], mesh, Verdicts())
batch = pack(make_groups("pf", "pffp"), num_trajectories=8, num_groups=2, row_length=256, row_bucket=8)
compiled = step.lower(abstract_state(config.model, optimizer, mesh), batch).compile()
memory = compiled.memory_analysis()
print(json.dumps({
    "devices": [d.device_kind for d in topology.devices],
    "arguments": memory.argument_size_in_bytes, "aliased": memory.alias_size_in_bytes,
    "hlo": compiled.as_text(),
}))
"""


@pytest.mark.tpu_compile
@needs_libtpu
def test_the_step_compiles_for_a_tpu_v5e_2x2(repository: Path) -> None:
    found = run_with_libtpu(PROGRAM, repository)
    assert found["devices"] == ["TPU v5 lite"] * 4
    assert found["aliased"] > 0.9 * found["arguments"] / 2, "the state is donated"
    assert "all-reduce" in found["hlo"]
    assert "send" in found["hlo"] or "host" in found["hlo"].lower(), "the callback is in the program"
