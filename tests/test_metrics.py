"""metrics.jsonl and its TensorBoard view: whole lines, no step twice, a full disk said in words."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from gagar_jax.files import DiskFull, write_atomic, writing
from gagar_jax.metrics import MetricsWriter, read_metrics


def _steps(run_dir: Path, phase: str) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir, phase)]


def _events(run_dir: Path, phase: str) -> list[tuple[int, str, float]]:
    """(step, tag, value) as TensorBoard would read them: length-prefixed protocol buffers."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((run_dir / "tensorboard" / phase).iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + length
    return found


def test_a_record_is_one_flat_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(3, "rl", {"pass_rate": np.float32(0.5), "kept_groups": 7, "entropy": np.float64("nan")})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time") > 1e9
    assert record == {"step": 3, "phase": "rl", "pass_rate": 0.5, "kept_groups": 7, "entropy": None}


def test_not_a_number_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MetricsWriter(tmp_path) as writer, caplog.at_level(logging.WARNING):
        for step in range(3):
            writer.write(step, "rl", {"entropy": float("inf")})
    assert [record.getMessage() for record in caplog.records] == [
        "metric entropy is inf: written as null (said once a run)"
    ]


def test_events_hold_the_same_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, "rl", {"loss": 2.5, "bad": float("nan")})
        writer.write(1, "rl", {"loss": 1.5})
        writer.write(0, "sft", {"loss": 9.0})
    assert _events(tmp_path, "rl") == [(0, "loss", 2.5), (1, "loss", 1.5)]
    assert _events(tmp_path, "sft") == [(0, "loss", 9.0)]


def test_rewind_moves_later_steps_of_that_phase_aside(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(step, "sft", {"loss": step})
        for step in range(4):
            writer.write(step, "rl", {"loss": step})
    with MetricsWriter(tmp_path) as writer:
        assert writer.rewind("rl", 2) == 2
        writer.write(2, "rl", {"loss": 20})
    assert _steps(tmp_path, "sft") == [0, 1, 2, 3, 4, 5]
    assert _steps(tmp_path, "rl") == [0, 1, 2]
    assert read_metrics(tmp_path, "rl")[-1]["loss"] == 20
    aside = (tmp_path / "metrics.rewound.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [2, 3]


def test_rewind_of_nothing_changes_nothing(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        assert writer.rewind("rl", 0) == 0
        writer.write(0, "rl", {"loss": 1})
    assert _steps(tmp_path, "rl") == [0]
    assert not (tmp_path / "metrics.rewound.jsonl").exists()


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, "rl", {"loss": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "pha')
    assert _steps(tmp_path, "rl") == [0]
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, "rl", {"loss": 2})
    assert _steps(tmp_path, "rl") == [0, 1]


def test_a_full_disk_is_said_in_words() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(DiskFull, match=r"/dev/full.*same command"), writing(full), full.open("wb", 0) as file:
        file.write(b"x")


def test_a_partial_write_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills in the middle of a line: real bytes arrive, and are taken back."""
    real_write = os.write
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, "rl", {"loss": 1})
        monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[: len(data) // 2]))
        with pytest.raises(DiskFull, match=r"metrics\.jsonl"):
            writer.write(1, "rl", {"loss": 2})
        monkeypatch.undo()
        writer.write(1, "rl", {"loss": 3})
    assert [r["loss"] for r in read_metrics(tmp_path)] == [1, 3]


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="denied") as caught, writing(tmp_path):
        raise OSError(errno.EACCES, "denied")
    assert not isinstance(caught.value, DiskFull)


def test_write_atomic_keeps_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "eval.json"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["eval.json"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
