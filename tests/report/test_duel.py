"""gagar duel as a person meets it: two run folders in, a table and JSON out, refusals by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gagar_jax import config as settings
from gagar_jax.cli import main
from gagar_jax.files import DiskFull
from gagar_jax.report import duel as duel_report
from gagar_jax.report import groups as stored_groups
from gagar_jax.types import Status, Ticket, Trajectory, to_json
from tests.grading.builders import FIXED, MODULE, Diff, repository, trajectory
from tests.grading.chat_server import Message, calls, chat_server
from tests.grading.test_agentic import always_first, honest, passed_names, verdict

PATH = "pkg/core.py"
PRINTED = FIXED.replace("        return low\n", "        print(value)\n        return low\n")


@pytest.fixture(scope="module")
def change(tmp_path_factory: pytest.TempPathFactory) -> Diff:
    return repository(tmp_path_factory.mktemp("repository") / "work", {PATH: MODULE})


def attempt(task: str, group: int, member: int, patch: bytes, *, passed: bool = True) -> Trajectory:
    made = trajectory(member, patch, status=Status.PASSED if passed else Status.FAILED)
    return dataclasses.replace(made, ticket=Ticket(group, member, task))


def run_folder(folder: Path, members: list[Trajectory], name: str = "eval_rl_held_out") -> Path:
    """As an evaluation writes it, and with the task, so that no environment is needed."""
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(settings.dump(settings.parse({"name": "toy"})))
    lines = []
    for member in members:
        task = {"instance_id": member.ticket.instance_id, "problem_statement": "clamp is wrong"}
        extra: dict[str, Any] = {"task": task, "base_files": {PATH: MODULE}}
        lines.append(json.dumps(to_json(member) | extra) + "\n")
    (folder / "trajectories" / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path, change: Diff) -> tuple[str, str]:
    """B leaves a print on two tasks and does the third as A does; the fourth only A passes."""
    clean, printed = change({PATH: FIXED}), change({PATH: PRINTED})
    a = [attempt(task, n, 0, clean) for n, task in enumerate(("t0", "t1", "t2", "t3"))]
    b = [
        attempt(task, n, 1, patch)
        for n, (task, patch) in enumerate(zip(("t2", "t1", "t0"), (clean, printed, printed), strict=True))
    ]
    b.append(attempt("t3", 3, 1, b"", passed=False))
    return str(run_folder(tmp_path / "a", a)), str(run_folder(tmp_path / "b", b))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.usefixtures("wide")
def test_the_table_and_the_json(
    tmp_path: Path, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(["duel", *runs, "--split", "held_out", "--json", str(tmp_path / "duel.json")]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "structural: 3 tasks that both pass, of 4" in words
    assert "win rate, ties half 0.833 0.167 3" in words
    assert "unlike patches 1.000 0.000 2" in words
    assert "3 pairs: A better in 2, B in 0, 1 tied (1 identical patches, not asked about)" in words
    assert "both orders say the same of 2 of 2 judged pairs (1.000)" in words
    assert "4 of 4 verdicts usable" in words
    assert "95 % intervals, 10,000 resamples of the tasks, seed 0" in words
    found = json.loads((tmp_path / "duel.json").read_text())
    assert found["win_rate"] == {"mean": pytest.approx(5 / 6), "low": 0.5, "high": 1.0, "count": 3}
    assert found["measures"]["tier1"]["a"]["mean"] == 1
    assert found["measures"]["tier1"]["b"]["mean"] == 0
    assert found["tokens_a_verdict"] is None
    assert {"seed", "resamples", "level", "pairs_a_task", "causes", "external"} <= found.keys()
    assert {p: p.read_bytes() for p in before} == before, "nothing in a run folder is changed"


@pytest.mark.usefixtures("wide")
def test_settings_stages_and_files(
    tmp_path: Path, runs: tuple[str, str], change: Diff, capsys: pytest.CaptureFixture[str]
) -> None:
    a, _ = runs
    run_folder(Path(a), [attempt("t0", 0, 0, change({PATH: PRINTED}))], "eval_sft_held_out")
    files = [f"{a}/trajectories/eval_{stage}_held_out.jsonl" for stage in ("rl", "sft")]
    assert main(["duel", *files, "--grading.tier2_best", "0.7"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "coefficient f 1.000 0.700 0.300 1" in words
    assert main(["duel", a, a, "--split", "held_out", "--stage", "sft"]) == 0
    assert "1 pairs: A better in 0, B in 0, 1 tied" in " ".join(capsys.readouterr().out.split())


class Lends:
    """As much of somebody's plugin as a chat model needs."""

    def prepare(self, tasks: dict[str, Any], **_: Any) -> Path:
        return Path("tasks")

    def load(self, tasks_dir: Path) -> list[dict[str, Any]]:
        return []

    def base_tree(self, tasks_dir: Path, task: Mapping[str, Any]) -> Mapping[str, bytes]:
        return {PATH: MODULE.encode()}


@pytest.mark.usefixtures("wide")
def test_a_chat_model_is_asked_in_both_orders(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_groups, "environment_plugin", lambda env_id: Lends())
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key-123")

    def asked(player: Any, *more: str) -> tuple[str, list[dict[str, Any]]]:
        with chat_server(player) as (url, requests):
            model = ["--grading.agentic.base_url", url, "--grading.agentic.model", "rules"]
            arguments = ["--split", "held_out", "--grader", "agentic", *model, *more]
            assert main(["duel", *runs, *arguments]) == 0
        return " ".join(capsys.readouterr().out.split()), requests

    words, requests = asked(honest, "--grading.agentic.orders", "2")
    assert "agentic:rules: 3 tasks that both pass" in words
    assert "A better in 2, B in 0, 1 tied" in words
    assert "200 tokens" in words
    assert len(requests) == 8, "two pairs, two orders, two turns; orders: 2 asks no more here"
    shown = json.dumps(requests)
    for of_a_run in ("/a", "/b", "eval_rl", "toy"):
        assert of_a_run not in shown, "the grader must not know whose work it sees"

    words, _ = asked(always_first)
    assert "win rate, ties half 0.500" in words
    assert "both orders say the same of 0 of 2 judged pairs" in words

    def invents(messages: list[Message], number: int) -> Message:
        answer = verdict(passed_names(messages))
        item = {"kind": "step", "where": "step 40", "text": "x"}
        answer["candidates"][0]["evidence"] = [item] * (number % 2)
        return calls(("submit_verdict", answer))

    words, _ = asked(invents)
    assert "1 tied (1 identical patches, not asked about), 2 without a result" in words
    assert "2 of 4 verdicts usable, 2 void" in words
    assert "void: member 0: this evidence does not exist" in words


def test_a_duel_that_cannot_be_written_is_printed(
    tmp_path: Path,
    runs: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, content: str) -> None:
        raise DiskFull(f"No space left on the device while writing {path}")

    monkeypatch.setattr(duel_report, "write_atomic", full)
    assert main(["duel", *runs, "--split", "held_out", "--json", str(tmp_path / "duel.json")]) == 2
    shown = capsys.readouterr()
    assert "win rate, ties half" in shown.out
    assert "No space left" in shown.err


def test_refusals(
    tmp_path: Path, runs: tuple[str, str], change: Diff, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = runs
    other = str(run_folder(tmp_path / "other", [attempt("u", 0, 0, change({PATH: FIXED}))]))
    failed = [attempt("t0", 0, 0, b"", passed=False)]
    never = str(run_folder(tmp_path / "never", failed))
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "config.yaml").write_text(settings.dump(settings.parse({"name": "toy"})))
    split = ["--split", "held_out"]
    torn = str(run_folder(tmp_path / "torn", []))
    path = Path(torn, "trajectories", "eval_rl_held_out.jsonl")
    path.write_text(Path(a, "trajectories", path.name).read_text() + '{"ticket": \n')
    for arguments, problem in (
        ([a, b], "name the split with --split; " + a + " has held_out"),
        ([a, b, "--split", "train"], "no evaluation of the split 'train' (--split); it has held_out"),
        ([a, b, *split, "--stage", "sft"], f"Run: gagar eval {a} --stage sft"),
        ([a, str(trained), *split], f"{trained} has no trajectories/eval_rl_*.jsonl"),
        ([a, str(tmp_path), *split], "is not the folder of a run"),
        ([a, str(tmp_path / "nowhere"), *split], "is not the folder of a run"),
        ([a, other, *split], "4 of them passed"),
        ([a, never, *split], "there is no task that both pass"),
        ([a, torn, *split], "eval_rl_held_out.jsonl, line 5: not a trajectory"),
        ([a, b, *split, "--pairs", "0"], "--pairs is at least 1"),
        ([a, b, *split, "--grader", "nobody"], "no grader is called 'nobody'"),
        ([a, b, *split, "--grading.teir3", "0.1"], "tier3"),
        ([a, b, *split, "--json", str(tmp_path / "no" / "x.json")], "there is no folder"),
        ([a, b, *split, "--json", str(tmp_path)], "no file can be written there"),
    ):
        assert main(["duel", *arguments]) == 2, arguments
        assert problem in capsys.readouterr().err, arguments
    with pytest.raises(SystemExit):
        main(["duel", a, b, *split, "--stage", "best"])
