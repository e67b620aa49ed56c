"""The rollout loop, its callback included, compiles ahead of time for a TPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tpu import needs_libtpu, run_with_libtpu

PROGRAM = """
import json
import jax, numpy as np
from jax.experimental import topologies
from gagar_jax.config import ModelConfig, RolloutConfig
from gagar_jax.model import sharding, transformer
from gagar_jax.rollout.sampler import Reply, reply_shapes, rollout_program

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
mesh = sharding.make_mesh(data=2, model=2, devices=list(topology.devices))
rollout = RolloutConfig(lanes=4, lane_slots=4)
graph, params = transformer.abstract(ModelConfig(kv_heads=2, layers=2))
shardings = sharding.param_shardings(params, mesh)
params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
key = jax.eval_shape(lambda: jax.random.key(0))
key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding.named(mesh))

def exchange(*report):
    return Reply(*(np.zeros(s.shape, np.int32) for s in reply_shapes(rollout)))

compiled = jax.jit(rollout_program(graph, rollout, 4, exchange, mesh)).lower(params, key).compile()
print(json.dumps({"hlo": compiled.as_text(), "temporary": compiled.memory_analysis().temp_size_in_bytes}))
"""


@pytest.mark.tpu_compile
@needs_libtpu
def test_the_rollout_compiles_for_a_tpu_v5e_2x2(repository: Path) -> None:
    found = run_with_libtpu(PROGRAM, repository)
    assert "while" in found["hlo"], "the loop is in the program"
    assert "send" in found["hlo"] or "host" in found["hlo"].lower(), "the callback is in the program"
    assert 0 < found["temporary"] < 1 << 30
