"""Groups that span devices and processes: equal to one device, and only groups travel."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gagar_jax.algo.advantage import group_advantages
from tests.algo.batches import Batch, random_batch

ROWS, GROUPS = 4096, 300


def place(batch: Batch, mesh: jax.sharding.Mesh, spec: P) -> list[jax.Array]:
    rows = [jax.device_put(x, NamedSharding(mesh, spec)) for x in batch[:-1]]
    return [*rows, jax.device_put(batch.graded, NamedSharding(mesh, P()))]


@pytest.mark.parametrize("mode", ["none", "sum_preserving"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("shape", "spec"), [((8,), P("data")), ((4, 2), P("data")), ((4, 2), P(("data", "model"))), ((8,), P())]
)
def test_equal_to_one_device(mode, axis_type, shape, spec):
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))
    function = jax.jit(functools.partial(group_advantages, num_groups=GROUPS, mode=mode))
    for binary in (True, False):
        batch = random_batch(np.random.default_rng(0), rows=ROWS, groups=GROUPS, binary=binary)
        one = function(*batch)
        many = function(*place(batch, mesh, spec))
        for name, a, b in zip(one._fields, one, many, strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6, atol=1e-6, err_msg=name
            )
        assert many.advantage_N.sharding.is_equivalent_to(NamedSharding(mesh, spec), 1)


COLLECTIVE = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def elements_on_the_wire(rows: int, groups: int) -> list[int]:
    """Elements of every collective's every operand, from the compiled program."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    batch = random_batch(np.random.default_rng(0), rows=rows, groups=groups, binary=False)
    function = jax.jit(functools.partial(group_advantages, num_groups=groups))
    text = function.lower(*place(batch, mesh, P("data"))).compile().as_text()
    shapes = [shape for line in COLLECTIVE.findall(text) for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [int(np.prod([int(d) for d in shape.split(",") if d] or [1])) for shape in shapes]


def test_collectives_are_of_groups_and_not_of_rows():
    small, large = elements_on_the_wire(131_072, 3_000), elements_on_the_wire(524_288, 3_000)
    assert small
    assert max(small) == 3_000
    assert large == small  # four times the rows: not a byte more on the wire


def test_few_large_groups_travel_as_bounded_partial_sums():
    assert max(elements_on_the_wire(1_048_576, 8)) <= 4096


def test_two_processes(user_environment):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    environment = user_environment | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.getcwd(),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.algo.gloo_worker", address, "2", str(i)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=120)
            assert worker.returncode == 0, output
            found = re.search(r"largest difference (\S+)", output)
            assert found, output
            assert float(found[1]) <= 1e-6
    finally:
        for worker in workers:
            worker.kill()
