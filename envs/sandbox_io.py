"""Talking to a confined command and finding what it left behind, within bounds. The rest is in `sandbox`."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

MARKER = "GAGAR_SANDBOX_RUN"
"""Environment variable by which the descendants of an unconfined command are found."""


def child_pidfds(pid: int) -> list[int]:
    """A pidfd of each child of a process of ours."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == pid:
                    found.append(os.pidfd_open(int(entry.name)))
    return found


def await_end(pidfd: int, timeout_s: float) -> None:
    """Waits until the process has ended, and closes the descriptor."""
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        if not selector.select(timeout_s):
            logger.warning("a confined command has not ended %.0f s after it was killed", timeout_s)
    os.close(pidfd)


def kill_marked(token: str) -> None:
    """Kills every process whose environment holds the marker of an unconfined command."""
    marker = f"{MARKER}={token}".encode()
    for _ in range(100):  # a fork bomb refills while it is being killed
        found = False
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if marker in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)
    logger.warning("descendants of a confined command would not die; its marker is %s", marker.decode())


def communicate(
    process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int, deadline: float
) -> tuple[bytes, bytes, str]:
    """Feeds stdin and reads both outputs until the command ends, takes too long or writes too much.

    The command's end counts, not its pipes': a daemon it left behind may hold them open.
    """
    assert process.stdin
    assert process.stdout
    assert process.stderr
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    pending = memoryview(stdin)
    why = ""
    with selectors.DefaultSelector() as selector, _pidfd(process.pid) as ended:
        for pipe in (process.stdin, *output):
            os.set_blocking(pipe.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(ended, selectors.EVENT_READ)
        for pipe in output:
            selector.register(pipe, selectors.EVENT_READ)
        over = False
        while not over and not why:
            ready = selector.select(deadline - time.monotonic())
            if not ready or time.monotonic() > deadline:
                why = "timed out"
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    pending = _feed(process.stdin, pending)
                    if not pending:
                        selector.unregister(process.stdin)
                elif key.fileobj == ended:
                    over = True
                elif not _take(key.fileobj, output[key.fileobj], output_bytes):  # type: ignore[index,arg-type]
                    selector.unregister(key.fileobj)
            if any(len(buffer) > output_bytes for buffer in output.values()):
                why = "truncated"
        for pipe, buffer in output.items():
            while _take(pipe, buffer, output_bytes):
                pass
    cut = [bytes(buffer[:output_bytes]) for buffer in output.values()]
    if any(len(buffer) > output_bytes for buffer in output.values()):
        why = why or "truncated"
    return cut[0], cut[1], why


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def _feed(pipe: IO[bytes], pending: memoryview) -> memoryview:
    try:
        pending = pending[os.write(pipe.fileno(), pending) :] if pending else pending
    except BlockingIOError:
        return pending
    except BrokenPipeError:  # the command does not want the rest
        pending = pending[len(pending) :]
    if not pending:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    return pending


def _take(pipe: IO[bytes], buffer: bytearray, limit: int) -> bool:
    """Reads once without waiting; False when there is nothing (now or ever) or the limit is passed."""
    try:
        data = os.read(pipe.fileno(), 65536)
    except BlockingIOError:
        return False
    buffer += data
    return bool(data) and len(buffer) <= limit
