"""The screen of a running command: phases, a bar, the numbers that matter with their trend, and a log.

On a terminal it is a live view; elsewhere (a pipe, CI) it is one line about every ten seconds. What is
recorded is metrics.py's business; nothing here is needed to read a run later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

import rich.console
import rich.live
import rich.progress_bar
import rich.table
import rich.text

from gagar_jax.logs import logging_to

TREND = 16
"""How many values a trend shows."""
PLAIN_EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""
_SHADES = "▁▂▃▄▅▆▇█"

# What the live view shows, in this order, when a phase reports it; anything else is in metrics.jsonl.
HEADLINES = {
    "loss": "loss",
    "pass_rate": "pass rate",
    "tier1_share": "tier 1 share",
    "patch_lines_mean": "patch lines",
    "tokens_mean": "tokens",
    "turns_mean": "turns",
    "entropy": "entropy",
    "kept_groups": "groups kept",
    "graded_share": "graded share",
    "decode_tokens_per_s": "decode tokens/s",
    "train_tokens_per_s": "train tokens/s",
}


def sparkline(values: Sequence[float]) -> str:
    """The values as bars of eight heights, lowest to highest; flat values give a flat middle line.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▅█'
    >>> sparkline([5.0, 5.0])
    '▄▄'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _SHADES[3] * len(values)
    return "".join(_SHADES[int((v - low) / (high - low) * (len(_SHADES) - 1))] for v in values)


def clock(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> clock(7), clock(75), clock(3725)
    ('0:07', '1:15', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def number(value: float) -> str:
    """A number in at most about six characters.

    >>> number(0.41234), number(12.0), number(11712.3), number(2.1e-5)
    ('0.412', '12', '11,712', '2.1e-05')
    """
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclasses.dataclass
class _Phase:
    name: str
    total: int
    done: int
    started: float
    first: int
    ended: float | None = None

    def left_s(self, now: float) -> float | None:
        """Seconds left at the pace so far, or None before there is a pace to speak of."""
        steps, spent = self.done - self.first, now - self.started
        if steps <= 0 or self.total <= 0 or spent < 5:
            return None
        return spent / steps * max(self.total - self.done, 0)


class Console:
    """What a command shows while it works.

    Example:
      with Console("pocket", phases=["tasks", "warm start"], run_dir=run_dir) as console:
          with console.phase("warm start", total=1500, first=resumed_step):
              console.update(20, metrics={"loss": 2.31})

    `update` and `log` may be called from any thread.
    """

    def __init__(
        self,
        title: str,
        *,
        phases: Sequence[str] = (),
        run_dir: Path | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Nothing is shown or opened before `with`.

        Args:
          title: heads the view.
          phases: the names of what is to come, in order, so that a person sees the whole way.
          run_dir: where log.txt goes; None keeps no log file.
          stream: where to draw. Default: standard error, so that standard output stays for results.
        """
        self._rich = rich.console.Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._live_view = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._title = title
        self._planned = list(phases)
        self._run_dir = run_dir
        self._phases: list[_Phase] = []
        self._open: list[_Phase] = []  # innermost last
        self._message = ""
        self._values: dict[str, float] = {}
        self._trends: dict[str, deque[float]] = {}
        self._lock = threading.RLock()
        self._began = self._spoke = time.monotonic()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Console:
        self._began = self._spoke = time.monotonic()
        self._exits.enter_context(
            logging_to(self._run_dir, lambda text: self._say(f"{self._stamp()} {text}"))
        )
        if self._live_view:
            self._live = self._exits.enter_context(
                rich.live.Live(get_renderable=self._render, console=self._rich, refresh_per_second=4)
            )
        else:
            where = f" → {self._run_dir}" if self._run_dir else ""
            self._say(f"{self._title}{where}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._exits.close()

    @contextlib.contextmanager
    def phase(self, name: str, total: int = 0, *, first: int = 0) -> Iterator[None]:
        """One stage of the command. Stages may nest: preparing one can be what another needs first.

        Args:
          name: as in `phases`, or a new one.
          total: steps in it; 0 if not known (no bar, no estimate).
          first: the step it starts from, when a run goes on where it was.
        """
        with self._lock:
            phase = _Phase(name, total, first, time.monotonic(), first)
            self._phases.append(phase)
            self._open.append(phase)
            self._message, self._values, self._trends = "", {}, {}
            self._spoke = -PLAIN_EVERY_S
            if first:
                self.log(f"{name}: going on from {first} of {total}")
        try:
            yield
        except BaseException:
            self._line(phase, "stopped at")
            raise
        finally:
            with self._lock:
                self._open.remove(phase)
        phase.ended = time.monotonic()
        self._line(phase, "done in " + clock(phase.ended - phase.started))

    def update(
        self,
        done: int,
        *,
        total: int | None = None,
        message: str = "",
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Says how far the innermost open phase is; outside any, where a late thread may be, does nothing.

        Args:
          done: steps finished, counted like the phase's `total`.
          total: replaces the phase's total, when it becomes known later.
          message: what is going on, in a few words.
          metrics: numbers by name; those in `HEADLINES` are shown with their trend.
        """
        with self._lock:
            if not self._open:
                return
            phase = self._open[-1]
            phase.done = done
            phase.total = phase.total if total is None else total
            self._message = message or self._message
            for name, value in (metrics or {}).items():
                if name in HEADLINES and value == value:
                    self._values[name] = float(value)
                    self._trends.setdefault(name, deque(maxlen=TREND)).append(float(value))
            now = time.monotonic()
            if not self._live_view and now - self._spoke >= PLAIN_EVERY_S:
                self._spoke = now
                self._line(phase, "")

    def log(self, text: str) -> None:
        """One lasting line, above the live view."""
        logging.getLogger(__name__).info("%s", text)
        self._say(f"{self._stamp()} {text}")

    def tables(self, *tables: rich.table.Table) -> None:
        """Lasting tables, e.g. the evaluation at the end."""
        for table in tables:
            self._rich.print(table)

    def _stamp(self) -> str:
        return f"[{clock(time.monotonic() - self._began)}]"

    def _say(self, text: str) -> None:
        self._rich.print(text, markup=False, soft_wrap=True)

    def _line(self, phase: _Phase, event: str) -> None:
        """The plain form of the view, in one line; also how a phase's end is left on a terminal."""
        with self._lock:
            parts = [f"{phase.name} {phase.done}/{phase.total}" if phase.total else phase.name]
            if event:
                parts[0] = f"{phase.name} {event}" + (f" {phase.done}" if event.endswith("at") else "")
            elif self._message:
                parts.append(self._message)
            parts += [f"{HEADLINES[n]} {number(self._values[n])}" for n in HEADLINES if n in self._values][:4]
            left = phase.left_s(time.monotonic())
            if left is not None and not event:
                parts.append(f"about {clock(left)} left")
            text = " · ".join(parts)
        logging.getLogger(__name__).info("%s", text)
        self._say(f"{self._stamp()} {text}")

    def _render(self) -> rich.console.RenderableType:
        with self._lock:
            now = time.monotonic()
            grid = rich.table.Table.grid(padding=(0, 1))
            where = f"  {self._run_dir}" if self._run_dir else ""
            head = rich.text.Text.assemble(
                (self._title, "bold"), (where, "dim"), f"  {clock(now - self._began)}"
            )
            grid.add_row(head)
            grid.add_row(self._steps(now))
            if self._open:
                grid.add_row(self._bar(self._open[-1], now))
                if self._values:
                    grid.add_row(self._numbers())
            return grid

    def _steps(self, now: float) -> rich.text.Text:
        text = rich.text.Text()
        seen = {phase.name for phase in self._phases}
        for phase in self._phases:
            ended = phase.ended is not None
            text.append("✓ " if ended else "● ", "green" if ended else "cyan")
            text.append(
                f"{phase.name} {clock((phase.ended or now) - phase.started)}   ", "" if ended else "bold"
            )
        for name in self._planned:
            if name not in seen:
                text.append(f"○ {name}   ", "dim")
        return text

    def _bar(self, phase: _Phase, now: float) -> rich.table.Table:
        row = rich.table.Table.grid(padding=(0, 2))
        left = phase.left_s(now)
        total = phase.total or None
        row.add_row(
            rich.progress_bar.ProgressBar(total=total, completed=phase.done, width=36, pulse=total is None),
            f"{phase.done}/{phase.total}" if phase.total else "",
            f"about {clock(left)} left" if left is not None else "",
            rich.text.Text(self._message, "dim"),
        )
        return row

    def _numbers(self) -> rich.table.Table:
        """Two metrics a row: name, value, trend."""
        table = rich.table.Table.grid(padding=(0, 2))
        shown = [name for name in HEADLINES if name in self._values]
        for left in range(0, len(shown), 2):
            cells: list[rich.text.Text] = []
            for name in shown[left : left + 2]:
                cells += [
                    rich.text.Text(HEADLINES[name], "dim"),
                    rich.text.Text(f"{number(self._values[name]):>7}", "bold"),
                    rich.text.Text(f"{sparkline(self._trends[name]):<{TREND}}", "cyan"),
                ]
            table.add_row(*cells)
        return table
