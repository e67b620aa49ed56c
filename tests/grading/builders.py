"""Real trajectories and groups for the grading tests: patches come from git, never written by hand."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from gagar_jax.types import Group, Outcome, Status, StopReason, Ticket, Trajectory, Turn

MODULE = '''\
"""Small helpers."""

import re


def clamp(value, low, high):
    """Keeps a value in a range.

    Raises ValueError for an empty range.
    """
    if low > high:
        raise ValueError("empty range")
    if value < low:
        return high
    if value > high:
        return high
    return value


class Words:
    def __init__(self, text):
        self.text = text

    def count(self):
        return len(re.findall(r"\\w+", self.text))
'''
WRONG = "        return high\n    if value > high"
RIGHT = "        return low\n    if value > high"
FIXED = MODULE.replace(WRONG, RIGHT)
VIEW_EDIT_SUBMIT = (
    Turn("view pkg/core.py 6 20", "6 def clamp …"),
    Turn("edit pkg/core.py 14\n        return low", "edited"),
    Turn("submit", ""),
)

Diff = Callable[..., bytes]


def git(folder: Path, *args: str) -> bytes:
    """Runs git in `folder` without any of the user's settings."""
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", *args]
    return subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True).stdout


def write(folder: Path, files: dict[str, str | bytes | None]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def repository(folder: Path, base: dict[str, str | bytes]) -> Diff:
    """A repository with one commit; returns a function from changed files to `git diff --binary`."""
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q")
    write(folder, dict(base))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")

    def diff(files: dict[str, str | bytes | None]) -> bytes:
        write(folder, files)
        git(folder, "add", "-A")
        patch = git(folder, "diff", "--binary", "--cached")
        git(folder, "reset", "-q", "--hard")
        return patch

    return diff


def trajectory(
    member: int,
    patch: bytes,
    *,
    status: Status = Status.PASSED,
    turns: Sequence[Turn] = VIEW_EDIT_SUBMIT,
    group: int = 0,
    prompt: str = "clamp is wrong",
) -> Trajectory:
    return Trajectory(
        ticket=Ticket(group, member, "pkg__1"),
        version=0,
        tokens=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.5, -0.5],
        prompt=prompt,
        turns=list(turns),
        outcome=Outcome(status, StopReason.SUBMITTED, "" if status is Status.PASSED else "a test fails"),
        patch=patch,
    )


def group_of(
    trajectories: Sequence[Trajectory], *, task: dict | None = None, base: dict | None = None
) -> Group:
    return Group(
        group=trajectories[0].ticket.group,
        task=task if task is not None else {"instance_id": "pkg__1"},
        trajectories=list(trajectories),
        base_files=base if base is not None else {"pkg/core.py": MODULE},
    )
