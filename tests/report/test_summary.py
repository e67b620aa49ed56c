"""summary.md: the numbers of the run folder, no others, readable at any stage of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gagar_jax.metrics import MetricsWriter
from gagar_jax.report.summary import evaluation_tables, write_summary


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with MetricsWriter(tmp_path) as writer:
        for step in range(10):
            writer.write(
                step,
                "rl",
                {
                    "pass_rate": 0.3 + step / 50,
                    "entropy": float("nan"),
                    "patch_lines_mean": 6 - step / 5,
                    "kept_groups": 6,
                    "dropped_groups": 2,
                    "ungraded_late": step == 3,
                    "ungraded_void": 0,
                    "invalid_judging": 1,
                    "invalid_trajectories": 1,
                    "rollout_s": 2.0,
                    "train_s": 1.0,
                    "grade_wait_s": 0.05,
                },
            )
    return tmp_path


def _evaluate(run_dir: Path, stage: str, pass_at_1: float | None) -> None:
    split = {
        "pass_at_1": pass_at_1,
        "avg_at_k": pass_at_1,
        "k": 4,
        "tasks": 120,
        "patch_lines_mean": 5.0,
        "invalid": 3,
    }
    (run_dir / f"eval_{stage}.json").write_text(json.dumps({"unseen_mutant": split}))


def test_a_whole_run(run_dir: Path) -> None:
    _evaluate(run_dir, "sft", 0.375)
    _evaluate(run_dir, "rl", 0.5)
    text = write_summary(run_dir).read_text()
    assert "### unseen_mutant" in text
    assert "| pass@1 (avg@k) | 0.375 | 0.500 | +0.125 |" in text
    assert "3 attempts were invalid" in text
    assert "| pass rate | 0.34 | 0.44 |" in text  # means of the first five and the last five steps
    assert "Groups: 60 kept, 20 dropped" in text
    assert "by cause: late 1." in text
    assert "Invalid trajectories: judging 10." in text
    assert "In RL: 0:20 sampling and tools, 0:10 training, of which 0.5 s waiting" in text
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_before_rl_there_is_no_difference(run_dir: Path) -> None:
    _evaluate(run_dir, "sft", 0.375)
    assert "| pass@1 (avg@k) | 0.375 | – |  |" in write_summary(run_dir).read_text()
    (table,) = evaluation_tables(run_dir)
    assert table.row_count == 2


def test_a_mean_over_nothing_is_a_dash(run_dir: Path) -> None:
    _evaluate(run_dir, "sft", None)
    _evaluate(run_dir, "rl", 0.5)
    assert "| pass@1 (avg@k) | – | 0.500 |  |" in write_summary(run_dir).read_text()


def test_an_empty_run_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    text = write_summary(tmp_path).read_text()
    assert "no evaluation yet" in text
    assert not (tmp_path / "curves.png").exists()
    assert evaluation_tables(tmp_path) == []


def test_writing_twice_gives_the_same(run_dir: Path) -> None:
    first = write_summary(run_dir).read_text()
    assert write_summary(run_dir).read_text() == first
