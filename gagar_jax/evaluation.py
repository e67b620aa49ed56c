"""Held-out evaluation: k attempts at each task of a split, and what they came to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gagar_jax.config import EvalConfig
from gagar_jax.files import write_atomic
from gagar_jax.grading.patch import count_lines
from gagar_jax.grading.structural import grade_quality
from gagar_jax.rollout.collector import Journal
from gagar_jax.run import Run
from gagar_jax.train.state import fingerprint
from gagar_jax.types import Grade, Group, UserError

EVALUATION = 1  # folded into the sampling key; training is 0
SPLIT_STRIDE = (
    1_000_000  # group numbers of a split start here times its place, so that no two splits share keys
)


def evaluate_policy(run: Run, params: Any, stage: str, *, version: int) -> dict[str, dict[str, float]]:
    """Evaluates a policy on every split of `eval.splits` and writes eval_<stage>.json.

    Attempts are journalled under trajectories/: an interrupted evaluation goes on where it was, and one that
    was finished with these parameters is only measured again.

    Args:
      run: the open run.
      params: the policy's parameters.
      stage: "sft" or "rl"; names the files. Both stages draw the same tasks and the same noise.
      version: train steps behind `params`.

    Returns:
      Of each split, the measures of `measure`. A split without tasks is left out, and logged.

    Raises:
      UserError: a split that no task could be in, or tasks in none of the splits.
    """
    config = run.config.eval
    known = [*EvalConfig().splits, *run.tasks]
    if unknown := [name for name in config.splits if name not in known]:
        raise UserError(f"eval.splits: no split {unknown[0]!r}; there are {', '.join(dict.fromkeys(known))}")
    chosen = {name: _choose(run, name) for name in config.splits}
    total = sum(len(tasks) for tasks in chosen.values()) * config.samples
    if not total:
        raise UserError(f"eval.splits: no task in {', '.join(config.splits)}")
    results, before, weights = {}, 0, fingerprint(params)
    for place, (name, tasks) in enumerate(chosen.items()):
        if not tasks:
            run.console.log(f"evaluation: no task in the split {name!r}")
            continue
        journal = Journal(run.dir / "trajectories" / f"eval_{stage}_{name}.jsonl", weights)
        collected = run.collector.collect(
            params, tasks, first_group=place * SPLIT_STRIDE, members=config.samples, version=version,
            stage=EVALUATION, journal=journal, progress=_progress(run, name, before, total),
        )  # fmt: skip
        before += len(tasks) * config.samples
        results[name] = measure(collected.groups, tiers=run.config.grading.tiers())
    write_atomic(run.dir / f"eval_{stage}.json", json.dumps(_finite(results), indent=1) + "\n")
    return results


def measure(groups: Sequence[Group], *, tiers: dict[str, float]) -> dict[str, float]:
    """Means over tasks and attempts; invalid attempts are left out of all but their own count.

    Returns:
      pass_at_1 (mean over tasks of the share that passed: the unbiased estimate from k attempts),
      pass_at_k (share of tasks with a pass), mixed_share (tasks with both outcomes), turns_mean and
      tokens_mean over valid attempts, passed_turns_mean, passed_tokens_mean, patch_lines_mean and
      tierN_share over passed ones, tasks, k, invalid. A mean of nothing is NaN.
    """
    valid = [[t for t in group.trajectories if t.valid] for group in groups]
    shares = np.array([np.mean([t.passed for t in members]) for members in valid if members])
    every = [t for members in valid for t in members]
    passed = [t for t in every if t.passed]
    grades = [grade for group in groups for grade in _grades(group, tiers)]
    measures = {
        "pass_at_1": _mean(shares),
        "pass_at_k": _mean(shares > 0),
        "mixed_share": _mean((shares > 0) & (shares < 1)),
        "turns_mean": _mean([len(t.turns) for t in every]),
        "tokens_mean": _mean([t.generated_tokens for t in every]),
        "passed_turns_mean": _mean([len(t.turns) for t in passed]),
        "passed_tokens_mean": _mean([t.generated_tokens for t in passed]),
        "patch_lines_mean": _mean([count_lines(t.patch) for t in passed]),
        "tasks": len(groups),
        "k": max(len(group.trajectories) for group in groups),
        "invalid": sum(len(group.trajectories) for group in groups) - len(every),
    }
    return measures | {f"tier{n}_share": _mean([grade.tier == n for grade in grades]) for n in (1, 2, 3)}


def _grades(group: Group, tiers: dict[str, float]) -> list[Grade]:
    found = grade_quality(group.trajectories, task=group.task, base_files=group.base_files, **tiers)
    return [grade for grade in found if grade is not None]


def _choose(run: Run, split: str) -> list[dict[str, Any]]:
    """At most `eval.max_tasks` of a split, the same for every run on the same tasks."""
    tasks = run.tasks.get(split, [])
    order = np.random.default_rng(run.config.tasks.seed).permutation(len(tasks))
    return [tasks[i] for i in sorted(order[: run.config.eval.max_tasks])]


def _progress(run: Run, name: str, before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: run.console.update(before + done, total=total, message=name)


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _finite(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    return {s: {k: v if math.isfinite(v) else None for k, v in row.items()} for s, row in results.items()}
