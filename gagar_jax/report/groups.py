"""Groups as a run stored them, the grader that a configuration names for them, where results may go."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from gagar_jax.config import Config
from gagar_jax.console import Console
from gagar_jax.grading import patch as patches
from gagar_jax.grading.agentic.grader import Order
from gagar_jax.grading.graders import make_grader
from gagar_jax.grading.service import Grader
from gagar_jax.plugins import Repositories, environment_plugin, lent_to_graders
from gagar_jax.types import EnvironmentPlugin, Group, Trajectory, UserError, trajectory_from_json

Record = dict[str, Any]


class Surroundings:
    """A configuration's environment, prepared only if something of it is asked for."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @functools.cached_property
    def plugin(self) -> EnvironmentPlugin:
        return environment_plugin(self._config.env.id)

    @functools.cached_property
    def tasks_dir(self) -> Path:
        with Console(f"{self._config.name} · tasks") as console, console.phase("tasks"):
            return self.plugin.prepare(
                self._config.tasks.model_dump(mode="json"),
                confinement=self._config.env.confinement,
                progress=lambda done, total, message: console.update(done, total=total, message=message),
            )

    @functools.cached_property
    def _tasks(self) -> dict[str, Record]:
        return {record["instance_id"]: record for record in self.plugin.load(self.tasks_dir)}

    def task(self, instance_id: str) -> Record:
        """Raises UserError where the task folder does not have it."""
        if instance_id not in self._tasks:
            raise UserError(
                f"{self.tasks_dir} has no task {instance_id!r}, and the group was stored without its task: "
                "give the tasks settings that the run had (tasks.dir, or its recipe)"
            )
        return self._tasks[instance_id]

    def base_text(self, task: Mapping[str, Any], path: str) -> str | None:
        """A file as the agent was handed it; None where the environment cannot say, or has no such file."""
        if not isinstance(self.plugin, Repositories):
            return None
        data = self.plugin.base_tree(self.tasks_dir, task).get(path)
        return None if data is None else data.decode("utf-8", "surrogateescape")

    def grader(self, name: str | None = None, *, order: Order | None = None) -> Grader:
        """The configured grader, or the one of that name, with what the environment lends it.

        Args:
          name: a grader, or None.
          order: see `AgenticGrader`.

        Raises:
          UserError: the grader lacks something it must have, or there is none of that name.
        """
        grading = self._config.grading
        if name is not None:
            try:
                grading = type(grading).model_validate(grading.model_dump() | {"grader": name})
            except pydantic.ValidationError as error:
                raise UserError(f"no grader is called {name!r}: {error.errors()[0]['msg']}") from None
        if grading.grader == "structural":
            return make_grader(grading)
        run, repository = lent_to_graders(self.plugin, self.tasks_dir, self._config.env.confinement)
        return make_grader(grading, run=run, repository=repository, order=order)


def check_result_path(option: str, path: Path | None) -> None:
    """Before anything is paid for. Raises UserError where a file cannot be written; None is no file."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: no file can be written there")


def config_path(source: Path) -> Path | None:
    """config.yaml of the run that a run folder, or a file in its trajectories/, is of; None without one."""
    folder = source if source.is_dir() else source.resolve().parent.parent
    path = folder / "config.yaml"
    return path if path.exists() else None


def read_groups(
    source: Path, surroundings: Surroundings, *, only: Collection[int] | None = None
) -> Iterator[Group]:
    """The stored groups in the order of the files, each with its task and its base texts.

    A trajectory's line may carry its group's `task` and `base_files` (what one line lacks another may
    have); runs stored without them are completed from the environment's tasks.

    Args:
      source: a run folder (the groups its train steps used), or one JSONL file of trajectories.
      surroundings: where tasks and base texts come from that were not stored.
      only: numbers of the groups wanted; None is all.

    Raises:
      UserError: nothing stored there, a damaged line, or a group that cannot be completed.
    """
    if source.is_dir():
        files = sorted(source.glob("trajectories/step_*[0-9].jsonl"))
        if not files:
            raise UserError(f"{source} has no trajectories/step_*.jsonl: no RL step of it has finished")
    elif source.exists():
        files = [source]
    else:
        raise UserError(f"{source}: no such run folder or file of trajectories")
    for file in files:
        for number, records in _records(file, only).items():
            yield _group(number, records, surroundings, file)


def _records(file: Path, only: Collection[int] | None) -> dict[int, list[Record]]:
    groups: dict[int, list[Record]] = {}
    with file.open(encoding="utf-8") as lines:
        for at, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                number = record["ticket"]["group"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{file}, line {at}: not a trajectory ({error})") from None
            if only is None or number in only:
                groups.setdefault(number, []).append(record)
    return groups


def _group(number: int, records: list[Record], surroundings: Surroundings, file: Path) -> Group:
    where = f"{file}, group {number}"
    try:
        trajectories = sorted(map(trajectory_from_json, records), key=lambda t: t.ticket.member)
    except (KeyError, pydantic.ValidationError) as error:
        raise UserError(f"{where}: not a trajectory ({error})") from None
    task = next((record["task"] for record in records if record.get("task")), None)
    if task is None:
        task = surroundings.task(trajectories[0].ticket.instance_id)
    base: dict[str, str] = {}
    for record in records:
        base |= record.get("base_files") or {}
    for trajectory in trajectories:
        for path in _touched(trajectory) - base.keys():
            text = surroundings.base_text(task, path)
            if text is not None:
                base[path] = text
            elif trajectory.passed:
                raise UserError(
                    f"{where}: the text of {path} before member {trajectory.ticket.member}'s edit was not "
                    "stored, and the environment does not give it out (base_tree). Runs store it by now; "
                    "this group cannot be graded again"
                )
    return Group(number, task, trajectories, base)


def _touched(trajectory: Trajectory) -> set[str]:
    """Paths of the text files whose text before the patch is needed."""
    try:
        return {f.old_path for f in patches.parse(trajectory.patch) if not f.new and not f.binary}
    except ValueError:
        return set()  # a failed member's patch may be anything; no grader is asked to score it
