"""What a run writes down as it goes: metrics.jsonl and TensorBoard events.

One JSON object a line, flat: `step`, `phase`, `time` (seconds since the epoch), then the values. The
names are in docs/running.md. Checkpoints and trajectories are written elsewhere; the screen is console.py.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from gagar_jax.files import write_atomic, writing

logger = logging.getLogger(__name__)


def read_metrics(run_dir: Path, phase: str | None = None) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, in order, of one phase or of all; none if there is no file yet.

    A last line without its newline is what an interrupted write leaves: it is not a record.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if phase in (None, record["phase"])]


class MetricsWriter:
    """Appends to metrics.jsonl and to TensorBoard events below `tensorboard/<phase>`.

    A line is written with one system call before the events are, so metrics.jsonl is the record and
    the events a view of it. Everything happens in the calling thread: there is no queue to lose.
    """

    def __init__(self, run_dir: Path) -> None:
        """Opens the files of a run folder, which is made if missing.

        Raises:
          DiskFull: there is no space for the folder or its first file.
        """
        self.path = run_dir / "metrics.jsonl"
        self._events_dir = run_dir / "tensorboard"
        self._purge_step: dict[str, int] = {}
        self._events: dict[str, Any] = {}
        self._told: set[str] = set()
        with writing(self.path):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._drop_torn_line()
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def rewind(self, phase: str, step: int) -> int:
        """Moves aside what an interrupted run wrote past its checkpoint, so that no step is there twice.

        Call it after restoring, before the first `write`: lines of `phase` with step ≥ `step` go to
        metrics.rewound.jsonl, and TensorBoard is told to forget them.

        Returns:
          How many lines were moved.
        """
        assert phase not in self._events, f"rewind({phase!r}) after write({phase!r})"
        kept: list[str] = []
        moved: list[str] = []
        for line in self.path.read_text().splitlines(keepends=True):
            record = json.loads(line)
            (moved if record["phase"] == phase and record["step"] >= step else kept).append(line)
        self._purge_step[phase] = step
        if not moved:
            return 0
        aside = self.path.with_name("metrics.rewound.jsonl")
        # Aside first: a crash between the two leaves lines in both files, never in neither.
        with writing(aside), aside.open("a") as file:
            file.writelines(moved)
        write_atomic(self.path, "".join(kept))
        os.close(self._file)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        logger.info("moved %d lines of phase %r from step %d on to %s", len(moved), phase, step, aside)
        return len(moved)

    def write(self, step: int, phase: str, values: Mapping[str, SupportsFloat]) -> None:
        """Records one step.

        Args:
          step: train steps behind these values, from 0.
          phase: a word for the stage, e.g. "sft", "rl".
          values: numbers by name (Python, NumPy or device scalars). NaN and ±infinity become null.

        Raises:
          DiskFull: no space; the file keeps its last whole line.
        """
        numbers = {name: self._number(name, value) for name, value in values.items()}
        record = {"step": int(step), "phase": phase, "time": round(time.time(), 3)} | numbers
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file).st_size
        with writing(self.path):
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self._file, size)
                raise
        self._write_events(step, phase, numbers)

    def close(self) -> None:
        """Flushes to the disk and closes. Nothing may be written afterwards."""
        try:
            with writing(self.path):
                os.fsync(self._file)
                for events in self._events.values():
                    events.close()
        finally:
            os.close(self._file)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _number(self, name: str, value: SupportsFloat) -> float | int | None:
        if isinstance(value, (bool, int)):
            return int(value)
        number = float(value)
        if math.isfinite(number):
            return number
        if name not in self._told:
            self._told.add(name)
            # Not a number is a mean over nothing, and expected; an infinity is not.
            level = logging.INFO if math.isnan(number) else logging.WARNING
            logger.log(level, "metric %s is %s: written as null (said once a run)", name, number)
        return None

    def _write_events(self, step: int, phase: str, numbers: Mapping[str, float | int | None]) -> None:
        # The low-level writer on purpose: SummaryWriter hands events to a thread, which on a full
        # disk dies and leaves the caller waiting on its queue.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        folder = self._events_dir / phase
        with writing(folder):
            if phase not in self._events:
                folder.mkdir(parents=True, exist_ok=True)
                self._events[phase] = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
                if phase in self._purge_step:
                    start = SessionLog(status=SessionLog.SessionStatus.START)
                    purge = Event(wall_time=time.time(), step=self._purge_step[phase], session_log=start)
                    self._events[phase].write_event(purge)
            for name, number in numbers.items():
                if number is not None:
                    event = Event(wall_time=time.time(), step=step, summary=scalar(name, number))
                    self._events[phase].write_event(event)
            self._events[phase].flush()

    def _drop_torn_line(self) -> None:
        """Cuts what an interrupted write left after the last newline."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            logger.warning("%s: dropped an unfinished last line (%d bytes)", self.path, len(data) - whole)
            write_atomic(self.path, data[:whole])
