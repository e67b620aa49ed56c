"""summary.md and curves.png of a run: what changed, what it cost, where to look next.

Everything is read from the run folder (metrics.jsonl, eval_sft.json, eval_rl.json), so a summary can be
written at any time and again; nothing is computed that a reader could not find there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table

from gagar_jax.console import clock, number
from gagar_jax.files import replacing, write_atomic
from gagar_jax.metrics import read_metrics

# Key of an evaluation, what to call it, and whether it is a share (shown with three decimals).
MEASURES = (
    ("pass_at_1", "pass@1 (avg@k)", True),
    ("pass_at_k", "pass@k", True),
    ("mixed_share", "tasks with both outcomes", True),
    ("turns_mean", "turns", False),
    ("tokens_mean", "tokens", False),
    ("passed_turns_mean", "turns (passed)", False),
    ("passed_tokens_mean", "tokens (passed)", False),
    ("patch_lines_mean", "patch lines (passed)", False),
    ("tier1_share", "tier 1 share (passed)", True),
    ("tier2_share", "tier 2 share (passed)", True),
    ("tier3_share", "tier 3 share (passed)", True),
)
# The curves of the RL phase, in reading order.
CURVES = (
    ("pass_rate", "pass rate"),
    ("tier1_share", "tier 1 share of passed"),
    ("patch_lines_mean", "patch lines"),
    ("tokens_mean", "tokens a trajectory"),
    ("entropy", "policy entropy"),
    ("grad_norm", "gradient norm"),
)
SMOOTHING = 5

Evaluation = dict[str, dict[str, float | None]]
"""Of each split: the keys of `MEASURES`, and k, tasks, invalid. A mean over nothing is null."""


def read_evaluation(run_dir: Path, stage: str) -> Evaluation | None:
    """eval_STAGE.json of a run folder (stage "sft" or "rl"), or None if it has not been evaluated yet."""
    path = run_dir / f"eval_{stage}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write_summary(run_dir: Path) -> Path:
    """Writes summary.md and, if there was any RL step, curves.png.

    Returns:
      The path of summary.md.
    """
    steps = read_metrics(run_dir, "rl")
    evaluations = (read_evaluation(run_dir, "sft"), read_evaluation(run_dir, "rl"))
    parts = [
        f"# {run_dir.name}",
        *_results(*evaluations),
        *_training(steps),
        *_time(steps, read_metrics(run_dir)),
    ]
    if steps:
        plot_curves(steps, run_dir / "curves.png")
        parts += ["## Curves", "![training curves](curves.png)"]
    parts += _next(run_dir)
    path = run_dir / "summary.md"
    write_atomic(path, "\n\n".join(parts) + "\n")
    return path


def evaluation_tables(run_dir: Path) -> list[rich.table.Table]:
    """The results as tables for a terminal, one a split; none before the first evaluation."""
    before, after = read_evaluation(run_dir, "sft"), read_evaluation(run_dir, "rl")
    tables = []
    for split in after or before or {}:
        table = rich.table.Table(title=split, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("", "warm start", "after RL", "difference"):
            table.add_column(column, justify="left" if not column else "right")
        for row in _rows(before, after, split):
            table.add_row(*row)
        tables.append(table)
    return tables


def plot_curves(steps: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws `CURVES` against the step: every value faint, a running mean of `SMOOTHING` steps strong."""
    from matplotlib.figure import Figure  # not pyplot: no display and no global state is wanted

    figure = Figure(figsize=(11, 6), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(2, 3).flat, CURVES, strict=True):
        points = [(step["step"], step[name]) for step in steps if step.get(name) is not None]
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
        if not points:
            axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes)
            continue
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color="tab:blue", alpha=0.25, marker=".", markersize=3)
        axes.plot(
            xs, [_mean(ys[max(0, i + 1 - SMOOTHING) : i + 1]) for i in range(len(ys))], color="tab:blue"
        )
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rows(before: Evaluation | None, after: Evaluation | None, split: str) -> list[list[str]]:
    """Label, warm start, after RL, difference: one row a measure that either evaluation has."""
    old, new = (before or {}).get(split, {}), (after or {}).get(split, {})
    rows = []
    for key, label, share in MEASURES:
        if key not in old and key not in new:
            continue
        a, b = old.get(key), new.get(key)
        form = (lambda x: f"{x:.3f}") if share else number
        difference = "" if a is None or b is None else f"{b - a:+.3f}" if share else f"{b - a:+.2f}"
        rows.append([label, *("–" if x is None else form(x) for x in (a, b)), difference])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _results(before: Evaluation | None, after: Evaluation | None) -> list[str]:
    splits = list(after or before or {})
    if not splits:
        return ["There is no evaluation yet."]
    parts = ["## Warm start against after RL"]
    for split in splits:
        facts = (after or {}).get(split) or (before or {})[split]
        counts = f"{facts.get('tasks', '?')} tasks, {facts.get('k', '?')} attempts each"
        invalid = facts.get("invalid") or 0
        if invalid:
            counts += f"; {invalid} attempts were invalid (the infrastructure failed) and are in no figure"
        parts += [f"### {split}", f"{counts[0].upper()}{counts[1:]}."]
        parts.append(_table(["", "warm start", "after RL", "difference"], _rows(before, after, split)))
    return parts


def _training(steps: Sequence[dict[str, Any]]) -> list[str]:
    """First and last steps beside each other, and what became of the groups."""
    if not steps:
        return []
    some = max(1, min(SMOOTHING, len(steps) // 2))
    rows = []
    for name, label in CURVES:
        early = [s[name] for s in steps[:some] if s.get(name) is not None]
        late = [s[name] for s in steps[-some:] if s.get(name) is not None]
        if early and late:
            rows.append([label, number(_mean(early)), number(_mean(late))])
    parts = [f"## Training: {len(steps)} steps", _table(["", f"first {some}", f"last {some}"], rows)]
    kept, dropped = _total(steps, "kept_groups"), _total(steps, "dropped_groups")
    text = f"Groups: {kept:,} kept, {dropped:,} dropped (all passed, all failed, too few valid)."
    for prefix, meaning in (
        ("ungraded_", "Groups without a verdict, by cause"),
        ("invalid_", "Invalid trajectories"),
    ):
        names = sorted({k for s in steps for k in s if k.startswith(prefix)})
        names = [name for name in names if name != "invalid_trajectories"]  # the sum of the others
        counts = {name.removeprefix(prefix): _total(steps, name) for name in names}
        shown = ", ".join(f"{cause} {count:,}" for cause, count in counts.items() if count)
        text += f" {meaning}: {shown or 'none'}."
    return [*parts, text]


def _total(steps: Sequence[dict[str, Any]], name: str) -> int:
    return round(math.fsum(s[name] for s in steps if s.get(name) is not None))


def _time(steps: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> list[str]:
    """Time by phase, as far as the records tell: from a phase's first line to its last."""
    rows = []
    for phase in dict.fromkeys(record["phase"] for record in records):
        own = [record for record in records if record["phase"] == phase]
        rows.append([phase, str(len(own)), clock(own[-1]["time"] - own[0]["time"])])
    if not rows:
        return []
    parts = ["## Time", _table(["phase", "records", "first to last record"], rows)]
    spent = {
        name: math.fsum(s.get(name) or 0 for s in steps) for name in ("rollout_s", "train_s", "grade_wait_s")
    }
    if any(spent.values()):
        parts.append(
            f"In RL: {clock(spent['rollout_s'])} sampling and tools, {clock(spent['train_s'])} training, "
            f"of which {spent['grade_wait_s']:.1f} s waiting for verdicts."
        )
    return parts


def _next(run_dir: Path) -> list[str]:
    return [
        "## Where to look next",
        "\n".join(
            (
                f"- `tensorboard --logdir {run_dir / 'tensorboard'}`: every metric over time.",
                "- `trajectories/`: each attempt as one JSON line: tokens, text, outcome, patch, grade.",
                "- `config.yaml`: every setting of this run. `log.txt`: what happened, with times.",
                f"- `gagar eval {run_dir} --eval.samples 16`: the same evaluation with more attempts a task.",
            )
        ),
    ]
