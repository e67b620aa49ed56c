"""What becomes of a record that cannot be kept (a full disk, say): it costs no verdict, and is counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


class Keeper:
    """Hands records on to `keep`. Thread-safe, and never raises."""

    def __init__(self, keep: Callable[[dict[str, Any]], None]) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self.failures = 0
        """Records lost so far."""

    def __call__(self, record: dict[str, Any]) -> None:
        try:
            self._keep(record)
        except Exception:
            with self._lock:
                self.failures += 1
            _log.exception("grading: a record could not be kept (%d so far)", self.failures)
