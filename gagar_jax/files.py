"""Files of a run folder that are never half, and a full disk said in words; not what they hold."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gagar_jax.types import UserError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class DiskFull(UserError):
    """A file of the run folder could not be written for lack of space. Resumable."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Wraps a write to the run folder, so that a full disk is said in words.

    Raises:
      DiskFull: in place of the OSError, naming `path`. Other errors pass through.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise DiskFull(
            f"No space left on the device while writing {path}. Nothing already earned is lost: free some "
            "space and run the same command, it goes on from the last checkpoint."
        ) from error


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces a small file in one step: a reader, or a crash, finds the old content or the new.

    Raises:
      DiskFull: no space; the old file is untouched.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """`write_atomic` for a file that is written bit by bit; an exception inside leaves the old content.

    Raises:
      DiskFull: no space; the old file is untouched.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
