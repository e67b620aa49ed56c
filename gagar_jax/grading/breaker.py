"""A circuit breaker: stop calling what keeps failing, say so loudly, and try again later."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Breaker:
    """Closed → open when `threshold` of the last `window` calls failed → half-open after `cooldown_s`.

    Half-open lets one call through: its success closes the breaker, its failure opens it again. It
    does not judge before it has seen a full window. Thread-safe.
    """

    def __init__(
        self, *, window: int, threshold: float, cooldown_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = threshold
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: collections.deque[bool] = collections.deque(maxlen=window)
        self._opened_at: float | None = None
        self._trial = False

    def allow(self) -> bool:
        """Whether a call may be made now. A caller that gets True must report its `result`."""
        with self._lock:
            if self._opened_at is None:
                return True
            if self._trial or self._clock() < self._opened_at + self._cooldown_s:
                return False
            self._trial = True
        _log.warning("grading: trying the grader again after %.0f s", self._cooldown_s)
        return True

    def result(self, *, failed: bool) -> None:
        """Reports how an allowed call ended; lateness is a failure."""
        with self._lock:
            self._failures.append(failed)
            if self._opened_at is not None:
                if not self._trial:
                    return  # a call from before the breaker opened says nothing about now
                self._trial = False
                self._opened_at = self._clock() if failed else None
                self._failures.clear()
                _log.log(
                    logging.ERROR if failed else logging.WARNING,
                    "grading: the grader %s",
                    "failed again; not calling it" if failed else "works again; calling it",
                )
            elif len(self._failures) == self._failures.maxlen and self._rate() >= self._threshold:
                self._opened_at = self._clock()
                _log.error(
                    "grading: %.0f %% of the last %d verdicts failed; groups are trained ungraded for %.0f s",
                    100 * self._rate(), len(self._failures), self._cooldown_s,
                )  # fmt: skip

    def _rate(self) -> float:
        return sum(self._failures) / len(self._failures)
