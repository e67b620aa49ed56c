"""The screen: a person sees every phase, warnings and estimates, with and without a terminal."""

from __future__ import annotations

import io
import logging
import re
import threading
from pathlib import Path

import pytest

from gagar_jax import console as console_module
from gagar_jax.console import Console, sparkline


class _Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_known_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def test_without_a_terminal_it_is_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Console("pocket", phases=["tasks", "RL"], run_dir=tmp_path, stream=stream) as console:
        with console.phase("tasks"):
            console.update(3, total=9, message="toolz")
        with console.phase("RL", total=80, first=10):
            console.update(20, message="rollout", metrics={"pass_rate": 0.41, "unknown_metric": 3})
            console.update(21)  # within ten seconds of the last line: not another one
    shown = stream.getvalue()
    assert "\x1b" not in shown
    lines = [re.sub(r"\[[\d:]+\] ", "", line) for line in shown.splitlines()]
    assert lines[0] == f"pocket → {tmp_path}"
    assert lines[1:3] == ["tasks 3/9 · toolz", "tasks done in 0:00"]
    assert lines[3] == "RL: going on from 10 of 80"
    assert lines[4] == "RL 20/80 · rollout · pass rate 0.41"
    assert lines[5:] == ["RL done in 0:00 · pass rate 0.41"]


def test_the_estimate_counts_from_where_the_phase_began() -> None:
    phase = console_module._Phase("RL", total=80, done=20, started=100.0, first=10)
    assert phase.left_s(120.0) == 20 / 10 * 60
    assert phase.left_s(100.5) is None  # too early to tell


def test_lines_come_again_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "PLAIN_EVERY_S", 0.0)
    stream = io.StringIO()
    with Console("x", stream=stream) as console, console.phase("RL", total=3):
        for step in range(3):
            console.update(step + 1)
    assert [f"RL {n}/3" in stream.getvalue() for n in (1, 2, 3)] == [True] * 3


def test_on_a_terminal_the_whole_way_is_shown() -> None:
    stream = _Terminal()
    with Console("pocket", phases=["tasks", "RL", "evaluation"], stream=stream) as console:
        with console.phase("tasks"):
            pass
        with console.phase("RL", total=4):
            for step in range(4):
                console.update(step + 1, message="rollout", metrics={"pass_rate": step / 4, "entropy": 0.5})
            console._live.refresh()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())
    for words in ("✓ tasks", "● RL", "○ evaluation", "4/4", "pass rate", "▁▃▅█", "rollout"):
        assert words in shown


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = _Terminal()
    with Console("pocket", phases=["RL"], stream=stream) as console, console.phase("RL", total=1):
        console.update(1)
        console._live.refresh()
    assert not re.search(r"\x1b\[[\d;]*3[1-7]", stream.getvalue())


def test_logging_goes_to_the_file_and_warnings_to_the_screen(tmp_path: Path) -> None:
    stream = io.StringIO()
    before = list(logging.getLogger().handlers)
    with Console("x", run_dir=tmp_path, stream=stream):
        logging.getLogger("some.part").info("a detail")
        logging.getLogger("some.part").warning("group 3 is [late]")
    assert logging.getLogger().handlers == before
    log = (tmp_path / "log.txt").read_text()
    assert "some.part: a detail" in log
    assert "some.part: group 3 is [late]" in log
    assert "a detail" not in stream.getvalue()
    assert "warning: group 3 is [late]" in stream.getvalue()


def test_an_interrupted_phase_says_where() -> None:
    stream = io.StringIO()

    def interrupted() -> None:
        with Console("x", stream=stream) as console, console.phase("RL", total=9):
            console.update(4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "RL stopped at 4" in stream.getvalue()


def test_phases_may_nest() -> None:
    stream = io.StringIO()
    with Console("x", stream=stream) as console:
        with console.phase("demonstrations", total=8):
            with console.phase("tasks", total=5):
                console.update(5)
            console.update(3, message="playing")
            assert [(p.name, p.done) for p in console._phases] == [("demonstrations", 3), ("tasks", 5)]
        console.update(4)
    assert stream.getvalue().count("done in") == 2


def test_threads_may_report() -> None:
    stream = io.StringIO()
    with Console("x", stream=stream) as console, console.phase("RL", total=400):
        threads = [
            threading.Thread(target=lambda: [console.update(n, metrics={"entropy": n}) for n in range(100)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "RL done" in stream.getvalue()


def test_a_trend_of_nothing_is_nothing() -> None:
    assert sparkline([]) == ""
