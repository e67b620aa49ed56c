"""Fair wall-clock timing: contenders take turns, so that a busy moment of the machine hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def take_turns(
    calls: Mapping[str, Callable[[], Any]], *, budget_s: float, most: int = 200
) -> dict[str, list[float]]:
    """Seconds of every repetition of every call.

    Each call is warmed up once. A call is repeated until it has used its share of the budget or run `most`
    times, but at least twice.

    Args:
      calls: by name; each blocks until its work is done.
      budget_s: seconds for all of them together.
      most: repetitions a call may have.
    """
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    share = budget_s / max(len(calls), 1)
    waiting = set(calls)
    while waiting:
        for name, call in calls.items():
            if name not in waiting:
                continue
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
            if len(seconds[name]) >= 2 and (sum(seconds[name]) > share or len(seconds[name]) >= most):
                waiting.discard(name)
    return seconds


def median_ms(seconds: list[float]) -> float:
    """The median in milliseconds."""
    return statistics.median(seconds) * 1e3
