"""Finds the package that prepares an environment, by Gymnasium id. Environments themselves live elsewhere.

A package declares its plugin in its metadata, so that gagar_jax imports no environment by name.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from gagar_jax.types import CommandRunner, EnvironmentPlugin, UserError

GROUP = "gagar_jax.environments"


class UnknownEnvironment(UserError):
    """No installed package declares a plugin for the environment id."""


class Check(NamedTuple):
    """One line of `gagar doctor`."""

    name: str
    ok: bool | None  # False: a must is missing; None: something good to have is missing
    text: str  # what was found, and what to do if it is not enough


@runtime_checkable
class Diagnosable(Protocol):
    """A plugin that can say what this machine has for its environment. Optional."""

    def doctor(self) -> list[tuple[str, bool | None, str]]:
        """Rows of name, ok and text, as in `Check`."""
        ...


@runtime_checkable
class Repositories(Protocol):
    """A plugin whose tasks are repositories, which a grader may then read whole. Optional."""

    def base_tree(self, tasks_dir: Path, task: Mapping[str, Any]) -> Mapping[str, bytes]:
        """Path → bytes of what the agent was handed for a task."""
        ...


@runtime_checkable
class Confining(Protocol):
    """A plugin that can run a grader's commands confined. Optional."""

    def command_runner(self, confinement: str) -> CommandRunner:
        """Raises UserError where commands cannot be confined in this way."""
        ...


def lent_to_graders(
    plugin: EnvironmentPlugin, tasks_dir: Path, confinement: str
) -> tuple[CommandRunner | None, Callable[[Mapping[str, Any]], Mapping[str, bytes]] | None]:
    """What a plugin has for a grader: confined commands, and a task's record → its whole base tree.

    Raises:
      UserError: commands cannot be confined in this way.
    """
    return (
        plugin.command_runner(confinement) if isinstance(plugin, Confining) else None,
        functools.partial(plugin.base_tree, tasks_dir) if isinstance(plugin, Repositories) else None,
    )


def environment_ids() -> list[str]:
    """The ids that installed packages declare, sorted."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def environment_plugin(env_id: str) -> EnvironmentPlugin:
    """The plugin that prepares tasks for an environment.

    Args:
      env_id: what `gymnasium.make` takes, e.g. "envs:gagar/CodeRepair-v0".

    Raises:
      UnknownEnvironment: nothing installed declares it; the message says what to install or to correct.
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == env_id:
            return cast(EnvironmentPlugin, entry.load())
    known = environment_ids()
    raise UnknownEnvironment(
        f"env.id: no installed package prepares the environment {env_id!r}. "
        + (f"Installed: {', '.join(known)}. " if known else f"No package declares any in {GROUP!r}. ")
        + "The built-in ones come with gagar-jax itself (pip install -e . in a clone, or make env); "
        f"for your own, declare it under the entry-point group {GROUP!r} of your package and install that."
    )
