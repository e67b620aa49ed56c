"""What `gagar train` calls to prepare the code-repair environment (`gagar_jax.types.EnvironmentPlugin`)."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.coding import build, demonstrations, tasks
from envs.coding.actions import GRAMMAR
from envs.coding.commands import ConfinedCommands
from envs.coding.demonstrations import Problem
from envs.coding.shared import make_prompt
from envs.coding.workspace import scratch_folder
from envs.sandbox import ConfinementError, detect
from gagar_jax.types import Demonstration

_ENV_KEYS = ("confinement", "max_turns", "tool_time_s", "observation_chars", "locate")


class CodeRepair:
    """The plugin; every method is described in `EnvironmentPlugin`."""

    def prepare(
        self, tasks: dict[str, Any], *, confinement: str, progress: Callable[[int, int, str], None]
    ) -> Path:
        return build.build(tasks, confinement=confinement, progress=progress)

    def load(self, tasks_dir: Path) -> list[dict[str, Any]]:
        return tasks.load_tasks(tasks_dir)

    def env_kwargs(self, tasks_dir: Path, env: dict[str, Any]) -> dict[str, Any]:
        return {"tasks_dir": str(tasks_dir), **{key: env[key] for key in _ENV_KEYS}}

    def corpus(self, tasks_dir: Path) -> Iterator[str]:
        """Package sources; prompts, fixes and rewrites of the train split; the short replies."""
        records = tasks.load_tasks(tasks_dir)
        packages = {
            name: tasks.load_package(tasks_dir, name) for name in sorted({r["package"] for r in records})
        }
        for path in sorted({(record["package"], record["path"]) for record in records}):
            yield packages[path[0]].files[path[1]].decode("utf-8")
        for record in records:
            if record["split"] == "train":
                problem = Problem(record, packages[record["package"]])
                yield make_prompt(record, packages[record["package"]], "function", 10_000).text
                yield from problem.changes(problem.fixed)
                yield "\n".join(
                    ["test", f"all {len(record['PASS_TO_PASS']) + 1} tests pass", "ok", "submit", "view"]
                )
        yield GRAMMAR

    def demonstrations(
        self,
        tasks_dir: Path,
        env: dict[str, Any],
        *,
        instance_ids: list[str],
        per_task: int,
        clean_share: float,
        seed: int,
        progress: Callable[[int, int, str], None],
    ) -> list[Demonstration]:
        kwargs = self.env_kwargs(tasks_dir, env)
        del kwargs["tasks_dir"]
        return demonstrations.demonstrations(
            tasks_dir,
            kwargs,
            instance_ids=instance_ids,
            per_task=per_task,
            clean_share=clean_share,
            seed=seed,
            workers=env["workers"],
            progress=progress,
        )

    def base_tree(self, tasks_dir: Path, task: Mapping[str, Any]) -> dict[str, bytes]:
        """What the agent was handed: the package's files, the bug among them."""
        package = _package(tasks_dir, task["package"])
        return package.files | {task["path"]: package.broken(dict(task))}

    def command_runner(self, confinement: str) -> ConfinedCommands:
        return ConfinedCommands(confinement)

    def doctor(self) -> list[tuple[str, bool | None, str]]:
        """What this machine has for code repair: pip, confinement, and where working copies go."""
        rows: list[tuple[str, bool | None, str]] = []
        pip = importlib.util.find_spec("pip") is not None
        rows.append(("pip", pip, importlib.metadata.version("pip") if pip else "run `python -m ensurepip`"))
        try:
            rows.append(("confinement", True, detect("auto")))
        except ConfinementError as error:
            rows.append(("confinement", False, str(error)))
        scratch = scratch_folder()
        in_memory = scratch == "/dev/shm"
        text = scratch if in_memory else f"{scratch}; a roomy /dev/shm would make episodes start faster"
        rows.append(("working copies", True if in_memory else None, text))
        return rows


_package = functools.lru_cache(maxsize=32)(tasks.load_package)

CODE_REPAIR = CodeRepair()
