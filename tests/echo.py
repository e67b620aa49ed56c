"""A real, tiny text environment with its plugin: "say N", answered by an action. For tests of the whole run.

Nothing of gagar_jax is replaced; this is what somebody else's environment package looks like.
"""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium

from gagar_jax.types import Demonstration, Outcome, Status, StopReason

ENV_ID = "tests.echo:gagar/Echo-v0"
BASE = "answer = None\n"
DELAY_S = 0.0
"""Longest random pause of a step; set by tests that need episodes to take time."""


class EchoEnv(gymnasium.Env[str, str]):
    """Passes when the action starts with the task's words. More words make a longer patch."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "final_action": "give up"}
    observation_space = gymnasium.spaces.Text(1000)
    action_space = gymnasium.spaces.Text(1000)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert options is not None
        self._words, self._turns = options["instance_id"].split("-"), 0
        return " ".join(self._words), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(random.random() * DELAY_S)
        self._turns += 1
        said = action.split()
        passed = said[: len(self._words)] == self._words
        if not passed and self._turns < 2 and action != self.metadata["final_action"]:
            return "no", 0.0, False, False, {"tool_s": 0.01}
        status = Status.PASSED if passed else Status.FAILED
        after = "answer = None\n" + "".join(f"said_{i} = {word!r}\n" for i, word in enumerate(said))
        info = {"outcome": Outcome(status, StopReason.SUBMITTED, "" if passed else "not what was asked")}
        return "", float(passed), True, False, info | {"patch": _diff(after), "base_files": {"a.py": BASE}}


def _diff(after: str) -> bytes:
    lines = difflib.unified_diff(BASE.splitlines(True), after.splitlines(True), "a/a.py", "b/a.py")
    return ("diff --git a/a.py b/a.py\n" + "".join(lines)).encode()


class EchoPlugin:
    """The plugin; every method is described in `EnvironmentPlugin`."""

    def prepare(
        self, tasks: dict[str, Any], *, confinement: str, progress: Callable[[int, int, str], None]
    ) -> Path:
        progress(1, 1, "nothing to build")
        return Path("nowhere")

    def load(self, tasks_dir: Path) -> list[dict[str, Any]]:
        split = ["train"] * 6 + ["unseen_mutant", "unseen_function"]
        return [{"instance_id": f"say-{n}", "split": s} for n, s in enumerate(split)]

    def env_kwargs(self, tasks_dir: Path, env: dict[str, Any]) -> dict[str, Any]:
        return {}

    def corpus(self, tasks_dir: Path) -> Iterator[str]:
        yield "say 0 1 2 3 4 5 6 7 now please no\n"

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
        endings = ["", " now", " please", " now please"]
        prompts = [name.replace("-", " ") for name in instance_ids]
        return [
            Demonstration(name, "said", prompt, ((prompt + endings[k % 4], ""),))
            for name, prompt in zip(instance_ids, prompts, strict=True)
            for k in range(per_task)
        ]


gymnasium.register("gagar/Echo-v0", entry_point=EchoEnv)
