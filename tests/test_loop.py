"""The whole run on a small environment: the same twice, the same after stopping, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from gagar_jax import loop, run
from gagar_jax.checkpoint import Checkpoints
from gagar_jax.config import Config, parse
from gagar_jax.metrics import read_metrics
from gagar_jax.train.state import abstract_state, make_optimizer
from gagar_jax.types import UserError
from tests import echo
from tests.grading.chat_server import Message, Player, Trouble, calls, chat_server, tool_results

SETTINGS: dict[str, Any] = {
    "env": {"id": echo.ENV_ID, "workers": 3},
    "model": {
        "vocab_size": 361, "width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16,
        "mlp_width": 64,
    },
    "sft": {
        "steps": 240, "tokens_per_batch": 256, "demonstrations_per_task": 4, "optimizer": {"warmup_steps": 5},
    },
    "rollout": {
        "groups": 3, "group_size": 4, "lanes": 2, "lane_slots": 2, "max_prompt": 16, "max_observation": 8,
        "max_generated": 12, "max_continuation": 40, "decode_block": 2, "prefill_chunk": 4, "prefill_rows": 2,
    },
    "train": {"steps": 4, "row_length": 64, "row_bucket": 4, "microbatch_rows": 4, "checkpoint_every": 2},
    "eval": {"samples": 2, "max_tasks": 3},
    "mesh": {"data": 1, "model": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is found as if it were installed, and the mesh is one device as for a single process."""
    monkeypatch.setattr(run, "environment_plugin", lambda env_id: echo.EchoPlugin())
    one = jax.devices()[:1]
    make = run.sharding.make_mesh
    monkeypatch.setattr(run.sharding, "make_mesh", lambda **sizes: make(**sizes, devices=one))


def settings(folder: Path, **train: Any) -> Config:
    return parse(SETTINGS | {"run_dir": folder, "train": SETTINGS["train"] | train})


def params_of(config: Config) -> list[np.ndarray]:
    mesh = run.sharding.make_mesh(data=1, model=1)
    abstract = abstract_state(
        config.model, make_optimizer(config.train.optimizer, config.train.updates), mesh
    )
    found = Checkpoints(config.run_dir / "checkpoints", keep=2).restore(abstract)
    assert found is not None
    assert found.step == 4
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found.state)]


def same_numbers(folder: Path) -> list[dict[str, Any]]:
    """The RL metrics without what depends on the clock, on caches, or on how often the program started."""
    clocked = ("time", "_s", "per_s", "_ms", "programs_compiled", "cached")
    records = read_metrics(folder, "rl")
    return [{k: v for k, v in r.items() if not any(c in k for c in clocked)} for r in records]


def sampled(folder: Path) -> list[tuple[Any, ...]]:
    lines = [
        line
        for p in sorted(folder.glob("trajectories/step_*[0-9].jsonl"))
        for line in p.read_text().splitlines()
    ]
    keys = ("ticket", "tokens", "logprobs", "advantage", "quality", "patch")
    return [tuple(json.dumps(json.loads(line)[k]) for k in keys) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        _echo.__wrapped__(patch)  # type: ignore[attr-defined]
        loop.train(settings(folder))
    return folder


def test_a_run_leaves_what_a_person_can_read(whole: Path) -> None:
    for name in ("config.yaml", "summary.md", "curves.png", "log.txt", "eval_sft.json", "eval_rl.json"):
        assert (whole / name).stat().st_size > 0, name
    steps = read_metrics(whole, "rl")
    assert [s["step"] for s in steps] == [0, 1, 2, 3]
    assert sum(s["kept_groups"] for s in steps) > 0, "nothing was trained on"
    assert sum(s["graded_groups"] for s in steps) > 0, "nothing was graded"
    assert max(s["logprob_gap_max"] for s in steps) <= 1e-4
    assert len({s["programs_compiled"] for s in steps[1:]}) == 1
    trajectories = [
        json.loads(line)
        for p in whole.glob("trajectories/step_*.jsonl")
        for line in p.read_text().splitlines()
    ]
    assert len(trajectories) == 4 * 3 * 4
    assert {t["tier"] for t in trajectories} - {None}
    for t in trajectories:
        assert len(t["tokens"]) == len(t["loss_mask"]) == len(t["logprobs"])
    tasks = [t["ticket"]["instance_id"] for t in trajectories if t["ticket"]["member"] == 0]
    assert sorted(tasks) == sorted(2 * [f"say-{n}" for n in range(6)]), "every task once an epoch"


def test_the_same_seed_gives_the_same_run_whatever_the_timing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo, "DELAY_S", 0.03)
    loop.train(settings(tmp_path / "again"))
    assert sampled(tmp_path / "again") == sampled(whole)
    assert same_numbers(tmp_path / "again") == same_numbers(whole)
    for a, b in zip(params_of(settings(whole)), params_of(settings(tmp_path / "again")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_stop_and_resume_equals_going_through(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of step 3's rollout: what had finished is reused, and the end is the same."""
    monkeypatch.setattr(echo, "DELAY_S", 0.05)
    folder = tmp_path / "stopped"
    journal = folder / "trajectories" / "step_00003.journal.jsonl"

    def interrupt() -> None:
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 3):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.train(settings(folder))
    thread.join()
    finished = journal.read_bytes().count(b"\n")
    assert 3 <= finished < 12
    loop.train(settings(folder))
    log = (folder / "log.txt").read_text()
    assert f"{finished} of 12 trajectories were already there" in log
    assert sampled(folder) == sampled(whole)
    assert same_numbers(folder) == same_numbers(whole)
    for a, b in zip(params_of(settings(whole)), params_of(settings(folder)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_interrupt_while_a_step_is_recorded_repeats_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have moved on, the record has not: the step is done again, from checkpoint and journal."""
    folder = tmp_path / "recording"
    write = loop._write_trajectories

    def interrupted(run: Any, step: int, *rest: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt
        write(run, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_write_trajectories", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.train(settings(folder))
    loop.train(settings(folder))
    assert "12 of 12 trajectories were already there" in (folder / "log.txt").read_text()
    assert sampled(folder) == sampled(whole)
    assert same_numbers(folder) == same_numbers(whole)
    for a, b in zip(params_of(settings(whole)), params_of(settings(folder)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_interrupt_ends_a_wait_for_grades(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, release = threading.Event(), threading.Event()

    class Hangs:
        def grade(self, group: Any) -> Any:
            asked.set()
            release.wait(60)
            raise RuntimeError("let go")

    def interrupt() -> None:
        asked.wait(60)
        while not list((tmp_path / "run").glob("trajectories/step_00000.journal.jsonl")):
            time.sleep(0.01)
        time.sleep(1.0)  # the rollout has ended: its last group is one of those that hang
        os.kill(os.getpid(), signal.SIGINT)

    config = settings(tmp_path / "run")
    config = config.model_copy(
        update={
            "sft": config.sft.model_copy(update={"warm_start_from": whole}),
            "grading": config.grading.model_copy(update={"deadline_s": 60.0}),
        }
    )
    monkeypatch.setattr(loop, "run_grader", lambda *_: Hangs())
    threading.Thread(target=interrupt, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.train(config)
    assert time.monotonic() - started < 45
    release.set()
    assert asked.is_set()
    assert len(read_metrics(config.run_dir, "rl")) < 4  # the step under way is not recorded
    monkeypatch.undo()


def test_more_steps_go_on_from_the_end(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two-then-four"
    loop.train(settings(folder, steps=2))
    loop.train(settings(folder, steps=4))
    assert sampled(folder) == sampled(whole)
    assert (folder / "eval_rl.json").read_text() == (whole / "eval_rl.json").read_text()
    attempts = [p.read_text().splitlines() for p in folder.glob("trajectories/eval_rl_*.jsonl")]
    assert {json.loads(line)["version"] for lines in attempts for line in lines} == {4}
    for a, b in zip(params_of(settings(whole)), params_of(settings(folder)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_folder_belongs_to_one_configuration(whole: Path) -> None:
    with pytest.raises(UserError, match=r"train\.mode: sum_preserving → none.*--run-dir"):
        loop.train(settings(whole, mode="none"))


def test_evaluating_again_leaves_the_settings_and_refuses_unknown_splits(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    config = settings(tmp_path / "run")
    before = (config.run_dir / "config.yaml").read_text()

    def evaluated(*splits: str) -> dict[str, Any]:
        changed = config.model_copy(update={"eval": config.eval.model_copy(update={"splits": splits})})
        loop.evaluate(changed, stage="rl")
        return json.loads((config.run_dir / "eval_rl.json").read_text())

    whole_result = json.loads((whole / "eval_rl.json").read_text())
    assert evaluated("train") == {"train": whole_result["train"]}
    assert (config.run_dir / "config.yaml").read_text() == before
    attempts = {p: p.read_bytes() for p in config.run_dir.glob("trajectories/eval_rl_*.jsonl")}
    with pytest.raises(UserError, match=r"no split 'trian'; there are train, unseen_mutant"):
        evaluated("train", "trian")
    assert {p: p.read_bytes() for p in config.run_dir.glob("trajectories/eval_rl_*.jsonl")} == attempts


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    with run.Run(settings(tmp_path)), pytest.raises(UserError, match="another process"):
        run.Run(settings(tmp_path))


def test_another_run_can_start_from_a_warm_start(whole: Path, tmp_path: Path) -> None:
    config = settings(tmp_path / "other", mode="none", steps=1)
    config = config.model_copy(update={"sft": config.sft.model_copy(update={"warm_start_from": whole})})
    loop.train(config)
    assert not read_metrics(config.run_dir, "sft")
    assert json.loads((config.run_dir / "eval_sft.json").read_text()) == json.loads(
        (whole / "eval_sft.json").read_text()
    )


ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
import numpy as np, pytest
from gagar_jax import loop
from gagar_jax.files import DiskFull
from tests import test_loop

folder, whole = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)], check=True)
test_loop._echo.__wrapped__(pytest.MonkeyPatch())
config = test_loop.settings(folder / "run", keep_checkpoints=1)
config = config.model_copy(update={"sft": config.sft.model_copy(update={"warm_start_from": whole})})
for size in ("16k", "64k", "128k", "256k", "512k", "1m", "64m"):
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
    try:
        loop.train(config)
    except DiskFull as error:
        assert "No space left on the device while writing" in str(error), error
        print(size, "full")
    else:
        print(size, "done")
        break
alone, beside = test_loop.params_of(config), test_loop.params_of(test_loop.settings(whole))
assert all(np.array_equal(a, b) for a, b in zip(alone, beside, strict=True))
assert test_loop.sampled(config.run_dir) == test_loop.sampled(whole)
"""


@pytest.mark.confined
def test_a_run_goes_on_after_a_full_disk(whole: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [
            "unshare",
            "-Urm",
            sys.executable,
            "-W",
            "error",
            "-c",
            ON_A_SMALL_DISK,
            str(tmp_path / "small"),
            str(whole),
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    *before, last = run.stdout.split("\n")[:-1]
    assert last.endswith("done")
    assert len(before) >= 3, run.stdout


def reads_patches(messages: list[Message], number: int) -> Message:
    """A grader by rule: the longer a candidate's patch, the lower its minimality."""
    names = messages[1]["content"].rpartition("To be scored: ")[2].rstrip(".").split(", ")
    patches = tool_results(messages)
    if not patches:
        return calls(*[("patch", {"candidate": name}) for name in names])
    fewest = min(patch.count("\n+") for patch in patches)
    good = dict.fromkeys(("approach", "precision", "minimality", "side_effects", "consistency"), 5)
    candidates = [
        {"id": name, "scores": good | {"minimality": 5 if patch.count("\n+") == fewest else 3}}
        for name, patch in zip(names, patches, strict=True)
    ]
    return calls(("submit_verdict", {"candidates": candidates}))


def graded_by(player: Player, warm: Path, folder: Path, mode: str = "sum_preserving") -> list[dict[str, Any]]:
    """The RL records of two steps from a given warm start, graded over HTTP."""
    with chat_server(player) as (url, _):
        agentic = {"base_url": url, "model": "rules", "max_retries": 0}
        config = parse(
            SETTINGS
            | {
                "run_dir": folder,
                "train": SETTINGS["train"] | {"steps": 2, "mode": mode},
                "sft": SETTINGS["sft"] | {"warm_start_from": str(warm)},
                "grading": {"grader": "agentic", "agentic": agentic, "deadline_s": 30, "breaker_window": 100},
            }
        )
        loop.train(config)
    return read_metrics(folder, "rl")


def test_an_agentic_grader_grades_a_run(whole: Path, tmp_path: Path) -> None:
    steps = graded_by(reads_patches, whole, tmp_path / "run")
    graded = sum(s["graded_groups"] for s in steps)
    assert graded > 0
    assert sum(s["ungraded_error"] + s["ungraded_void"] + s["ungraded_late"] for s in steps) == 0
    conversations = [
        json.loads(line) for line in (tmp_path / "run" / "grading.jsonl").read_text().splitlines()
    ]
    assert {c["ended"] for c in conversations} == {"verdict"}
    verdicts = (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()
    assert len(conversations) == len(verdicts) > 0  # groups that look the same share one
    tiers = [t for line in (tmp_path / "run").glob("trajectories/step_*.jsonl") for t in _tiers(line)]
    assert set(tiers) >= {1, 2}


def _tiers(path: Path) -> list[int]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r["tier"] for r in records if r["tier"] is not None]


def test_a_grader_that_is_down_leaves_binary_grpo_exactly(whole: Path, tmp_path: Path) -> None:
    down = graded_by(lambda m, n: Trouble(500, b"{}"), whole, tmp_path / "down")
    graded_by(reads_patches, whole, tmp_path / "none", mode="none")
    assert sum(s["ungraded_error"] for s in down) > 0
    assert sum(s["graded_groups"] for s in down) == 0
    assert [r[3] for r in sampled(tmp_path / "down")] == [r[3] for r in sampled(tmp_path / "none")]
    assert not (tmp_path / "none" / "grading.jsonl").exists()
