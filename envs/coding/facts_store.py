"""Keeps what a warm server learned of a package's suite beside the packages, for the next process.

Learning runs the whole suite under a profiler, which takes seconds a package; reading it takes none.
The name of a file says what it was learned from, so a changed package, Python or runner never meets it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from envs.coding.pristine import Pristine, digest, read_tree

logger = logging.getLogger(__name__)


@functools.cache
def _learned_with() -> str:
    here = Path(__file__).resolve().parent
    code = b"".join(
        (here / name).read_bytes() for name in ("warm_server.py", "test_runner.py", "code_swap.py")
    )
    pytest_version = importlib.metadata.version("pytest")
    return f"{sys.version_info[:3]} {pytest_version} {hashlib.sha256(code).hexdigest()}"


class FactsStore:
    """Facts by package, in `folder`. A folder that cannot be written is not an error: it only costs time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, package: Pristine) -> Path:
        key = digest(read_tree(package.folder)) + _learned_with()
        return self._folder / f"{package.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def load(self, package: Pristine) -> dict[str, Any] | None:
        """What was saved for this very package, or None."""
        path = self._path(package)
        try:
            facts: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read, its package is learned again: %s", path, error)
            return None
        return facts

    def save(self, package: Pristine, facts: dict[str, Any]) -> None:
        """Writes them whole or not at all."""
        path = self._path(package)
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            path.parent.mkdir(exist_ok=True)
            part.write_text(json.dumps(facts))
            part.rename(path)
        except OSError as error:
            logger.warning("%s cannot be written, the next process learns it again: %s", path, error)
