"""gagar grade and gagar audit-grader: stored groups read back whole, sheets, agreement, refusals by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gagar_jax import config as settings
from gagar_jax.cli import main
from gagar_jax.files import DiskFull
from gagar_jax.grading.regrade import regrade
from gagar_jax.report import audit as audit_report
from gagar_jax.report import groups as stored_groups
from gagar_jax.report.grade import sheet, summary
from gagar_jax.report.groups import Surroundings, read_groups
from gagar_jax.types import (
    CandidateVerdict,
    Evidence,
    Flag,
    Group,
    GroupVerdict,
    Scores,
    Status,
    Trajectory,
    UserError,
    to_json,
)
from tests.grading.builders import FIXED, MODULE, repository, trajectory
from tests.grading.chat_server import chat_server
from tests.grading.test_agentic import honest

TASK = {"instance_id": "pkg__1", "split": "train", "problem_statement": "clamp is wrong"}
PATH = "pkg/core.py"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    """Two passes, the second with a print, and a failure, of group 3; group 4 has one pass."""
    diff = repository(tmp_path_factory.mktemp("repository") / "work", {PATH: MODULE})
    printed = FIXED.replace("        return low\n", "        print(value)\n        return low\n")
    wrong = MODULE.replace("return value", "return low")
    return [
        trajectory(0, diff({PATH: FIXED}), group=3),
        trajectory(1, diff({PATH: printed}), group=3),
        trajectory(2, diff({PATH: wrong}), group=3, status=Status.FAILED),
        trajectory(0, diff({PATH: FIXED}), group=4),
        trajectory(1, b"\xff not a patch", group=4, status=Status.FAILED),
    ]


def run_folder(folder: Path, members: list[Trajectory], *, whole: bool = True) -> Path:
    """As the loop writes it; `whole` False is as it did before it stored tasks and base files."""
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text(settings.dump(settings.parse({"name": "toy"})))
    lines = []
    for member in members:
        extra: dict[str, Any] = {"reward": 1.0, "tier": None}
        if whole and member.ticket.member == 0:
            extra |= {"task": TASK, "base_files": {PATH: MODULE}}
        lines.append(json.dumps(to_json(member) | extra) + "\n")
    (folder / "trajectories" / "step_00000.jsonl").write_text("".join(lines))
    (folder / "trajectories" / "step_00001.journal.jsonl").write_text("not this one")
    return folder


class Plugin:
    """As much of somebody's plugin as reading groups needs."""

    def prepare(self, tasks: dict[str, Any], **_: Any) -> Path:
        return Path("tasks")

    def load(self, tasks_dir: Path) -> list[dict[str, Any]]:
        return [TASK]


class WithTrees(Plugin):
    def base_tree(self, tasks_dir: Path, task: Mapping[str, Any]) -> Mapping[str, bytes]:
        assert task == TASK
        return {PATH: MODULE.encode()}


def test_groups_are_read_back_whole(tmp_path: Path, members: list[Trajectory]) -> None:
    source = run_folder(tmp_path / "run", members)
    first, second = read_groups(source, Surroundings(settings.Config()))
    assert first == Group(3, TASK, members[:3], {PATH: MODULE})
    assert (second.group, second.trajectories[1].patch) == (4, b"\xff not a patch")
    (only,) = read_groups(source, Surroundings(settings.Config()), only=[4])
    assert only == second


def test_a_run_that_stored_less_is_completed_by_the_environment(
    tmp_path: Path, members: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = run_folder(tmp_path / "run", members, whole=False)
    monkeypatch.setattr(stored_groups, "environment_plugin", lambda env_id: WithTrees())
    found = list(read_groups(source, Surroundings(settings.Config())))
    assert found == list(read_groups(run_folder(tmp_path / "new", members), Surroundings(settings.Config())))


def test_what_cannot_be_completed_is_said(
    tmp_path: Path, members: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = run_folder(tmp_path / "run", members, whole=False)
    monkeypatch.setattr(stored_groups, "environment_plugin", lambda env_id: Plugin())
    with pytest.raises(UserError, match=r"step_00000.jsonl, group 3: the text of pkg/core.py"):
        list(read_groups(source, Surroundings(settings.Config())))
    monkeypatch.setattr(Plugin, "load", lambda self, tasks_dir: [])
    with pytest.raises(UserError, match="has no task 'pkg__1'"):
        list(read_groups(source, Surroundings(settings.Config())))


@pytest.mark.parametrize("line", ["{", "[]", '{"ticket": {"group": 0}}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, (line 1|group 0): not a trajectory"):
        list(read_groups(tmp_path / "a.jsonl", Surroundings(settings.Config())))


def test_sheets_of_a_run(
    tmp_path: Path,
    members: list[Trajectory],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    source = run_folder(tmp_path / "run", members)
    assert main(["grade", str(source)]) == 0
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    assert "group 3 · pkg__1 · 3 valid, 2 passed · structural" in words
    assert "1 0 1 1 5 5 5 5 5" in words
    assert "2 1 2 0.85 5 5 2 4 3" in words
    assert "pkg/core.py:14 print(value)" in words
    assert "group 4" not in printed, "it has nothing to rank"
    assert "2 groups: 1 graded, 1 one_passed · 2 members: tier 1 0.500, tier 2 0.500, tier 3 0.000" in words
    assert main(["grade", str(source), "--groups", "4", "--grading.tier2_best", "0.7"]) == 0
    assert "not graded: one passed member" in capsys.readouterr().out
    assert main(["grade", str(source), "--groups", "3", "--grading.tier2_best", "0.7"]) == 0
    assert "2 1 2 0.7 5" in " ".join(capsys.readouterr().out.split())


def test_a_file_alone_is_enough(
    tmp_path: Path, members: list[Trajectory], capsys: pytest.CaptureFixture[str]
) -> None:
    source = run_folder(tmp_path / "run", members) / "trajectories" / "step_00000.jsonl"
    alone = source.rename(tmp_path / "groups.jsonl")
    assert main(["grade", str(alone)]) == 0
    assert "2 groups: 1 graded" in capsys.readouterr().out


def test_two_graders_are_compared(
    tmp_path: Path, members: list[Trajectory], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["grade", str(run_folder(tmp_path / "run", members)), "--compare", "structural", "structural"])
        == 0
    )
    words = " ".join(capsys.readouterr().out.split())
    assert "both graded 1 of 1 groups" in words
    assert "pairs ordered the same way 1.000 1 of 1" in words
    assert "same tier 1.000 2 of 2" in words
    assert "tau-b, mean 1.000 1 of 1 groups" in words


def test_a_model_is_compared_and_its_tokens_are_counted(
    tmp_path: Path,
    members: list[Trajectory],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_groups, "environment_plugin", lambda env_id: WithTrees())
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    source = str(run_folder(tmp_path / "run", members[:3]))
    with chat_server(honest) as (url, requests):
        model = ["--grading.agentic.base_url", url, "--grading.agentic.model", "rules"]
        assert main(["grade", source, "--compare", "structural", "agentic", *model]) == 0
        assert "pairs ordered the same way 1.000 1 of 1" in " ".join(capsys.readouterr().out.split())
        assert main(["grade", source, "--grader", "agentic", *model]) == 0
    printed = capsys.readouterr().out
    assert "agentic:rules" in printed
    assert "patch pkg/core.py:14  print(value)" in printed
    assert "200 tokens" in printed
    assert len(requests) == 4


def test_refusals(tmp_path: Path, members: list[Trajectory], capsys: pytest.CaptureFixture[str]) -> None:
    source = str(run_folder(tmp_path / "run", members))
    for arguments, problem in (
        (["grade", str(tmp_path / "nowhere")], "no such run folder"),
        (["grade", str(tmp_path)], "no RL step of it has finished"),
        (["grade", source, "--groups", "3,9"], "has no group 9"),
        (["grade", source, "--grader", "nobody"], "no grader is called 'nobody'"),
        (["audit-grader", source, "--groups", "0"], "at least 1"),
        (["grade", source, "--grading.teir3", "0.1"], "tier3"),
    ):
        assert main(arguments) == 2, arguments
        assert problem in capsys.readouterr().err


def test_what_is_void_or_dropped_is_shown_with_its_reason(members: list[Trajectory]) -> None:
    group = Group(3, TASK, members[:3], {PATH: MODULE})
    five = Scores(5, 5, 5, 5, 5)

    class Careless:
        def __init__(self, evidence: Evidence | None) -> None:
            self.evidence = (evidence,) if evidence else ()

        def grade(self, group: Group) -> GroupVerdict:
            flagged = CandidateVerdict(0, five, {Flag.UNREQUESTED_REWRITE: self.evidence})
            return GroupVerdict("careless", (flagged, CandidateVerdict(1, five)))

    def shown(evidence: Evidence | None) -> str:
        result = regrade(Careless(evidence), group, settings.GradingConfig().tiers())
        return "\n".join(map(str, sheet(result))) + summary([result])

    assert "dropped, for it had no evidence: member 0: unrequested_rewrite" in shown(None)
    assert "claims dropped 1 of 1" in shown(None)
    made_up = shown(Evidence("patch", "pkg/core.py:1", "x\x1b[2J"))
    assert "not graded: the verdict is void: member 0: this evidence does not exist" in made_up
    assert "\x1b" not in made_up
    assert "1 groups: 0 graded, 1 void" in made_up
    real = shown(Evidence("step", "step 3", "submit"))
    assert "flag unrequested_rewrite" in real
    assert "      step 3  submit" in real


def test_the_audit_of_a_run(
    tmp_path: Path,
    members: list[Trajectory],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    source = run_folder(tmp_path / "run", members)
    assert main(["audit-grader", str(source), "--groups", "2", "--json", str(tmp_path / "audit.json")]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "structural: 1 stored and 1 planted groups" in words
    assert "clean above flawed 0.857 6 of 7" in words
    assert "reverted_hunk 0.000 0 of 1" in words
    assert "attacks that raised their member 0.000" in words
    assert json.loads((tmp_path / "audit.json").read_text())["injected"]["hits"] == 0
    asked: list[object] = []
    monkeypatch.setattr(audit_report, "audit", lambda *given, **named: asked.append(given))
    for path in (tmp_path / "no" / "audit.json", tmp_path):
        assert main(["audit-grader", str(source), "--json", str(path)]) == 2
        assert f"--json {path}: " in capsys.readouterr().err
    assert not asked
    monkeypatch.undo()
    nothing = run_folder(tmp_path / "other", members[3:])
    assert main(["audit-grader", str(nothing)]) == 2
    assert "no group with something to rank" in capsys.readouterr().err


def test_an_audit_that_cannot_be_written_is_printed(
    tmp_path: Path,
    members: list[Trajectory],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, content: str) -> None:
        raise DiskFull(f"No space left on the device while writing {path}")

    monkeypatch.setattr(audit_report, "write_atomic", full)
    source = run_folder(tmp_path / "run", members)
    assert main(["audit-grader", str(source), "--groups", "1", "--json", str(tmp_path / "audit.json")]) == 2
    shown = capsys.readouterr()
    assert "clean above flawed" in shown.out
    assert "No space left" in shown.err
