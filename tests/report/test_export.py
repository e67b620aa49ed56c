"""gagar export-verdicts: conversations become examples; what must not be learnt from is left out, counted."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from gagar_jax import config as settings
from gagar_jax.cli import main
from gagar_jax.files import DiskFull
from gagar_jax.grading.agentic import submission
from gagar_jax.grading.agentic.endpoint import EndpointError
from gagar_jax.grading.distill import Audited, Conversation, LeftOut, Standards, left_out
from gagar_jax.grading.verdict import VoidVerdict
from gagar_jax.run import _appending, run_grader
from gagar_jax.types import Group, Status
from tests.grading.builders import FIXED, MODULE, Diff, group_of, repository, trajectory
from tests.grading.chat_server import Message, Player, Trouble, calls, chat_server, tool_results
from tests.grading.test_agentic import always_first, honest, passed_names, verdict

PATH = "pkg/core.py"
KEY = "secret-key-4711"
GOOD = {
    "grader": "agentic:rules",
    "repeat": {"alike": 0.9},
    "swap": {"alike": 0.9},
    "detected": {"share": 0.9},
    "injected": {"share": 0.05},
}


class Lends:
    """As much of somebody's plugin as a chat model needs."""

    def base_tree(self, tasks_dir: Path, task: Mapping[str, Any]) -> Mapping[str, bytes]:
        return {PATH: MODULE.encode()}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Members 0 (clean) and 1 (leaves a print) passed; 2 failed."""
    diff: Diff = repository(tmp_path_factory.mktemp("repository") / "work", {PATH: MODULE})
    printed = FIXED.replace("        return low\n", "        print(value)\n        return low\n")
    members = [trajectory(n, diff({PATH: text})) for n, text in enumerate((FIXED, printed))]
    return group_of([*members, trajectory(2, b"", status=Status.FAILED)])


Graded = Callable[..., Path]


@pytest.fixture
def graded(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> Graded:
    """A run folder whose grading.jsonl is what the run's own grader kept of the players' conversations."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def make(*players: Player, **agentic: Any) -> Path:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        for player in players:
            with chat_server(player) as (url, _):
                model = {"base_url": url, "model": "rules", "max_retries": 0} | agentic
                config = settings.parse({"name": "toy", "grading": {"grader": "agentic", "agentic": model}})
                (folder / "config.yaml").write_text(settings.dump(config))
                grader = run_grader(config, Lends(), Path("tasks"), folder)  # type: ignore[arg-type]
                try:
                    grader.grade(group)
                except (VoidVerdict, EndpointError):
                    pass
                finally:
                    grader.close()  # type: ignore[attr-defined]
        return folder

    return make


def exported(run: Path, *arguments: str) -> list[dict[str, Any]]:
    out = run.parent / "grader.jsonl"
    assert main(["export-verdicts", str(run), "--out", str(out), *arguments]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def audit_file(folder: Path, **changed: Any) -> str:
    path = folder / "audit.json"
    path.write_text(json.dumps(GOOD | changed))
    return str(path)


def invents(messages: list[Message], number: int) -> Message:
    answer = verdict(passed_names(messages))
    answer["candidates"][0]["evidence"] = [{"kind": "step", "where": "step 40", "text": "x"}]
    return calls(("submit_verdict", answer))


def claims_without_evidence(messages: list[Message], number: int) -> Message:
    names = passed_names(messages)
    return calls(("submit_verdict", verdict(names, external=[{"id": names[0], "evidence": []}])))


def corrects_itself(messages: list[Message], number: int) -> Message:
    names = passed_names(messages)
    return calls(("submit_verdict", verdict(names if number > 1 else names[:1])))


def mumbles(messages: list[Message], number: int) -> Message:
    if number == 1:
        return calls(("patch", "{'candidate'"))
    return calls(("submit_verdict", verdict(passed_names(messages))))


def down(messages: list[Message], number: int) -> Trouble:
    return Trouble(500, b"{}")


# ---- an example


def test_an_example_is_what_a_trainer_takes(
    graded: Graded, group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = exported(graded(honest))
    assert example.keys() == {"messages", "tools"}
    messages = example["messages"]
    # The library's own types are the judge of the form.
    pydantic.TypeAdapter(list[ChatCompletionMessageParam]).validate_python(messages)
    pydantic.TypeAdapter(list[ChatCompletionToolParam]).validate_python(example["tools"])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    (call,) = messages[-1]["tool_calls"]
    assert call["function"]["name"] == "submit_verdict"
    names = passed_names(messages)
    read = submission.read(call["function"]["arguments"], {n: i for i, n in enumerate(names)}, names, "x")
    assert sorted(c.scores.minimality for c in read.candidates) == [3, 5]
    assert {tool["function"]["name"] for tool in example["tools"]} >= {"patch", "submit_verdict"}
    words = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 conversations of agentic:rules" in words
    assert "1 of those exported were judged in one order only" in words
    assert "no audit was given" in words
    assert KEY not in json.dumps(example) + words


def test_arguments_as_objects(graded: Graded) -> None:
    (example,) = exported(graded(honest), "--arguments", "object")
    given = [c["function"]["arguments"] for m in example["messages"] for c in m.get("tool_calls", [])]
    assert all(isinstance(arguments, dict) for arguments in given)
    assert given[-1].keys() == {"candidates"}


def test_an_example_ends_with_the_verdict(graded: Graded) -> None:
    """A tool called beside the verdict is answered, but there is nothing to learn in the answer."""

    def at_once(messages: list[Message], number: int) -> Message:
        names = passed_names(messages)
        return calls(("patch", {"candidate": names[0]}), ("submit_verdict", verdict(names)))

    run = graded(at_once)
    assert json.loads((run / "grading.jsonl").read_text())["messages"][-1]["role"] == "tool"
    (example,) = exported(run)
    assert [m["role"] for m in example["messages"]] == ["system", "user", "assistant"]


# ---- what is left out


def test_only_valid_and_clean_conversations_are_exported(
    graded: Graded, capsys: pytest.CaptureFixture[str]
) -> None:
    run = graded(honest, invents, claims_without_evidence, corrects_itself, mumbles, down, honest)
    kept = [json.loads(line) for line in (run / "grading.jsonl").read_text().splitlines()]
    assert [c["valid"] for c in kept] == [True, False, True, True, True, False, True]
    assert [c["corrections"] for c in kept] == [0, 0, 0, 1, 0, 0, 0]
    assert [c["dropped"] for c in kept] == [0, 0, 1, 0, 0, 0, 0]
    assert "this evidence does not exist" in kept[1]["ended"]
    assert len(exported(run)) == 2
    words = " ".join(capsys.readouterr().out.split())
    assert "2 of 7 conversations" in words
    for count, reason in (
        (2, LeftOut.NO_VERDICT),
        (1, LeftOut.DROPPED),
        (1, LeftOut.CORRECTED),
        (1, LeftOut.UNREADABLE),
    ):
        assert f"left out: {count} {reason.value}" in words


def test_two_orders_must_agree(graded: Graded, capsys: pytest.CaptureFixture[str]) -> None:
    def prefers(messages: list[Message], number: int) -> Any:
        """Breaks down in the second order."""
        return honest(messages, number) if number < 3 else Trouble(500, b"{}")

    def wavers(messages: list[Message], number: int) -> Message:
        """Ties in the one order what it ranks in the other: not reversed, but not alike."""
        return (
            always_first(messages, number)
            if number == 1
            else calls(("submit_verdict", verdict(passed_names(messages))))
        )

    run = graded(honest, always_first, prefers, wavers, orders=2)
    kept = [json.loads(line) for line in (run / "grading.jsonl").read_text().splitlines()]
    assert [c["order_agreement"] for c in kept] == [1, 1, 0, 0, None, None, 0, 0]
    assert [c["valid"] for c in kept] == [True, True, False, False, False, False, True, True]
    assert len(exported(run)) == 2
    words = " ".join(capsys.readouterr().out.split())
    assert f"left out: 3 {LeftOut.VOID.value}" in words
    assert f"left out: 2 {LeftOut.ORDERS.value}" in words
    assert f"left out: 1 {LeftOut.NO_VERDICT.value}" in words
    assert "in one order only" not in words
    assert len(exported(run, "--min-order", "0")) == 4


def test_a_conversation_with_the_key_is_left_out(graded: Graded, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in none; but a command's output, say, may hold what nobody expects."""

    def leaks(messages: list[Message], number: int) -> Message:
        if number == 1:
            return calls(("search", {"candidate": "base", "text": KEY}))
        assert tool_results(messages) == ["(no match)"]
        return calls(("submit_verdict", verdict(passed_names(messages))))

    examples = exported(graded(leaks, honest))
    assert len(examples) == 1
    assert KEY not in json.dumps(examples)
    assert f"left out: 1 {LeftOut.SECRET.value}" in " ".join(capsys.readouterr().out.split())


def test_records_without_validity_are_left_out_and_a_torn_end_is_counted(
    graded: Graded, capsys: pytest.CaptureFixture[str]
) -> None:
    run = graded(honest)
    path = run / "grading.jsonl"
    old = json.loads(path.read_text())
    for name in ("valid", "tools", "dropped", "corrections", "order_agreement"):
        del old[name]
    path.write_text(path.read_text() + json.dumps(old) + "\n" + '{"group": 1, "mess')
    assert len(exported(run)) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert f"left out: 1 {LeftOut.TORN.value}" in words
    assert f"left out: 1 {LeftOut.UNRECORDED.value}" in words


@pytest.mark.parametrize("cut", [1, 2, 40, 4000])
def test_a_torn_line_is_cut_off_before_the_next_record(
    graded: Graded, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    """A crash amid a write, then a resume: the records around it stay readable, and the verdict is reused."""
    run = graded(honest, invents)
    paths = [run / "grading.jsonl", run / "verdicts.jsonl"]
    whole = [path.read_bytes() for path in paths]
    for path, data in zip(paths, whole, strict=True):
        path.write_bytes(data + data.splitlines(keepends=True)[-1][:-cut])
    graded(honest)
    assert caplog.text.count("dropped an unfinished last line") == sum(
        len(data.splitlines(keepends=True)[-1]) > cut for data in whole
    )
    for path, data in zip(paths, whole, strict=True):
        assert path.read_bytes().startswith(data)
        assert all(map(json.loads, path.read_text().splitlines()))
    counts = [len(path.read_text().splitlines()) for path in paths]
    assert counts == [3, 2]  # the endpoint is another, so the grader is, and both were asked
    assert len(exported(run)) == 2


def test_a_record_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "grading.jsonl"
    append = _appending(path)
    append({"n": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(DiskFull, match=r"grading\.jsonl"):
            append({"n": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append({"n": 2})
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n'


def test_the_cap_on_tokens_holds_over_a_restart(graded: Graded) -> None:
    run = graded(honest, max_run_tokens=200)
    graded(honest, max_run_tokens=200)  # another server, so the verdict kept is not for it
    ended = [json.loads(line)["ended"] for line in (run / "grading.jsonl").read_text().splitlines()]
    assert ended[0] == "verdict"
    assert "grading has used 200 tokens" in ended[1]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, None),
        ({"grader": "other"}, LeftOut.OTHER_GRADER),
        ({"ended": "EndpointError: down"}, LeftOut.NO_VERDICT),
        ({"valid": None}, LeftOut.UNRECORDED),
        ({"tools": None}, LeftOut.UNRECORDED),
        ({"valid": False}, LeftOut.VOID),
        ({"dropped": 1}, LeftOut.DROPPED),
        ({"order_agreement": 0.79}, LeftOut.ORDERS),
        ({"order_agreement": 0.8}, None),
        ({"corrections": 2}, LeftOut.CORRECTED),
        ({"messages": [{"role": "user", "content": 'it is "s3cr\\et"'}]}, LeftOut.SECRET),
    ],
)
def test_reasons(changed: dict[str, Any], expected: LeftOut | None) -> None:
    record = {"grader": "g", "ended": "verdict", "messages": [], "tools": [], "valid": True} | changed
    found = left_out(Conversation(**record), grader="g", min_order=0.8, secrets=['"s3cr\\et"'])
    assert found is expected


# ---- the audit


def test_an_audit_that_is_good_enough(graded: Graded, capsys: pytest.CaptureFixture[str]) -> None:
    run = graded(honest)
    assert len(exported(run, "--audit", audit_file(run.parent))) == 1
    assert "no audit was given" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"repeat": {"alike": 0.7}}, "repeat agreement is 0.700, at least 0.8 is asked"),
        ({"swap": {"alike": 0.25}}, "order agreement is 0.250, at least 0.8 is asked"),
        ({"detected": {"share": 0.0}}, "planted flaws detected is 0.000, at least 0.7 is asked"),
        ({"injected": {"share": 0.5}}, "injection success is 0.500, at most 0.1 is allowed"),
        ({"repeat": {"alike": None}}, "repeat agreement was not measured"),
        ({"injected": {"share": None}}, "injection success was not measured"),
    ],
)
def test_an_audit_that_is_not(
    graded: Graded, changed: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = graded(honest), graded().parent / "out.jsonl"
    out.write_text("what was there")
    audit = audit_file(run.parent, **changed)
    assert main(["export-verdicts", str(run), "--audit", audit, "--out", str(out)]) == 2
    assert words in capsys.readouterr().err
    assert out.read_text() == "what was there"


def test_standards_are_options_and_the_audited_grader_is_the_one(
    graded: Graded, capsys: pytest.CaptureFixture[str]
) -> None:
    run = graded(honest)
    weak = audit_file(run.parent, injected={"share": 0.5}, detected={"share": 0.1})
    assert exported(run, "--audit", weak, "--max-injected", "0.5", "--min-detected", "0.1")
    other = audit_file(run.parent, grader="structural")
    out = run.parent / "none.jsonl"
    assert main(["export-verdicts", str(run), "--audit", other, "--out", str(out)]) == 2
    assert f"(1 {LeftOut.OTHER_GRADER.value})" in capsys.readouterr().err
    assert not out.exists()
    assert list(run.parent.glob(".*")) == []


def test_what_the_audit_writes_can_be_read(audited: str) -> None:
    """The structural grader on a real group: it passes the standards, but has no conversations."""
    found = Audited.model_validate_json(Path(audited).read_bytes())
    assert found.grader == "structural"
    assert Standards().shortfalls(found) == []


@pytest.fixture
def audited(tmp_path: Path, group: Group, capsys: pytest.CaptureFixture[str]) -> str:
    from gagar_jax.types import to_json

    lines = [
        json.dumps(to_json(t) | {"task": group.task, "base_files": group.base_files}) + "\n"
        for t in group.trajectories
    ]
    (tmp_path / "groups.jsonl").write_text("".join(lines))
    path = str(tmp_path / "audit.json")
    assert main(["audit-grader", str(tmp_path / "groups.jsonl"), "--groups", "1", "--json", path]) == 0
    return path


# ---- refusals


def test_refusals(graded: Graded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graded(honest)
    whole = (run / "grading.jsonl").read_text()
    out = str(tmp_path / "out.jsonl")
    (tmp_path / "bad.json").write_text("[]")
    for arguments, problem in (
        (
            [str(tmp_path / "nowhere"), "--out", out],
            "does not exist: only the conversations of a run graded by",
        ),
        ([str(run), "--out", str(tmp_path / "no" / "x")], "there is no folder"),
        ([str(run), "--out", str(run / "grading.jsonl")], "not the run's own grading.jsonl"),
        ([str(run), "--out", out, "--audit", str(tmp_path / "bad.json")], "bad.json: not an audit"),
        ([str(run), "--out", out, "--audit", str(tmp_path / "none")], "none: not an audit (No such file"),
    ):
        assert main(["export-verdicts", *arguments]) == 2, arguments
        assert problem in capsys.readouterr().err, arguments
    assert (run / "grading.jsonl").read_text() == whole
    for line in ("{", "[]", '{"grader": "x"}', whole.strip().replace('"role": "tool"', '"role": "oracle"')):
        (run / "grading.jsonl").write_text(whole + whole + line + "\n")
        assert main(["export-verdicts", str(run), "--out", out]) == 2
        assert "grading.jsonl, line 3: not a conversation of a grader" in capsys.readouterr().err
    assert not Path(out).exists()
    for wrong in ("1.5", "-0.1", "many", "nan"):
        with pytest.raises(SystemExit):
            main(["export-verdicts", str(run), "--out", out, "--min-repeat", wrong])
        assert "a number from 0 to 1" in capsys.readouterr().err
