"""Verdicts already paid for: the same question gets the same answer, after a restart too."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from gagar_jax.grading.keeping import Keeper
from gagar_jax.grading.service import Grader
from gagar_jax.grading.verdict import VoidVerdict, validate
from gagar_jax.types import Group, GroupVerdict, Trajectory, to_json

_log = logging.getLogger(__name__)
_VERDICT = pydantic.TypeAdapter(GroupVerdict)


class CachedGrader:
    """A grader whose verdicts are kept, and given again for a group that looks the same.

    The same: task, version of the grader and, of all members in any order, outcome, patch and transcript.
    Patches alone are not enough, since scores and flags also tell of the way there. Only verdicts that
    `validate` lets pass are kept, and given again.

    Args:
      grader: asked where no verdict is kept. Its `version`, or else its `name`, tells of what makes its
        verdicts: model, settings, instructions.
      kept: verdicts of before, as `read_verdicts` gives them.
      keep: called with each new record, JSON-ready, from several threads; if it raises, the record is lost
        and counted (`unkept`), not the verdict.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        kept: Mapping[str, GroupVerdict],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self._grader, self._keep = grader, Keeper(keep)
        self._lock = threading.Lock()
        self._kept = dict(kept)
        self.name = getattr(grader, "name", type(grader).__name__)
        self._version: str = getattr(grader, "version", self.name)
        self.audits_external = getattr(grader, "audits_external", False)
        self.reused = 0

    def grade(self, group: Group) -> GroupVerdict:
        """The kept verdict on an equal group, in this group's numbers, or a new one. Thread-safe.

        Raises:
          VoidVerdict: the new one is void.
        """
        key, members = self._question(group)
        if (known := self._known(key, members, group)) is not None:
            return known
        verdict = self._grader.grade(group)
        validate(verdict, group)
        kept = _renumbered(verdict, {member: place for place, member in enumerate(members)})
        with self._lock:
            self._kept[key] = kept
        self._keep({"key": key, "verdict": to_json(kept)})
        return verdict

    @property
    def unkept(self) -> int:
        """Records that could not be kept, the grader's own included."""
        return self._keep.failures + int(getattr(self._grader, "unkept", 0))

    def _known(self, key: str, members: list[int], group: Group) -> GroupVerdict | None:
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            return None
        verdict = _renumbered(kept, dict(enumerate(members)))
        try:
            validate(verdict, group)
        except VoidVerdict as void:  # by the checks of now; kept for ever, it would be given for ever
            _log.warning("grading: the kept verdict on group %d is void: %s", group.group, void.reason)
            return None
        with self._lock:
            self.reused += 1
        _log.info("grading: group %d looks like one that was judged: its verdict holds", group.group)
        return verdict

    def close(self) -> None:
        if close := getattr(self._grader, "close", None):
            close()

    def _question(self, group: Group) -> tuple[str, list[int]]:
        """What a group is known by, and its members in an order that depends on what they did alone."""
        seen = sorted((_digest(t), t.ticket.member) for t in group.trajectories)
        asked = [self._version, group.task.get("instance_id"), [digest for digest, _ in seen]]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest(), [member for _, member in seen]


def _digest(t: Trajectory) -> str:
    turns = [(turn.action, turn.observation) for turn in t.turns]
    said = repr((t.outcome.status, t.outcome.stop, t.outcome.reason, t.patch, t.prompt, turns))
    return hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()


def _renumbered(verdict: GroupVerdict, number: Mapping[int, int]) -> GroupVerdict:
    """The verdict with other numbers for its members; one that is not among them stays, and voids it."""
    return dataclasses.replace(
        verdict,
        candidates=tuple(
            dataclasses.replace(c, member=number.get(c.member, c.member)) for c in verdict.candidates
        ),
        external={number.get(m, m): evidence for m, evidence in verdict.external.items()},
        commands={number.get(m, m): ran for m, ran in verdict.commands.items()},
    )


def read_verdicts(path: Path) -> dict[str, GroupVerdict]:
    """The records of a JSONL file, if there is one; a line that cannot be read is left alone, and logged."""
    kept: dict[str, GroupVerdict] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            kept[record["key"]] = _VERDICT.validate_python(record["verdict"])
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s line %d is no verdict and is left alone: %s", path, number, error)
    return kept
