"""Saved states of a run (Orbax): atomic, the last few kept, checked when read, restored onto any mesh.

A checkpoint holds a `TrainState` and whatever small JSON the caller adds (task order, group numbers,
finished but unused work). A damaged one is moved aside, counted and said aloud, and the one before it is
taken; a checkpoint of other settings is an error, never a guess.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from gagar_jax.files import writing
from gagar_jax.train.state import TrainState
from gagar_jax.types import UserError

logger = logging.getLogger(__name__)

# What Orbax, TensorStore and our own check raise for files that are cut, changed or gone.
_DAMAGE = (OSError, ValueError, KeyError, TypeError)


class Restored(NamedTuple):
    """A state as saved after `step` steps, and the JSON saved with it."""

    state: TrainState
    step: int
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one folder: `<dir>/<step>/`.

    `damaged` counts checkpoints that this object found unreadable and moved to `<dir>/damaged-<step>`.
    """

    def __init__(self, directory: Path, *, keep: int, read_only: bool = False) -> None:
        """Opens the folder; it is made by the first save. `keep` is at least 1.

        `read_only` is for a folder of another run: nothing there is tidied, saved or moved aside.
        """
        self._dir, self._keep, self._read_only = directory.absolute(), keep, read_only
        self.damaged = 0

    def save(self, step: int, state: TrainState, extra: dict[str, Any]) -> None:
        """Writes a checkpoint and, once it is whole, removes those beyond the last `keep`.

        Saving a step that is already there does nothing: equal steps of a run have equal states.

        Args:
          step: steps done, the checkpoint's name.
          state: the state; it may be donated afterwards.
          extra: JSON-ready.

        Raises:
          DiskFull: no space is left; earlier checkpoints are untouched.
        """
        arrays = _named(state)
        described = {name: _describe(array) for name, array in arrays.items()}
        with _disk_full_in_words(self._dir), self._manager() as manager:
            if step in manager.all_steps():
                logger.info("%s: checkpoint %d is already there", self._dir, step)
                return
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    about=ocp.args.JsonSave({"arrays": described, "extra": extra}),
                ),
            )

    def restore(self, abstract: TrainState) -> Restored | None:
        """The latest checkpoint that reads back whole, placed as `abstract` says; None without any.

        Args:
          abstract: shapes, dtypes and shardings, from `train.state.abstract_state`.

        Raises:
          UserError: the checkpoint was made with other settings, or every checkpoint is damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._read(step, abstract)
            except _DAMAGE as error:
                self._put_aside(step, error)
        if steps:
            raise UserError(
                f"All {len(steps)} checkpoints in {self._dir} were damaged; they are now in damaged-* there. "
                "To start this stage again, run the same command; to keep what it earned, put back a copy."
            )
        return None

    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, ascending."""
        if not self._dir.is_dir():
            return []
        return sorted(int(path.name) for path in self._dir.iterdir() if path.name.isdecimal())

    def _read(self, step: int, abstract: TrainState) -> Restored:
        with self._manager() as manager:
            about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
            targets = _named(abstract)
            _check_settings(self._dir / str(step), about["arrays"], targets)
            restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(targets)))
        arrays = restored["state"]
        for name, array in arrays.items():
            if _describe(array) != about["arrays"][name]:
                raise ValueError(f"{name} does not have the checksum it was saved with")
        leaves = [arrays[name] for name in targets]
        return Restored(jax.tree.unflatten(jax.tree.structure(abstract), leaves), step, about["extra"])

    def _put_aside(self, step: int, error: Exception) -> None:
        if self._read_only:
            raise UserError(f"The checkpoint {self._dir / str(step)} cannot be read: {error}") from error
        self.damaged += 1
        aside = self._dir / f"damaged-{step}"
        suffix = 1
        while aside.exists():
            suffix += 1
            aside = self._dir / f"damaged-{step}-{suffix}"
        (self._dir / str(step)).rename(aside)
        logger.error(
            "Checkpoint %d in %s is damaged (%s: %s); it is now %s, and the one before it is taken instead.",
            step,
            self._dir,
            type(error).__name__,
            str(error).splitlines()[0] if str(error) else "no message",
            aside.name,
        )

    @contextlib.contextmanager
    def _manager(self) -> Iterator[ocp.CheckpointManager]:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=not self._read_only,
            cleanup_tmp_directories=not self._read_only,
            enable_async_checkpointing=False,
        )
        with ocp.CheckpointManager(self._dir, options=options) as manager:
            yield manager


def _named(state: TrainState) -> dict[str, Any]:
    """Leaves by their path, such as `.params['blocks']['query'].value`, in tree order."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _describe(array: jax.Array) -> dict[str, Any]:
    """Shape, dtype and, where this process holds all of it, a checksum of the bytes."""
    about: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype)}
    if array.is_fully_addressable:
        about["crc32"] = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return about


def _check_settings(path: Path, saved: dict[str, Any], targets: dict[str, Any]) -> None:
    for name in sorted(saved.keys() | targets.keys()):
        was = (saved[name]["shape"], saved[name]["dtype"]) if name in saved else None
        now = (list(targets[name].shape), str(targets[name].dtype)) if name in targets else None
        if was != now:
            raise UserError(
                f"{path} was made with other settings: {name} was {was} and is now {now}. "
                "Give the run its old model and optimizer settings, or another --run-dir."
            )


@contextlib.contextmanager
def _disk_full_in_words(path: Path) -> Iterator[None]:
    """`files.writing`, also for TensorStore, which reports a full disk as a ValueError."""
    with writing(path):
        try:
            yield
        except ValueError as error:
            if "No space left" in str(error) or "RESOURCE_EXHAUSTED" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise
