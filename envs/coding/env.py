"""`envs:gagar/CodeRepair-v0`: an agent repairs one broken function of a real package, in text.

Actions and observations are strings (the grammar is in `tools.py`). One episode is one task and one
working copy. The tests run through `verification.py`, on copies; nothing that the agent wrote is run here.
"""

from __future__ import annotations

import copy
import logging
import re
import subprocess
from pathlib import Path
from typing import Any, Literal

import gymnasium
from gymnasium import spaces

from envs.coding import actions, tools
from envs.coding.shared import acquire
from envs.coding.tasks import PackageTree, TaskError, test_name
from envs.coding.workspace import WorkspacePathError
from envs.sandbox import ConfinementError
from gagar_jax.types import Outcome, Status, StopReason

_DETAIL_CHARS = 100
_ADDRESS = re.compile(
    r"(?:0x|(?<=\.\.\.)x?)[0-9a-f]{6,}"
)  # differs from run to run; may be cut in the middle

logger = logging.getLogger(__name__)


def without_addresses(text: str) -> str:
    """Memory addresses differ from run to run, and the same seed must read the same text.

    A test runner that shortens a representation may have cut an address's beginning off.

    >>> without_addresses("<a.Key object at 0x7f3d9f403c90> == <a.Key...x7fa118bab110>")
    '<a.Key object at 0x> == <a.Key...0x>'
    """
    return _ADDRESS.sub("0x", text)


class EnvironmentFault(RuntimeError):
    """The machinery of a tool failed, not the agent's code."""


_FAULTS = (OSError, subprocess.SubprocessError, ConfinementError, TaskError, EnvironmentFault)


class AnyText(spaces.Text):
    """Every string up to a length, whatever its characters; samples are printable ASCII."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length


class CodeRepairEnv(gymnasium.Env[str, str]):
    """A text environment for one agent.

    Args:
      tasks_dir: a task folder as `build.py` makes it.
      confinement: "auto", "bubblewrap", "namespaces" or "none", as in `sandbox.detect`.
      max_turns: actions an episode may take.
      tool_time_s: seconds the test runs of an episode may take (their own time, not waiting).
      observation_chars: longer observations are cut in the middle.
      locate: how much of the fault's place the prompt gives away.
      split: what `reset` without an instance_id draws from; every task when None.
      servers: warm test servers shared by the environments of this process.

    `reset` takes `options={"instance_id": ...}`; its info has instance_id and tool_s.
    `step` gives info with instance_id, tool_s (of this step), malformed and, when the episode ended,
    outcome (`gagar_jax.types.Outcome`), patch (bytes) and base_files (path -> text before any edit of the
    files in the patch). Reward: 1.0 when the outcome is PASSED, else 0.0.

    Raises:
      TaskError: the task folder cannot be used.
      ConfinementError: this machine cannot confine as asked.
    """

    metadata = {"render_modes": [], "final_action": "submit"}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        tasks_dir: str | Path,
        *,
        confinement: str = "auto",
        max_turns: int = 6,
        tool_time_s: float = 20.0,
        observation_chars: int = 480,
        locate: Literal["none", "file", "function", "line"] = "function",
        split: str | None = None,
        servers: int = 2,
        render_mode: None = None,
    ):
        self.render_mode = render_mode
        self.max_turns = max_turns
        self.tool_time_s = tool_time_s
        self.observation_chars = observation_chars
        self.locate = locate
        self.action_space = AnyText(actions.MAX_ACTION_CHARS, min_length=0)
        self.observation_space = AnyText(2 * observation_chars + 1000, min_length=0)
        self._shared, self._give_back = acquire(Path(tasks_dir), confinement, servers=servers)
        self._choices = sorted(i for i, task in self._shared.tasks.items() if split in (None, task["split"]))
        self._editor: tools.Editor | None = None
        self._fault = ""
        self._over = True

    def task(self, instance_id: str) -> dict[str, Any]:
        """A task's record.

        Raises:
          TaskError: there is no such task.
        """
        return self._shared.task(instance_id)

    def package(self, task: dict[str, Any]) -> PackageTree:
        """The pristine tree of a task's package. For demonstrators and tests; agents never see it."""
        return self._shared.templates.package(task["package"])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts an episode: a fresh working copy and the prompt.

        A fault of the disk or of git is reported as `info["fault"]`, and by the next `step` as an INVALID
        outcome.

        Raises:
          TaskError: there is no such instance_id, or no task to draw from.
        """
        super().reset(seed=seed)
        self._drop_workspace()
        instance_id = (options or {}).get("instance_id")
        if instance_id is None:
            if not self._choices:
                raise TaskError(f"{self._shared.templates.tasks_dir}: no task in the split to draw from")
            instance_id = self._choices[int(self.np_random.integers(len(self._choices)))]
        self._task = self._shared.task(instance_id)
        self._turns, self._tool_s, self._fault, self._over = 0, 0.0, "", False
        try:
            text = self._open()
        except _FAULTS as error:
            text = self._task["problem_statement"]
            self._fault = self._say_fault("reset", error)
        info = {"instance_id": instance_id, "tool_s": 0.0}
        return text, info | ({"fault": self._fault} if self._fault else {})

    def _open(self) -> str:
        template = self._shared.templates.get(self._task)
        self._editor = self._shared.editor(template, observation_chars=self.observation_chars)
        prompt = self._shared.prompt(template, self._task, self.locate, self.observation_chars)
        self._editor.window = copy.copy(prompt.window)
        return prompt.text

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Does one action.

        Raises:
          gymnasium.error.ResetNeeded: the episode is over.
        """
        if self._over:
            raise gymnasium.error.ResetNeeded("the episode is over: call reset first")
        parsed = actions.parse_action(action)
        self._turns += 1
        info: dict[str, Any] = {
            "instance_id": self._task["instance_id"],
            "malformed": isinstance(parsed, actions.Malformed),
            "tool_s": 0.0,
        }
        observation = ""
        if not self._fault:
            before = self._tool_s
            try:
                observation = self._act(parsed)
            except _FAULTS as error:
                self._fault = self._say_fault(type(parsed).__name__.lower(), error)
            info["tool_s"] = self._tool_s - before
        stop = self._stop(parsed)
        if stop is None:
            return observation, 0.0, False, False, info
        info |= self._finish(stop)
        reward = float(info["outcome"].status is Status.PASSED)
        submitted = stop is StopReason.SUBMITTED
        return observation, reward, submitted, not submitted, info

    def _act(self, action: actions.Action) -> str:
        editor = self._editor
        assert editor is not None
        match action:
            case actions.Malformed(why):
                return f"{why}. {actions.GRAMMAR}"
            case actions.View(name):
                return editor.view(name)
            case actions.ViewLines(path, first, last):
                return editor.view_lines(path, first, last)
            case actions.Search(text):
                return editor.search(text)
            case actions.Edit():
                try:
                    return editor.edit(action)
                except WorkspacePathError as error:
                    return str(error)
            case actions.RunTests():
                return self._run_tests(editor)
            case actions.Submit():
                return ""

    def _run_tests(self, editor: tools.Editor) -> str:
        tests = [*self._task["FAIL_TO_PASS"], *self._task["PASS_TO_PASS"]]
        report = self._shared.verifier.run(self._task["package"], self._against_pristine(editor), tests)
        if report.path != "cached":
            self._tool_s += report.wall_ms / 1000
        failed = sorted(test for test in tests if report.results.get(test) not in ("passed", "skipped"))
        if report.fault:
            raise EnvironmentFault(report.why)
        if not report.complete:
            return editor.cut(f"the tests did not finish: {report.why}")
        if not failed:
            return f"all {len(tests)} tests pass"
        said = f"{len(failed)} of {len(tests)} tests fail\n{test_name(failed[0])}"
        detail = without_addresses(report.details.get(failed[0], ""))[:_DETAIL_CHARS]
        return editor.cut(f"{said}: {detail}" if detail else said)

    def _against_pristine(self, editor: tools.Editor) -> dict[str, bytes | None]:
        """The working copy as changes to the correct tree, which is what the verifier starts from."""
        workspace, path = editor.workspace, self._task["path"]
        pristine, broken = workspace.template.package.files, workspace.template.files[path]
        changed = {path: broken, **workspace.changed()}
        return {name: data for name, data in changed.items() if pristine.get(name) != data}

    def _stop(self, action: actions.Action) -> StopReason | None:
        if self._fault:
            return StopReason.FAULT
        if isinstance(action, actions.Submit):
            return StopReason.SUBMITTED
        if self._tool_s >= self.tool_time_s:
            return StopReason.TOOL_TIME_LIMIT
        return StopReason.TURN_LIMIT if self._turns >= self.max_turns else None

    def _finish(self, stop: StopReason) -> dict[str, Any]:
        self._over = True
        patch, base_files = b"", {}
        outcome = Outcome(Status.INVALID, StopReason.FAULT, self._fault)
        if not self._fault:
            try:
                assert self._editor is not None
                workspace = self._editor.workspace
                changed = workspace.changed()
                patch = workspace.patch(changed)
                files = workspace.template.files
                base_files = {p: files[p].decode("utf-8", "surrogateescape") for p in changed if p in files}
                outcome = self._judge(stop, changed)
            except _FAULTS as error:
                outcome = Outcome(Status.INVALID, StopReason.FAULT, self._say_fault("judging", error))
        self._drop_workspace()
        return {"outcome": outcome, "patch": patch, "base_files": base_files}

    def _judge(self, stop: StopReason, changed: dict[str, bytes | None]) -> Outcome:
        if not changed:
            return Outcome(
                Status.FAILED, stop, "nothing was changed", tuple(self._task["FAIL_TO_PASS"]), cached=True
            )
        assert self._editor is not None
        verdict = self._shared.verifier.judge(self._task, self._against_pristine(self._editor))
        status = verdict.status
        stop = StopReason.FAULT if status is Status.INVALID else stop
        return Outcome(status, stop, verdict.reason, verdict.failed_tests, verdict.ms, verdict.cached)

    def _say_fault(self, where: str, error: BaseException) -> str:
        reason = f"{self._task['instance_id']}: {where}: {type(error).__name__}: {error}"
        logger.warning("environment fault, outcome INVALID: %s", reason, exc_info=error)
        return reason

    def _drop_workspace(self) -> None:
        if self._editor is not None:
            self._editor.workspace.close()
            self._editor = None

    def close(self) -> None:
        """Removes the working copy and gives back the shared test servers."""
        self._over = True
        self._drop_workspace()
        self._give_back()
