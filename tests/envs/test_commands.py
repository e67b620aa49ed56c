"""A grader's commands: in a copy of the tree, confined, and gone afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.coding.commands import ConfinedCommands
from envs.coding.plugin import CODE_REPAIR
from envs.coding.tasks import load_tasks
from gagar_jax.grading.agentic.toolbox import Toolbox
from gagar_jax.grading.agentic.workspace import Workspace
from gagar_jax.grading.fence import Fence
from gagar_jax.plugins import Confining, Repositories
from gagar_jax.types import Group, Outcome, Status, StopReason, Ticket, Trajectory
from tests.envs.tiny import tiny_tasks

pytestmark = pytest.mark.confined

TREE = {"pkg/core.py": b"LIMIT = 3\n", "data.bin": bytes(range(256))}


@pytest.fixture
def commands() -> Iterator[ConfinedCommands]:
    made = ConfinedCommands("auto")
    yield made
    made.close()


def test_a_command_sees_the_tree_and_its_end_is_said(commands: ConfinedCommands) -> None:
    said = commands.run(TREE, "cat pkg/core.py; wc -c < data.bin; echo trouble >&2; exit 3", timeout_s=10)
    assert "LIMIT = 3\n256\n" in said
    assert "trouble" in said
    assert said.endswith("[exit status 3]")


def test_every_command_has_a_fresh_copy(commands: ConfinedCommands) -> None:
    commands.run(TREE, "echo changed > pkg/core.py; touch new", timeout_s=10)
    assert commands.run(TREE, "cat pkg/core.py; ls", timeout_s=10).startswith("LIMIT = 3\ndata.bin\npkg\n")


def test_python_can_be_run(commands: ConfinedCommands) -> None:
    said = commands.run(TREE, 'python3 -c "from pkg.core import LIMIT; print(LIMIT + 1)"', timeout_s=20)
    assert said.startswith("4\n")


def test_nothing_outside_is_reached(commands: ConfinedCommands, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("treasure")
    os.environ["GAGAR_TEST_KEY"] = "treasure"
    try:
        said = commands.run(TREE, f"cat {secret}; env; cat /proc/*/environ", timeout_s=10)
    finally:
        del os.environ["GAGAR_TEST_KEY"]
    assert "treasure" not in said
    network = "import socket; socket.create_connection(('127.0.0.1', 22), 2)"
    assert "Error" in commands.run(TREE, f'python3 -c "{network}"', timeout_s=20)


def test_limits_end_a_command(commands: ConfinedCommands) -> None:
    assert commands.run(TREE, "sleep 60", timeout_s=0.5).endswith("[killed after 0.5 s]")
    assert "bytes of output]" in commands.run(TREE, "yes", timeout_s=20)


@pytest.mark.parametrize("path", ["../out.py", "/etc/out.py", "a/../../out.py"])
def test_no_file_is_written_outside_the_tree(commands: ConfinedCommands, path: str) -> None:
    with pytest.raises(ValueError, match="leaves the tree"):
        commands.run({path: b""}, "true", timeout_s=5)


def test_a_graders_command_runs_the_candidates_own_tree(commands: ConfinedCommands) -> None:
    """With the whole base tree of a real task, and the record that evidence is checked against."""
    tasks_dir = tiny_tasks()
    task = load_tasks(tasks_dir)[0]
    assert isinstance(CODE_REPAIR, Repositories)
    assert isinstance(CODE_REPAIR, Confining)
    base = CODE_REPAIR.base_tree(tasks_dir, task)
    ticket = Ticket(0, 4, task["instance_id"])
    outcome = Outcome(Status.PASSED, StopReason.SUBMITTED)
    member = Trajectory(ticket, 0, [1, 2], [0, 1], [0.0, -1.0], "prompt", [], outcome, b"")
    workspace = Workspace(Group(0, task, [member]), [4], base)
    tools = Toolbox(workspace, Fence(), commands, command_s=20, total_command_s=40, limit=5000)
    answer = tools.call("run", json.dumps({"candidate": "c01", "command": f"head -c 40 {task['path']}"}))
    first = base[task["path"]][:40].decode()
    assert first in answer
    assert first in tools.commands[4][f"head -c 40 {task['path']}"][0]
    spent = Toolbox(workspace, Fence(), commands, command_s=20, total_command_s=0, limit=5000)
    assert "used up" in spent.call("run", json.dumps({"candidate": "c01", "command": "true"}))
