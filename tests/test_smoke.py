"""The short real training run: `gagar train configs/smoke.yaml` as a person would, and what it leaves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gagar_jax.config import load
from gagar_jax.metrics import read_metrics


def _train(run_dir: Path, environment: dict[str, str], repository: Path) -> subprocess.CompletedProcess[str]:
    gagar = str(Path(sys.executable).with_name("gagar"))
    return subprocess.run(
        [gagar, "train", "configs/smoke.yaml", "--run-dir", str(run_dir)],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _documented(repository: Path, *, starred: bool) -> set[str]:
    """Names in the metrics table of docs/running.md; `starred` gives the prefixes of its families instead."""
    section = (
        (repository / "docs" / "running.md").read_text().split("## Metrics")[1].split("### How to read")[0]
    )
    table = section.split("| cause |")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`(\w+\*?)`", cell)}
    return {n.removesuffix("*") for n in names if n.endswith("*") == starred}


@pytest.mark.slow
@pytest.mark.confined
def test_the_smoke_run(tmp_path: Path, user_environment: dict[str, str], repository: Path) -> None:
    run_dir = tmp_path / "smoke"
    done = _train(run_dir, user_environment, repository)
    assert done.returncode == 0, done.stderr[-4000:]

    steps = read_metrics(run_dir, "rl")
    assert [record["step"] for record in steps] == list(range(load(run_dir / "config.yaml").train.steps))
    for record in steps:
        names = set(record) - {"phase", "time"}
        assert _documented(repository, starred=False) <= names
        families = tuple(_documented(repository, starred=True))
        undocumented = {n for n in names if not n.startswith(families)} - _documented(
            repository, starred=False
        )
        assert undocumented == set(), "describe these in docs/running.md"
        assert record["logprob_gap_max"] <= 1e-4

    assert read_metrics(run_dir, "sft")
    assert "after RL" in (run_dir / "summary.md").read_text()
    for stage in ("sft", "rl"):
        for split in json.loads((run_dir / f"eval_{stage}.json").read_text()).values():
            assert 0 <= split["pass_at_1"] <= 1
    rows = [
        json.loads(line)
        for file in (run_dir / "trajectories").glob("step_?????.jsonl")
        for line in file.read_text().splitlines()
    ]
    rollout = load(run_dir / "config.yaml").rollout
    assert len(rows) == len(steps) * rollout.groups * rollout.group_size
    assert all(len(row["tokens"]) == len(row["loss_mask"]) == len(row["logprobs"]) for row in rows)

    # Run again: everything is there, nothing is done twice.
    before = (run_dir / "metrics.jsonl").read_text()
    again = _train(run_dir, user_environment, repository)
    assert again.returncode == 0, again.stderr[-4000:]
    assert (run_dir / "metrics.jsonl").read_text() == before
