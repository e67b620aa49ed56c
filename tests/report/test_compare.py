"""gagar compare: seeds averaged with their interval, arms told apart by their settings, refusals by name."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from gagar_jax import config as settings
from gagar_jax.cli import main
from gagar_jax.report.compare import interval


def finished_run(folder: Path, *, seed: int, before: float, after: float | None, **train: Any) -> Path:
    folder.mkdir()
    config = settings.parse({"name": "toy", "seed": seed, "run_dir": str(folder), "train": train})
    (folder / "config.yaml").write_text(settings.dump(config))
    for stage, value in (("sft", before), ("rl", after)):
        split = {"pass_at_1": value, "tasks": 4, "k": 2, "patch_lines_mean": 2.0}
        (folder / f"eval_{stage}.json").write_text(json.dumps({"train": split}))
    return folder


def test_interval_is_the_student_t_one() -> None:
    values = [0.1, 0.14, 0.21, 0.17]
    low, high = scipy.stats.t.interval(
        0.95, len(values) - 1, loc=statistics.fmean(values), scale=scipy.stats.sem(values)
    )
    assert interval(values) == pytest.approx((high - low) / 2)
    assert interval(values[:1]) is None


def test_seeds_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        finished_run(tmp_path / str(seed), seed=seed, before=0.2, after=0.3 + seed / 10) for seed in range(3)
    ]
    assert main(["compare", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    half = interval([0.1, 0.2, 0.3])
    assert half is not None
    assert f"0.200 0.400 +0.200 ± {half:.3f}" in " ".join(printed.split())
    assert "3 runs (seed 0, 1, 2)" in printed


def test_two_arms_are_paired_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    runs = []
    for seed, gain in enumerate((0.05, 0.15)):
        runs.append(finished_run(tmp_path / f"n{seed}", seed=seed, before=0.2, after=0.3, mode="none"))
        runs.append(
            finished_run(tmp_path / f"s{seed}", seed=seed, before=0.2, after=0.3 + gain, mode="downweight")
        )
    assert main(["compare", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    assert "mode none: 2 runs" in printed
    assert "mode downweight: 2 runs" in printed
    assert f"+0.100 ± {interval([0.05, 0.15]):.3f}" in printed


def test_a_measure_that_is_missing_is_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(finished_run(tmp_path / "a", seed=0, before=0.2, after=None))]) == 0
    assert "0.200 – –" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "config.yaml").unlink(), "is not the folder of a run"),
        (lambda folder: (folder / "eval_rl.json").unlink(), "has not finished"),
        (lambda folder: None, "the seed (0) of another run"),
    ],
)
def test_unfit_folders_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: Any, words: str
) -> None:
    good = finished_run(tmp_path / "good", seed=0, before=0.2, after=0.3)
    bad = finished_run(tmp_path / "bad", seed=0, before=0.2, after=0.3)
    break_it(bad)
    assert main(["compare", str(good), str(bad)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert str(bad) in said
