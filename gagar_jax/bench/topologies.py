"""What a TPU compiler makes of `group_advantages`, without a TPU: cost, bytes and collectives by topology."""

from __future__ import annotations

import functools
import logging
import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gagar_jax.algo.advantage import group_advantages

logger = logging.getLogger(__name__)

ROWS = 262_144
TOPOLOGIES = (
    "v5e:2x2",
    "v5e:16x16",
    "v5p:2x2x1",
    "v5p:8x8x8",
    "v6e:2x2",
    "v6e:16x16",
    "tpu7x:2x2x1",
    "tpu7x:4x8x8",
)
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_BYTES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2}


class TopologyError(RuntimeError):
    """No TPU compiler for a topology: not installed, held by another process, or an unknown name."""


class Compiled(NamedTuple):
    """One topology's answer. Per device, except `collectives` and `wire_bytes` (operands of one program)."""

    topology: str
    devices: int
    compile_s: float
    flops: float
    bytes_accessed: float
    temporary_bytes: int
    collectives: int | None  # None: jax could not read the compiled program back
    wire_bytes: int | None


def compile_for(topology: str, *, rows: int, group_size: int) -> Compiled:
    """Compiles ahead of time with rows sharded over every device of a topology.

    Raises:
      TopologyError: no TPU compiler is installed, another process holds it, or the name is unknown.
    """
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # jax raises different types by cause; the message is what helps
        raise TopologyError(f"topology {topology}: {error}") from error
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    by_row, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    groups = rows // group_size
    rows_of = [
        jax.ShapeDtypeStruct((rows,), dtype, sharding=by_row)
        for dtype in (jnp.float32, bool, jnp.float32, jnp.int32, bool, bool)
    ]
    start = time.perf_counter()
    program = (
        jax.jit(functools.partial(group_advantages, num_groups=groups))
        .lower(*rows_of, jax.ShapeDtypeStruct((groups,), bool, sharding=everywhere))
        .compile()
    )
    seconds = time.perf_counter() - start
    cost, memory = program.cost_analysis() or {}, program.memory_analysis()
    try:
        found = _COLLECTIVE.findall(program.as_text() or "")
    except jax.errors.JaxRuntimeError as error:  # seen where work is offloaded to SparseCores (libtpu 0.0.52)
        logger.warning(
            "%s: compiled, but its program cannot be read back: %s", topology, str(error).splitlines()[0]
        )
        found = None
    return Compiled(
        topology,
        len(devices),
        seconds,
        float(cost.get("flops", float("nan"))),
        float(cost.get("bytes accessed", float("nan"))),
        memory.temp_size_in_bytes if memory else -1,
        None if found is None else len(found),
        None if found is None else sum(_operand_bytes(shapes) for shapes, _ in found),
    )


def _operand_bytes(shapes: str) -> int:
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        total += _BYTES.get(dtype, 4) * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
    return total


def topology_table(results: list[Compiled], *, rows: int) -> str:
    """A Markdown table."""
    lines = [
        "| topology | devices | compile s | flops a device | bytes accessed a device | temporary bytes "
        "| collectives | bytes on the wire | the same, per row |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r.collectives is None or r.wire_bytes is None:
            wire = "not readable | – | –"
        else:
            wire = f"{r.collectives} | {r.wire_bytes:,} | {r.wire_bytes / rows:.2f}"
        lines.append(
            f"| {r.topology} | {r.devices} | {r.compile_s:.1f} | {r.flops:,.0f} | {r.bytes_accessed:,.0f} "
            f"| {r.temporary_bytes:,} | {wire} |"
        )
    return "\n".join(lines)
