"""A bounded cache in which, of several threads that want the same key, one computes."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class SingleFlight:
    """Bounded, thread-safe; of several threads that want the same key, one computes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[Any, Future[Any]] = collections.OrderedDict()

    def get(
        self, key: Any, compute: Callable[[], Result], keep: Callable[[Result], bool]
    ) -> tuple[Result, bool]:
        """The result, and whether it was there already. Results that `keep` refuses are not kept."""
        with self._lock:
            future = self._entries.get(key)
            mine = future is None
            if future is None:
                future = self._entries[key] = Future()
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        if not mine:
            return future.result(), True
        try:
            result = compute()
        except BaseException as error:
            self._drop(key, future)
            future.set_exception(error)
            raise
        if not keep(result):
            self._drop(key, future)
        future.set_result(result)
        return result, False

    def _drop(self, key: Any, future: Future[Any]) -> None:
        with self._lock:
            if self._entries.get(key) is future:
                del self._entries[key]
