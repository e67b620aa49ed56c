"""Compiles a program for a TPU topology in a process of its own: libtpu serves one process at a time."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu wheel")


def run_with_libtpu(program: str, repository: Path) -> dict[str, Any]:
    """Runs Python source whose last line of output is JSON, and returns that."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(repository),
        "TPU_SKIP_MDS_QUERY": "1",
    }
    with open(Path(tempfile.gettempdir()) / "gagar-libtpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process that loads libtpu dies on its own lock file
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=900
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
