"""`gagar tasks build` and `gagar tasks show`: the environment's plugin does the work, this shows it."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from gagar_jax.config import Config
from gagar_jax.console import Console
from gagar_jax.plugins import environment_plugin
from gagar_jax.types import UserError


def build(config: Config) -> Path:
    """Builds the tasks of a configuration, or finds them built, and counts them.

    Returns:
      The task folder.
    """
    folder = _prepare(config)
    _count(folder, environment_plugin(config.env.id).load(folder))
    return folder


def show(config: Config, instance_id: str | None) -> None:
    """Counts the tasks, or prints one task's record as JSON.

    Raises:
      UserError: there is no task of that id.
    """
    folder = _prepare(config)
    records = environment_plugin(config.env.id).load(folder)
    if instance_id is None:
        _count(folder, records)
        return
    for record in records:
        if record["instance_id"] == instance_id:
            print(json.dumps(record, indent=2, ensure_ascii=False))
            return
    raise UserError(f"no task {instance_id!r} in {folder}; the first is {records[0]['instance_id']!r}")


def _prepare(config: Config) -> Path:
    plugin = environment_plugin(config.env.id)
    with Console(f"{config.name} · tasks") as console, console.phase("tasks"):
        return plugin.prepare(
            config.tasks.model_dump(mode="json"),
            confinement=config.env.confinement,
            progress=lambda done, total, message: console.update(done, total=total, message=message),
        )


def _count(folder: Path, records: list[dict[str, Any]]) -> None:
    """A row a repository, a column a split. Records of environments without `repo` share one row."""
    splits = sorted({record["split"] for record in records})
    counts = collections.Counter((record.get("repo", "–"), record["split"]) for record in records)
    table = rich.table.Table("repository", *splits, "all", box=None, padding=(0, 2, 0, 0))
    for repo in sorted({repo for repo, _ in counts}):
        row = [counts[repo, split] for split in splits]
        table.add_row(repo, *map(str, row), str(sum(row)))
    totals = [sum(n for (_, s), n in counts.items() if s == split) for split in splits]
    table.add_row("all", *map(str, totals), str(len(records)), style="bold")
    console = rich.console.Console(highlight=False)
    console.print(table)
    console.print(f"in {folder}", soft_wrap=True)
