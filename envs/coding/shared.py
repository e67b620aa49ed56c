"""What the environments of one process share: the tasks, the templates and one verifier a task folder.

Sixty-four environments in threads start one set of test servers. The last one that closes ends them.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

from envs.coding import tools
from envs.coding.tasks import PackageTree, TaskError, load_tasks
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

    def prompt(self, template: Template, task: dict[str, Any], locate: str, observation_chars: int) -> Prompt:
        """The prompt of a task, the same for every member of a group."""
        key = (task["instance_id"], locate, observation_chars)
        if key not in self.prompts:
            self.prompts[key] = make_prompt(task, template.package, locate, observation_chars)
        return self.prompts[key]


def make_prompt(task: dict[str, Any], package: PackageTree, locate: str, observation_chars: int) -> Prompt:
    """What an agent is told first.

    Args:
      package: the pristine tree of the task's package.
      locate: "none", "file", "function" or "line": how much of the fault's place is given away.
      observation_chars: the window is cut in the middle beyond this.
    """
    statement = task["problem_statement"]
    if locate in ("none", "file"):
        return Prompt(statement + _SUFFIX[locate].format(path=task["path"]), None)
    window = function_window(task, package)
    hint = _SUFFIX[locate].format(line=task["line"] - window.first + 1)
    shown = tools.describe(window, package.broken(task).decode("utf-8"))
    return Prompt(statement + hint + tools.cut(shown, observation_chars), window)


def function_window(task: dict[str, Any], package: PackageTree) -> Window:
    """The window on the task's function in the broken file; a bug adds or removes lines only inside of it.

    Raises:
      TaskError: the file has no such function.
    """
    pristine = package.files[task["path"]]
    found = tools.locate(pristine.decode("utf-8"), task["qualname"])
    if found is None:
        raise TaskError(f"{task['instance_id']}: {task['path']} has no function {task['qualname']}")
    delta = package.broken(task).count(b"\n") - pristine.count(b"\n")
    return Window(task["path"], found[0], found[1] + delta, task["qualname"], definition=True)


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
