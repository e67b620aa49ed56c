"""Commands of a grader in a copy of a tree, confined (`gagar_jax.types.CommandRunner`)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from envs.coding.workspace import scratch_folder
from envs.sandbox import Limits, Sandbox, detect

_OUTPUT_BYTES = 256 << 10


class ConfinedCommands:
    """Runs shell commands, each in a fresh copy of the tree it is given. Thread-safe.

    Args:
      confinement: "auto", "bubblewrap", "namespaces" or "none".

    Raises:
      ConfinementError: commands cannot be confined here in the requested way.
    """

    def __init__(self, confinement: str) -> None:
        self._box = Sandbox(detect(confinement))

    def run(self, tree: Mapping[str, bytes], command: str, *, timeout_s: float) -> str:
        """What the command prints, then a line that says how it ended.

        Raises:
          ValueError: a path of the tree would leave it.
        """
        with tempfile.TemporaryDirectory(prefix="gagar-grade-", dir=scratch_folder()) as folder:
            for path, data in tree.items():
                if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                    raise ValueError(f"the path {path!r} leaves the tree")
                file = Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            limits = Limits(wall_s=timeout_s, output_bytes=_OUTPUT_BYTES)
            done = self._box.run(["sh", "-c", command], work=Path(folder), limits=limits)
        ended = f"exit status {done.returncode}"
        if done.timed_out:
            ended = f"killed after {timeout_s:g} s"
        elif done.truncated:
            ended = f"killed: more than {_OUTPUT_BYTES} bytes of output"
        return f"{(done.stdout + done.stderr).decode('utf-8', 'replace')}\n[{ended}]"

    def close(self) -> None:
        self._box.close()
