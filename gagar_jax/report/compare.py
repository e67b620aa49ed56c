"""Runs beside each other: seeds are averaged, settings that differ make the arms.

Everything is read from the run folders (config.yaml, eval_sft.json, eval_rl.json).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console

from gagar_jax import config as settings
from gagar_jax.console import number
from gagar_jax.report.summary import MEASURES, Evaluation, read_evaluation
from gagar_jax.types import UserError

# What two runs of one arm may differ in.
_NOT_AN_ARM = {
    *("name", "run_dir", "seed", "tasks.dir", "tasks.workers", "env.workers", "sft.warm_start_from"),
    *("sft.log_every", "train.checkpoint_every", "train.keep_checkpoints"),
}

Runs = dict[int, tuple[Evaluation, Evaluation]]
"""Of each seed: the evaluations of the warm start and after RL."""


def compare(run_dirs: Sequence[Path]) -> None:
    """Prints, for each split, every measure of each arm: warm start, after RL, and the difference.

    A difference is the mean over seeds with its 95 % interval, t(n − 1) · s / √n, s being the standard
    deviation of the seeds' differences. With two arms, a last column has the second less the first after
    RL, paired by seed.

    Raises:
      UserError: a folder is no finished run, or two runs have the same settings and seed.
    """
    arms = _arms(run_dirs)
    console = Console()
    for label, runs in arms.items():
        seeds = ", ".join(str(seed) for seed in sorted(runs))
        console.print(f"{label}: {len(runs)} run{'s' * (len(runs) > 1)} (seed {seeds})", highlight=False)
    for split in dict.fromkeys(s for runs in arms.values() for _, after in runs.values() for s in after):
        console.print(_table(split, arms))


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean; None for fewer than two values.

    >>> round(interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    from scipy.stats import t

    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(t.ppf(0.975, len(values) - 1)) * error


def _arms(run_dirs: Sequence[Path]) -> dict[str, Runs]:
    """Runs by what sets them apart, in words."""
    leaves, evaluations = {}, {}
    for folder in run_dirs:
        if not (folder / "config.yaml").exists():
            raise UserError(f"{folder} is not the folder of a run: it has no config.yaml")
        before, after = read_evaluation(folder, "sft"), read_evaluation(folder, "rl")
        if before is None or after is None:
            raise UserError(f"{folder} has not finished: eval_sft.json or eval_rl.json is missing")
        leaves[folder] = settings.leaves(settings.load(folder / "config.yaml"))
        evaluations[folder] = (before, after)
    apart = [
        key
        for key in settings.leaves(settings.Config())
        if key not in _NOT_AN_ARM and len({str(values[key]) for values in leaves.values()}) > 1
    ]
    arms: dict[str, Runs] = {}
    for folder, values in leaves.items():
        label = ", ".join(f"{key.split('.')[-1]} {values[key]}" for key in apart) or values["name"]
        seed = values["seed"]
        if seed in arms.setdefault(label, {}):
            raise UserError(f"{folder} has the settings and the seed ({seed}) of another run given")
        arms[label][seed] = evaluations[folder]
    return arms


def _table(split: str, arms: dict[str, Runs]) -> rich.table.Table:
    table = rich.table.Table(title=split, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for label in arms:
        for column in (f"{label}\nwarm start", "after RL", "difference"):
            table.add_column(column, justify="right", vertical="bottom")
    paired = list(arms.values()) if len(arms) == 2 else None
    if paired:
        table.add_column("{1}\nless {0}".format(*arms), justify="right", vertical="bottom")
    for key, label, share in MEASURES:
        cells = [_cells(key, split, runs, share) for runs in arms.values()]
        row = [cell for of_arm in cells for cell in of_arm]
        if paired:
            first, second = paired
            both = sorted(first.keys() & second.keys())
            pairs = [
                (first[s][1].get(split, {}).get(key), second[s][1].get(split, {}).get(key)) for s in both
            ]
            row.append(_difference(pairs, share))
        if any(cell != "–" for cell in row):
            table.add_row(label, *row)
    return table


def _cells(key: str, split: str, runs: Runs, share: bool) -> tuple[str, str, str]:
    pairs = [
        (before.get(split, {}).get(key), after.get(split, {}).get(key)) for before, after in runs.values()
    ]

    def mean(values: list[float]) -> str:
        if not values:
            return "–"
        return f"{statistics.fmean(values):.3f}" if share else number(statistics.fmean(values))

    before = [a for a, _ in pairs if a is not None]
    after = [b for _, b in pairs if b is not None]
    return mean(before), mean(after), _difference(pairs, share)


def _difference(pairs: Sequence[tuple[Any, Any]], share: bool) -> str:
    """Mean of second less first where both are there, ± the interval."""
    values = [b - a for a, b in pairs if a is not None and b is not None]
    if not values:
        return "–"
    digits = 3 if share else 2
    half = interval(values)
    text = f"{statistics.fmean(values):+.{digits}f}"
    return text if half is None else f"{text} ± {half:.{digits}f}"
