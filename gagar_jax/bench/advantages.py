"""`gagar bench advantages`: the group arithmetic against its peers, on this machine, in one run.

Contenders, timing, the parity table and the TPU compiler's answers live in the files beside this one; here
are the grids and the command line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gagar_jax.algo.advantage import GroupAdvantages
from gagar_jax.algo.loss import fan_out
from gagar_jax.bench import contenders, parity, tables, topologies
from gagar_jax.bench.contenders import Batch, Contender
from gagar_jax.bench.tables import COPY, OURS, STEP, Record
from gagar_jax.bench.timing import median_ms, take_turns

SIZES = (512, 4096, 65_536, 1_048_576, 4_194_304)
GROUP_SIZES = (4, 16, 64)
BROADCAST = tuple((rows, length) for rows in (512, 1024, 2048) for length in (512, 1024, 2048, 4096))
SLOW_ROWS = 100_000  # Python loops are not run on more rows than this


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; see `--help`."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found, absent = contenders.peers()
    fields = contenders.own() + found
    result: Record = {"machine": _machine(), "absent": absent}
    result |= {"sizes": [], "grid": [], "broadcast": [], "tpu": []}
    sections = [tables.heading(result)]
    if not options.only or "sizes" in options.only:
        for shaped in (False, True):
            result["sizes"] += [
                _by_size(fields, n, shaped=shaped, budget_s=options.budget) for n in options.sizes
            ]
        sections += [
            tables.size_table(result["sizes"], shaped=False),
            tables.size_table(result["sizes"], shaped=True),
        ]
    if not options.only or "grid" in options.only:
        result["grid"] = _grid(fields, budget_s=options.budget)
        sections.append(tables.grid_table(result["grid"]))
    if not options.only or "broadcast" in options.only:
        result["broadcast"] = [_broadcast(b, t, budget_s=options.budget / 4) for b, t in BROADCAST]
        sections.append(tables.broadcast_table(result["broadcast"]))
    if not options.only or "parity" in options.only:
        sections.append("Advantages of the same groups by every estimator:\n\n" + parity.parity_table())
    if options.tpu is not None or "tpu" in (options.only or ()):
        names = options.tpu or topologies.TOPOLOGIES
        result["tpu"] = [
            topologies.compile_for(t, rows=topologies.ROWS, group_size=16)._asdict() for t in names
        ]
        compiled = [topologies.Compiled(**r) for r in result["tpu"]]
        sections.append(topologies.topology_table(compiled, rows=topologies.ROWS))
    print("\n\n".join(sections))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        tables.plot(result, options.plot)
    if options.docs:
        tables.write_docs(options.docs, result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gagar bench advantages",
        description="Times group advantages for arbitrary ids against naive versions and other "
        "libraries. Peers are measured where installed (extra 'bench'); the output says which are not.",
        epilog="Examples:\n"
        "  gagar bench advantages --sizes 4096 65536\n"
        "  gagar bench advantages --json out.json --plot out.svg\n"
        "  gagar bench advantages --only parity\n"
        "  gagar bench advantages --only tpu --tpu v5e:2x2 v5p:8x8x8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="trajectories a batch"
    )
    parser.add_argument(
        "--budget", type=float, default=8.0, metavar="S", help="seconds a batch size (default 8)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=("sizes", "grid", "broadcast", "parity", "tpu"), help="sections to run"
    )
    parser.add_argument(
        "--tpu", nargs="*", metavar="TOPOLOGY",
        help="also compile for TPU topologies (needs libtpu, not a TPU); without names for "
        + ", ".join(topologies.TOPOLOGIES),
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot (.svg or .png)")
    parser.add_argument(
        "--docs", type=Path, metavar="DIR", help="rewrite DIR/advantages.md's tables and its plot"
    )
    return parser


def _machine() -> Record:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def _by_size(
    fields: list[Contender], rows: int, *, shaped: bool, budget_s: float, group_size: int = 16
) -> Record:
    """Milliseconds of every contender: shuffled ids, or groups side by side for those that need it."""
    shuffled = contenders.make_batch(rows, group_size, ragged=False, shuffled=True, shaped=shaped)
    side_by_side = contenders.make_batch(rows, group_size, ragged=False, shuffled=False, shaped=shaped)
    calls: dict[str, Callable[[], Any]] = {COPY: contenders.copying(shuffled, group_size)}
    for field in fields:
        if not field.slow or rows <= SLOW_ROWS:
            calls[field.name] = field.prepare(shuffled if field.any_ids else side_by_side, group_size)
    calls[STEP] = contenders.in_a_step(shuffled, group_size)
    _check(shuffled, calls)
    seconds = take_turns(calls, budget_s=budget_s)
    seconds[STEP] = [s / contenders.IN_STEP for s in seconds[STEP]]
    return {
        "rows": rows,
        "shaped": shaped,
        "median_ms": {name: median_ms(s) for name, s in seconds.items()},
        "fastest_ms": {name: min(s) * 1e3 for name, s in seconds.items()},
        "redistributes": [f.name for f in fields if f.redistributes] + [STEP],
        "any_ids": [f.name for f in fields if f.any_ids] + [STEP],
    }


def _check(batch: Batch, calls: dict[str, Callable[[], Any]]) -> None:
    """A contender that computes something else is not a contender."""
    ours, naive = calls[OURS]().advantage_N, calls["JAX, six segment sums"]()[0]
    np.testing.assert_allclose(ours, naive, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours, calls["NumPy bincount"](), rtol=0, atol=1e-5)


def _grid(fields: list[Contender], *, budget_s: float, rows: int = 65_536) -> list[Record]:
    """Milliseconds over group sizes, equal and ragged, shuffled ids: the contenders that take any ids."""
    fast = [f for f in fields if f.any_ids and not f.slow]
    records = []
    for size in GROUP_SIZES:
        for ragged in (False, True):
            batch = contenders.make_batch(rows, size, ragged=ragged, shuffled=True, shaped=False)
            seconds = take_turns({f.name: f.prepare(batch, size) for f in fast}, budget_s=budget_s / 4)
            times = {name: median_ms(s) for name, s in seconds.items()}
            records.append({"rows": rows, "group_size": size, "ragged": ragged, "median_ms": times})
    return records


def _broadcast(rows: int, length: int, *, budget_s: float) -> Record:
    """Advantages to tokens: rows packed with four trajectories and padding, against NumPy and copying."""
    trajectories = rows * 4
    rng = np.random.default_rng(0)
    advantage_N, trained_N = (
        rng.standard_normal(trajectories).astype(np.float32),
        rng.random(trajectories) < 0.9,
    )
    edges = np.sort(rng.integers(0, length, (rows, 3)), axis=1)
    piece_BT = (np.arange(length)[None, :, None] >= edges[:, None, :]).sum(-1)
    id_BT = (np.arange(rows)[:, None] * 4 + piece_BT).astype(np.int32)
    id_BT[:, -length // 16 :] = trajectories
    mask_BT = rng.random((rows, length)) < 0.6
    nothing = jnp.zeros(1)
    advantages = GroupAdvantages(jnp.asarray(advantage_N), jnp.asarray(trained_N), *(nothing,) * 6)
    device = jax.device_put((id_BT, mask_BT))
    ours = jax.jit(fan_out)
    copy = jax.jit(lambda ids, mask: (ids.astype(jnp.float32), mask))

    def in_numpy() -> tuple[np.ndarray, np.ndarray]:
        mask = mask_BT & np.append(trained_N, False)[id_BT]
        return np.where(mask, np.append(advantage_N, np.float32(0))[id_BT], np.float32(0)), mask

    for a, b in zip(ours(advantages, *device), in_numpy(), strict=True):
        np.testing.assert_array_equal(a, b)
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: jax.block_until_ready(ours(advantages, *device)),
        "NumPy indexing": in_numpy,
        COPY: lambda: jax.block_until_ready(copy(*device)),
    }
    seconds = take_turns(calls, budget_s=budget_s, most=30)
    return {"B": rows, "T": length, "median_ms": {name: median_ms(s) for name, s in seconds.items()}}
