"""The environment: Gymnasium's own checker, whole episodes, limits, byte-exact patches, faults."""

from __future__ import annotations

import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from envs.coding import env as env_module
from envs.coding import shared
from envs.coding.demonstrations import Problem
from envs.coding.env import CodeRepairEnv
from envs.coding.tasks import TaskError, load_tasks
from gagar_jax.types import Outcome, Status, StopReason
from tests.envs.tiny import tiny_tasks

pytestmark = pytest.mark.confined


@pytest.fixture
def env() -> Iterator[CodeRepairEnv]:
    made = CodeRepairEnv(tiny_tasks())
    yield made
    made.close()


@pytest.mark.parametrize(
    "text", ["<a.Key object at {}>", "<a.Key...{}>", "assert <Job at {}, ...> == <Job at {}, ...>"]
)
@pytest.mark.parametrize("cut", range(4))
def test_observations_do_not_hold_addresses(text: str, cut: int) -> None:
    shortened = "..." in text.split("{}")[0]
    addresses = [address[cut * shortened :] for address in ("0x7f3d9f403c90", "0x7fa118bab110")]
    first, second = (env_module.without_addresses(text.replace("{}", a)) for a in addresses)
    assert first == second
    kept = "KeyError: 'deadbeef' 0xff"
    assert env_module.without_addresses(kept) == kept


def some_task(qualname: str = "clamp") -> dict[str, Any]:
    return next(task for task in load_tasks(tiny_tasks()) if task["qualname"] == qualname)


def start(env: CodeRepairEnv, task: dict[str, Any]) -> tuple[str, list[str]]:
    """The prompt, and the edits that repair the task."""
    prompt, info = env.reset(options={"instance_id": task["instance_id"]})
    assert info == {"instance_id": task["instance_id"], "tool_s": 0.0}
    problem = Problem(task, env.package(task))
    return prompt, problem.changes(problem.fixed)


def finish(env: CodeRepairEnv, actions: list[str]) -> tuple[float, dict[str, Any]]:
    for action in actions[:-1]:
        _, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info["malformed"]) == (0.0, False, False, False)
    _, reward, terminated, truncated, info = env.step(actions[-1])
    assert terminated or truncated, actions
    return reward, info


def test_passes_gymnasium_checker_by_its_id() -> None:
    env = gymnasium.make("envs:gagar/CodeRepair-v0", tasks_dir=tiny_tasks())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)
    env.close()
    assert env.metadata["final_action"] == "submit"


def test_a_repair_passes_and_its_patch_is_the_reference(env: CodeRepairEnv) -> None:
    task = some_task()
    prompt, fix = start(env, task)
    assert prompt.startswith(f"{task['problem_statement']} It is in\ntiny/__init__.py clamp\n1|def clamp(")
    assert prompt in env.observation_space
    reward, info = finish(env, ["test", *fix, "test", "submit"])
    outcome = info["outcome"]
    assert (reward, outcome.status, outcome.stop) == (1.0, Status.PASSED, StopReason.SUBMITTED)
    body = [line for line in task["patch"].splitlines() if line[:3] not in ("---", "+++") and line[0] in "+-"]
    made = [
        line
        for line in info["patch"].decode().splitlines()
        if line[:3] not in ("---", "+++") and line[0] in "+-"
    ]
    assert made == body
    assert info["base_files"] == {task["path"]: env.package(task).broken(task).decode()}


def test_tests_tell_counts_and_the_first_failure(env: CodeRepairEnv) -> None:
    task = some_task()
    _, fix = start(env, task)
    total = len(task["FAIL_TO_PASS"]) + len(task["PASS_TO_PASS"])
    said, *_, info = env.step("test")
    assert said.startswith(f"{len(task['FAIL_TO_PASS'])} of {total} tests fail\ntest_clamp")
    assert info["tool_s"] > 0
    for action in fix:
        env.step(action)
    assert env.step("test")[0] == f"all {total} tests pass"


def test_nothing_done_fails_and_says_so(env: CodeRepairEnv) -> None:
    task = some_task()
    start(env, task)
    reward, info = finish(env, ["submit"])
    assert reward == 0.0
    assert info["outcome"] == Outcome(
        Status.FAILED, StopReason.SUBMITTED, "nothing was changed", tuple(task["FAIL_TO_PASS"]), cached=True
    )
    assert info["patch"] == b""


def test_a_wrong_edit_fails_with_the_tests_named(env: CodeRepairEnv) -> None:
    start(env, some_task())
    reward, info = finish(env, ["edit 7-11\n    return value * 3 + 1", "submit"])
    assert (reward, info["outcome"].status) == (0.0, Status.FAILED)
    assert info["outcome"].reason
    assert "tests/test_tiny.py::test_clamp" in info["outcome"].failed_tests


DEEP = {
    "signs": "y = " + "-" * 3000 + "1",
    "attributes": "y = a" + ".b" * 6000,
    "lambdas": "y = " + "lambda: " * 2000 + "1",
    "brackets": "y = " + "(" * 3000 + ")" * 3000,
    "calls": "y = " + "f(" * 150 + ")" * 150,
    "sums": "y = 1" + "+1" * 6000,
    "blocks": "\n".join(" " * n + "if 1:" for n in range(120)),
    "a NUL": "y = '\0'",
    "half a character": "y = '\ud800'",
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("first", ["view clamp", "view tiny/__init__.py 1-30"])
def test_what_an_agent_writes_is_judged_however_it_parses(env: CodeRepairEnv, name: str, first: str) -> None:
    """No text of an agent's is a fault of the environment: that would spare it the failure."""
    start(env, some_task())
    edit = "edit 7-8\n" + "\n".join(f"    {line}" for line in DEEP[name].split("\n"))
    for action in (first, edit, "view clamp", "view count_above", "test"):
        assert env.step(action)[2:4] == (False, False)
    _, info = finish(env, ["submit"])
    assert info["outcome"].status is Status.FAILED
    assert info["outcome"].reason


def test_malformed_actions_are_answered_and_cost_a_turn() -> None:
    env = CodeRepairEnv(tiny_tasks(), max_turns=2)
    start(env, some_task())
    said, _, terminated, truncated, info = env.step("please fix it")
    assert said.startswith("no command 'please'. use: view NAME")
    assert info["malformed"]
    assert not terminated
    assert not truncated
    _, _, terminated, truncated, info = env.step("view clamp")
    assert (terminated, truncated, info["outcome"].stop) == (False, True, StopReason.TURN_LIMIT)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("submit")
    env.close()


def test_the_turn_limit_judges_the_state_as_it_stands() -> None:
    task = some_task()
    env = CodeRepairEnv(tiny_tasks(), max_turns=1)
    _, fix = start(env, task)
    assert len(fix) == 1
    reward, info = finish(env, fix)
    assert (reward, info["outcome"].stop) == (1.0, StopReason.TURN_LIMIT)
    env.close()


def test_the_tool_time_limit_ends_the_episode() -> None:
    env = CodeRepairEnv(tiny_tasks(), tool_time_s=1e-6)
    start(env, some_task("Stack.push"))
    env._shared.verifier.run("tiny", {}, None)  # a server is there, so that only the run's own time counts
    _, _, _, truncated, info = env.step("test")
    assert truncated
    assert info["outcome"].stop is StopReason.TOOL_TIME_LIMIT
    env.close()


@pytest.mark.parametrize(
    ("locate", "has", "lacks"),
    [
        ("none", "Fix the bug.", "tiny/"),
        ("file", "It is in tiny/__init__.py.", "1|"),
        ("line", "It is near line ", "??"),
    ],
)
def test_locate_is_the_difficulty_dial(locate: Any, has: str, lacks: str) -> None:
    env = CodeRepairEnv(tiny_tasks(), locate=locate)
    prompt, _ = start(env, some_task())
    assert has in prompt
    assert lacks not in prompt
    env.close()


def test_patches_are_byte_exact_whatever_the_tree_says(env: CodeRepairEnv, tmp_path: Path) -> None:
    """Untracked, ignored, binary, deleted and attribute-laden files all come back from `git apply`."""
    task = some_task()
    start(env, task)
    assert env._editor is not None
    workspace = env._editor.workspace
    root = Path(workspace.root)
    (root / ".gitignore").write_text("*\n")
    (root / ".gitattributes").write_text("* text eol=crlf ident -diff\n*.bin filter=lfs\n")
    (root / "tiny/new.py").write_bytes(b"# $Id$\r\nx = 1\n\n")
    (root / "tiny/blob.bin").write_bytes(bytes(range(256)))
    (root / 'sp ace"é.txt').write_text("no newline")
    (root / "LICENSE").unlink()
    (root / ".git/config").write_text("[core]\n\thooksPath = /tmp\n\tfsmonitor = touch pwned\n")
    (root / "tests/test_tiny.py").write_bytes(b"caf\xe9\n")
    changed = workspace.changed()
    patch = workspace.patch(changed)
    expected = workspace.template.files | changed
    target = tmp_path / "again"
    for path, data in workspace.template.files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(data)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=patch, cwd=target, check=True)
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == {path: data for path, data in expected.items() if data is not None}


def test_episodes_do_not_see_each_other(env: CodeRepairEnv) -> None:
    task = some_task()
    prompt, fix = start(env, task)
    env.step(fix[0])
    again, _ = start(env, task)
    assert again == prompt
    _, info = finish(env, ["submit"])
    assert info["patch"] == b""


def test_an_infrastructure_fault_is_an_invalid_outcome(
    env: CodeRepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    start(env, some_task())
    with monkeypatch.context() as patch:
        patch.setattr(env_module.tools.Editor, "edit", full)
        _, reward, _, truncated, info = env.step("edit 1\nx")
    assert (reward, truncated) == (0.0, True)
    assert info["outcome"].status is Status.INVALID
    assert info["outcome"].stop is StopReason.FAULT
    assert "No space left" in info["outcome"].reason
    with monkeypatch.context() as patch:
        patch.setattr(shared.Template, "workspace", full)
        prompt, info = env.reset(options={"instance_id": some_task()["instance_id"]})
    assert prompt
    assert "No space left" in info["fault"]
    *_, info = env.step("submit")
    assert info["outcome"].status is Status.INVALID
    _, fix = start(env, some_task())
    assert finish(env, [*fix, "submit"])[0] == 1.0


def test_unknown_instance_is_the_callers_error(env: CodeRepairEnv) -> None:
    with pytest.raises(TaskError, match="no task has the instance_id 'nope'"):
        env.reset(options={"instance_id": "nope"})


def test_reset_draws_by_seed_from_the_split() -> None:
    env = CodeRepairEnv(tiny_tasks(), split="train")
    drawn = [env.reset(seed=seed)[1]["instance_id"] for seed in (1, 2, 3, 1)]
    assert drawn[0] == drawn[3]
    train = {task["instance_id"] for task in load_tasks(tiny_tasks()) if task["split"] == "train"}
    assert set(drawn) <= train
    env.close()


def test_environments_share_one_verifier_and_the_last_ends_it() -> None:
    first, second = CodeRepairEnv(tiny_tasks()), CodeRepairEnv(tiny_tasks())
    assert first._shared is second._shared
    root = Path(first._shared.templates.root)
    first.close()
    first.close()
    assert root.is_dir()
    start(second, some_task())
    second.close()
    assert not root.exists()
    assert not shared._OPEN


def test_many_environments_in_threads_agree() -> None:
    tasks = load_tasks(tiny_tasks())[:8]
    rewards: dict[int, float] = {}
    errors: list[BaseException] = []

    def run(n: int) -> None:
        env = CodeRepairEnv(tiny_tasks())
        try:
            _, fix = start(env, tasks[n % len(tasks)])
            rewards[n] = finish(env, [*(fix if n % 2 else []), "submit"])[0]
        except BaseException as error:
            errors.append(error)
        finally:
            env.close()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert rewards == {n: float(n % 2) for n in range(24)}
