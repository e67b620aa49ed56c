"""Contenders agree, the command writes what it says it writes, and a TPU compiler takes the kernel."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from gagar_jax.bench import BENCHES, contenders
from tests.tpu import needs_libtpu, run_with_libtpu


@pytest.mark.parametrize("shaped", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_contenders_compute_the_same(shaped, ragged):
    batch = contenders.make_batch(3000, 16, ragged=ragged, shuffled=True, shaped=shaped)
    fields = {f.name: f.prepare(batch, 16) for f in contenders.own() if f.redistributes}
    ours = np.asarray(fields.pop("gagar_jax")().advantage_N)
    assert np.abs(ours).max() > 0.1
    for name, call in fields.items():
        result = call()
        result = result[0] if isinstance(result, tuple) else result
        np.testing.assert_allclose(result, ours, rtol=0, atol=1e-5, err_msg=name)


def test_absent_peers_are_named():
    found, absent = contenders.peers()
    names = " ".join(f.name for f in found)
    for peer in ("verl", "TRL", "tunix"):
        assert (peer in names) != (peer in absent)


def test_command_writes_json_plot_and_docs(tmp_path, repository, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(repository / "docs" / "advantages.md", docs)
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    arguments = ["--sizes", "512", "--budget", "0.1", "--only", "sizes", "parity"]
    arguments += ["--json", str(out), "--plot", str(plot), "--docs", str(docs)]
    assert BENCHES["advantages"].run(arguments) == 0
    record = json.loads(out.read_text())["sizes"][0]
    assert record["rows"] == 512
    assert all(ms > 0 for ms in record["median_ms"].values())
    assert plot.stat().st_size > 1000
    printed, page = capsys.readouterr().out, (docs / "advantages.md").read_text()
    assert "GAGAR `sum_preserving` | 0.71 0.29 -0.50 -0.50" in printed
    row = next(line for line in printed.splitlines() if line.startswith("| JAX, six segment sums"))
    assert row in page
    assert (docs / "img" / "advantages.svg").exists()


@pytest.mark.tpu_compile
@needs_libtpu
def test_compiles_for_a_tpu_topology(repository):
    program = """
import json
from gagar_jax.bench.topologies import compile_for
print(json.dumps(compile_for("v5e:2x2", rows=4096, group_size=16)._asdict()))
"""
    result = run_with_libtpu(program, repository)
    assert result["devices"] == 4
    assert result["bytes_accessed"] > 0
    assert 0 < result["wire_bytes"] <= 20 * 4 * 256  # some per-group columns of both branches; no rows
