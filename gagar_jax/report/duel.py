"""`gagar duel`: the blind comparison of `grading.duel` on two evaluations, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import rich.console
import rich.table

from gagar_jax.config import Config
from gagar_jax.console import Console, number
from gagar_jax.files import write_atomic
from gagar_jax.grading.audit.audit import plain
from gagar_jax.grading.bootstrap import RESAMPLES, Estimate
from gagar_jax.grading.duel import Duel, duel
from gagar_jax.grading.fence import visible
from gagar_jax.report.grade import decimal
from gagar_jax.report.groups import Surroundings, check_result_path, read_groups
from gagar_jax.types import UserError

LABELS = {
    "W": "quality W, 1 to 5",
    "f": "coefficient f",
    "tier1": "tier 1 share",
    "tier2": "tier 2 share",
    "tier3": "tier 3 share",
}


def blind(
    sources: tuple[Path, Path],
    configs: tuple[Config, Config],
    *,
    stage: str,
    split: str | None,
    grader: str | None,
    pairs: int,
    seed: int,
    path: Path | None,
) -> Duel:
    """Compares the evaluations of two runs, prints the table, and writes the JSON if a path is given.

    Args:
      sources: each a run folder, or a file of an evaluation's trajectories.
      configs: theirs; the first one's grading settings hold for both.
      stage: "rl" or "sft"; split: of the evaluation, needed for folders.
      grader: its name; None takes the configured one.
      pairs: at most, a task.
      seed: of the draws.
      path: of the JSON file.

    Raises:
      UserError: no such evaluation, no task that both pass, or tasks that differ; or see `read_groups` and
        `Surroundings.grader`.
    """
    check_result_path("--json", path)
    files = tuple(evaluation_file(source, stage, split) for source in sources)
    first, second = configs
    of_a = Surroundings(_one_order(first))
    # Tasks are looked up once where both runs have the same.
    same = (first.env, first.tasks) == (second.env, second.tasks)
    of_b = of_a if same else Surroundings(second)
    judge = of_a.grader(grader, order=list)  # in the order given: both are asked for
    name = getattr(judge, "name", type(judge).__name__)
    groups = list(read_groups(files[0], of_a)), list(read_groups(files[1], of_b))
    with Console(f"{first.name} · duel by {name}") as console, console.phase("duel"):
        found = duel(
            judge, *groups, first.grading.tiers(), pairs_a_task=pairs, seed=seed,
            progress=lambda done, total: console.update(done, total=total),
        )  # fmt: skip
    if not found.pairs:
        passed = [sum(any(t.passed for t in group.trajectories) for group in of_run) for of_run in groups]
        raise UserError(
            f"there is no task that both pass: {files[0]} has {len(groups[0])} tasks, {passed[0]} of them "
            f"passed, {files[1]} has {len(groups[1])}, {passed[1]} of them passed, and {found.evaluated} are "
            "in both. Take another split, or evaluate with more samples (gagar eval RUN --eval.samples)"
        )
    shown = rich.console.Console(highlight=False)
    for label, file in zip("AB", files, strict=True):
        shown.print(f"{label}: {file}", markup=False, soft_wrap=True)
    shown.print(table(found))
    for line in counts(found):
        shown.print(line, markup=False, soft_wrap=True)
    if path is not None:
        about = {"a": str(files[0]), "b": str(files[1]), "pairs_a_task": pairs, "level": 0.95}
        write_atomic(path, json.dumps(about | {"resamples": RESAMPLES} | plain(found), indent=1) + "\n")
    return found


def evaluation_file(source: Path, stage: str, split: str | None) -> Path:
    """The trajectories of a run's evaluation on a split; a file is its own.

    Raises:
      UserError: the run was not evaluated so; the message says which splits there are.
    """
    if source.is_file():
        return source
    if not (source / "config.yaml").exists():
        raise UserError(f"{source} is not the folder of a run: it has no config.yaml")
    prefix = f"eval_{stage}_"
    found = {f.stem.removeprefix(prefix): f for f in source.glob(f"trajectories/{prefix}*.jsonl")}
    if not found:
        raise UserError(
            f"{source} has no trajectories/eval_{stage}_*.jsonl: its evaluation after {stage} has not been "
            f"run. Run: gagar eval {source} --stage {stage}"
        )
    if split is None:
        raise UserError(f"command line: name the split with --split; {source} has {', '.join(sorted(found))}")
    if split not in found:
        raise UserError(
            f"{source} has no evaluation of the split {split!r} (--split); it has {', '.join(sorted(found))}"
        )
    return found[split]


def table(found: Duel) -> rich.table.Table:
    """One row a measure: of each side, of their difference, and over how many tasks."""
    title = f"{found.grader}: {found.tasks} tasks that both pass, of {found.evaluated}"
    result = rich.table.Table("", title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("A", "B", "A − B", "tasks"):
        result.add_column(column, justify="right")
    for label, win in (("win rate, ties half", found.win_rate), ("  unlike patches", found.win_rate_unlike)):
        lost = Estimate(1 - win.mean, 1 - win.high, 1 - win.low, win.count)
        result.add_row(label, cell(win), cell(lost), "", str(win.count))
    for name, label in LABELS.items():
        both = found.measures[name]
        result.add_row(label, cell(both.a), cell(both.b), cell(both.difference), str(both.difference.count))
    return result


def cell(estimate: Estimate) -> str:
    """A mean over its interval; a dash for what is not known."""
    if math.isnan(estimate.low):
        return decimal(estimate.mean)
    return f"{estimate.mean:.3f}\n[{estimate.low:.3f}, {estimate.high:.3f}]"


def counts(found: Duel) -> Iterator[str]:
    """What the estimates rest on, a line each."""
    yield f"[…]: 95 % intervals, {RESAMPLES:,} resamples of the tasks, seed {found.seed}"
    pairs = f"{found.pairs} pairs: A better in {found.a_better}, B in {found.b_better}, {found.tied} tied"
    pairs += f" ({found.identical} identical patches, not asked about)"
    yield pairs + (f", {found.unresolved} without a result" if found.unresolved else "")
    if any(found.external.values()):
        yield f"called copied from outside: A in {found.external['a']} verdicts, B in {found.external['b']}"
    agree, usable = found.orders_agree, found.verdicts_usable
    yield f"both orders say the same of {agree.hits} of {agree.tried} judged pairs ({decimal(agree.share)})"
    text = f"{usable.hits} of {usable.tried} verdicts usable"
    text += "".join(f", {count} {cause}" for cause, count in found.causes.items())
    if not math.isnan(found.seconds_a_verdict):
        text += f" · {number(found.seconds_a_verdict)} s a verdict"
    if not math.isnan(found.tokens_a_verdict):
        text += f", {number(found.tokens_a_verdict)} tokens"
    yield text
    yield from (f"{cause}: {visible(detail)}" for cause, detail in found.details.items())


def _one_order(config: Config) -> Config:
    """Each call is one order, and both are asked for here: a grader must not do so again inside a call."""
    agentic = config.grading.agentic.model_copy(update={"orders": 1})
    return config.model_copy(update={"grading": config.grading.model_copy(update={"agentic": agentic})})
