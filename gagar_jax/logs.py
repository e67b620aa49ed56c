"""Where Python's logging goes during a command: log.txt in the run folder, and warnings to the screen."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gagar_jax.files import writing


class LogFile(logging.FileHandler):
    """log.txt. A full disk ends the log, says so once on the screen, and does not end the run."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        super().__init__(path, encoding="utf-8")
        self._say = say
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self.level <= logging.CRITICAL:
            self.setLevel(logging.CRITICAL + 1)
            self._say(f"{self.baseFilename} is not written any more: {error}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is still in its buffer, and was said
            super().close()


class ScreenHandler(logging.Handler):
    """Warnings and errors as lines on the screen."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def logging_to(run_dir: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Routes the root logger while a command runs, and undoes it.

    Args:
      run_dir: gets log.txt, with everything from INFO up; None for no file.
      say: shows a line to the person; gets everything from WARNING up.
    """
    root = logging.getLogger()
    handlers: list[logging.Handler] = [ScreenHandler(say)]
    if run_dir is not None:
        with writing(run_dir / "log.txt"):
            run_dir.mkdir(parents=True, exist_ok=True)
            handlers.append(LogFile(run_dir / "log.txt", say))
    level = root.level
    root.setLevel(logging.INFO)
    # Orbax logs through absl, which writes to the screen by itself, and tells every step of every save.
    absl, muted = (
        logging.getLogger("absl"),
        [h for h in root.handlers if type(h).__module__.startswith("absl")],
    )
    absl_level = absl.level
    absl.setLevel(logging.WARNING)
    for handler in muted:
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        absl.setLevel(absl_level)
        for handler in muted:
            root.addHandler(handler)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
