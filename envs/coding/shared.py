"""What the environments of one process share: the tasks, the templates and one verifier a task folder.

Sixty-four environments in threads start one set of test servers. The last one that closes ends them.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

from envs.coding.tasks import TaskError, load_tasks
from envs.coding.tools import Editor, Window
from envs.coding.verification import Verifier
from envs.coding.workspace import Template, Templates

_LOCK = threading.Lock()
_OPEN: dict[tuple[str, str, int], Shared] = {}

_SUFFIX = {
    "none": "",
    "file": " It is in {path}.",
    "function": " It is in\n",
    "line": " It is near line {line} in\n",
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What `reset` says, and where the window then stands."""

    text: str
    window: Window | None


class Shared:
    """Use `acquire` and `release`; the constructor is theirs."""

    def __init__(self, tasks_dir: Path, confinement: str, servers: int):
        self.tasks: dict[str, dict[str, Any]] = {task["instance_id"]: task for task in load_tasks(tasks_dir)}
        self.verifier = Verifier(tasks_dir / "packages", confinement=confinement, servers=servers)
        self.templates = Templates(tasks_dir)
        self.prompts: dict[tuple[str, str, int], Prompt] = {}
        self.users = 0

    def task(self, instance_id: str) -> dict[str, Any]:
        """A task's record.

        Raises:
          TaskError: no task has this id.
        """
        try:
            return self.tasks[instance_id]
        except KeyError:
            raise TaskError(
                f"{self.templates.tasks_dir}: no task has the instance_id {instance_id!r}"
            ) from None

    def editor(self, template: Template, *, observation_chars: int) -> Editor:
        """An editor on a fresh working copy of the task."""
        package = template.package
        return Editor(
            template.workspace(),
            sources=package.sources,
            tests=package.tests,
            observation_chars=observation_chars,
        )

    def prompt(self, task: dict[str, Any], editor: Editor, locate: str) -> Prompt:
        """The prompt of a task whose `editor` is as `reset` made it. Equal for every member of a group."""
        key = (task["instance_id"], locate, editor.observation_chars)
        if key not in self.prompts:
            text = task["problem_statement"]
            if locate in ("function", "line"):
                editor.window = Window(
                    task["path"], 1, 1, ""
                )  # so that the name is looked up in this file first
                shown = editor.view(task["qualname"])
                line = task["line"] - editor.window.first + 1
                text += _SUFFIX[locate].format(line=line) + shown
            else:
                text += _SUFFIX[locate].format(path=task["path"])
            self.prompts[key] = Prompt(text, editor.window)
        return self.prompts[key]


def acquire(tasks_dir: Path, confinement: str, *, servers: int = 2) -> tuple[Shared, functools.partial[None]]:
    """The shared parts for a task folder, and the call that gives them back (harmless when repeated).

    Raises:
      TaskError: the task folder cannot be used.
      ConfinementError: this machine cannot confine as asked.
    """
    key = (str(Path(tasks_dir).resolve()), confinement, servers)
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = Shared(Path(key[0]), confinement, servers)
        _OPEN[key].users += 1
        return _OPEN[key], functools.partial(_release, key, {"held": True})


def _release(key: tuple[str, str, int], lease: dict[str, bool]) -> None:
    with _LOCK:
        if not lease["held"]:
            return
        lease["held"] = False
        shared = _OPEN[key]
        shared.users -= 1
        if shared.users == 0:
            del _OPEN[key]
            shared.verifier.close()
            shared.templates.close()
