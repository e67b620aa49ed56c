"""Whether a grader's verdict may be used: complete, in range, and shown by evidence that exists.

A verdict is rejected whole or used; no number is ever clamped or filled in. No grading happens here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from gagar_jax.grading import patch as patches
from gagar_jax.grading import rubric
from gagar_jax.grading.facts import Facts, trajectory_facts
from gagar_jax.grading.fence import visible
from gagar_jax.types import CandidateVerdict, Evidence, Flag, Group, GroupVerdict, Scores, Trajectory


class VoidVerdict(Exception):
    """The verdict must not be used; `reason` says why, for a person."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def validate(verdict: GroupVerdict, group: Group) -> tuple[GroupVerdict, int]:
    """Checks a verdict against the group it is of.

    Args:
      verdict: what the grader returned.
      group: what it was shown.

    Returns:
      (the verdict without the flags and external claims that had no evidence, how many those were).

    Raises:
      VoidVerdict: not a `GroupVerdict`; a passed member missing or twice; an unknown or failed member;
        a score that is not an int in 1…5; an unknown flag; evidence that does not exist.
    """
    if not isinstance(verdict, GroupVerdict):
        raise VoidVerdict(f"the grader returned {type(verdict).__name__}, not a GroupVerdict")
    members = {t.ticket.member: t for t in group.trajectories}
    _check_members(verdict, members)
    dropped = 0
    kept = []
    for candidate in verdict.candidates:
        _check_scores(candidate)
        source = _Source(members[candidate.member], group, verdict.commands)
        for flag, evidence in candidate.flags.items():
            if not isinstance(flag, Flag):
                raise VoidVerdict(f"member {candidate.member}: {flag!r} is not a flag")
            source.check(evidence)
            dropped += not evidence
        source.check(candidate.evidence)
        kept.append(dataclasses.replace(candidate, flags={f: e for f, e in candidate.flags.items() if e}))
    for member, evidence in verdict.external.items():
        if member not in members:
            raise VoidVerdict(f"external: member {member} is not in the group")
        _Source(members[member], group, verdict.commands).check(evidence)
        dropped += not evidence
    external = {m: e for m, e in verdict.external.items() if e}
    return dataclasses.replace(verdict, candidates=tuple(kept), external=external), dropped


def _check_members(verdict: GroupVerdict, members: Mapping[int, Trajectory]) -> None:
    if not all(isinstance(c, CandidateVerdict) for c in verdict.candidates):
        raise VoidVerdict("a candidate is not a CandidateVerdict")
    for member, times in Counter(c.member for c in verdict.candidates).items():
        if member not in members:
            raise VoidVerdict(f"member {member} is not in the group")
        if not members[member].passed:
            raise VoidVerdict(f"member {member} did not pass, so it has no scores")
        if times > 1:
            raise VoidVerdict(f"member {member} is judged {times} times")
    judged = {c.member for c in verdict.candidates}
    missing = [m for m, t in members.items() if t.passed and m not in judged]
    if missing:
        raise VoidVerdict(f"passed members {missing} are not judged")


def _check_scores(candidate: CandidateVerdict) -> None:
    if not isinstance(candidate.scores, Scores):
        raise VoidVerdict(f"member {candidate.member}: the scores are a {type(candidate.scores).__name__}")
    for name in rubric.WEIGHTS:
        score = getattr(candidate.scores, name)
        if type(score) is not int or not 1 <= score <= 5:  # bool is an int to isinstance
            raise VoidVerdict(f"member {candidate.member}: {name} is {score!r}, not an integer from 1 to 5")


class _Source:
    """What evidence about one member is checked against."""

    def __init__(
        self, trajectory: Trajectory, group: Group, commands: Mapping[int, Mapping[str, tuple[str, ...]]]
    ) -> None:
        self.trajectory = trajectory
        self.base_files = group.base_files
        self.commands = commands.get(trajectory.ticket.member, {})

    def check(self, evidence: tuple[Evidence, ...]) -> None:
        for item in evidence:
            holds = isinstance(item, Evidence) and {
                "patch": self._patch,
                "file": self._file,
                "step": self._step,
                "command": self._command,
                "fact": self._fact,
            }.get(item.kind, lambda _: False)(item)
            if not holds:
                raise VoidVerdict(
                    f"member {self.trajectory.ticket.member}: this evidence does not exist: {item}"
                )

    def _patch(self, item: Evidence) -> bool:
        """A line that the member's patch adds, or one that it removes."""
        path, _, number = item.where.rpartition(":")
        lines = {
            (name, line.number): line.text
            for f in patches.parse(self.trajectory.patch)
            for name, side in ((f.old_path, f.removed), (f.path, f.added))
            for line in side
            if _same(line.text, item.text)
        }
        return number.isdecimal() and (path, int(number)) in lines

    def _file(self, item: Evidence) -> bool:
        """A line of a touched file, before or after, or a touched file's bare path with no quote."""
        path, _, number = item.where.rpartition(":")
        texts = [text for name, text in self.base_files.items() if name == path]
        for file, _, after in patches.apply_all(self.trajectory.patch, self.base_files):
            if file.path == item.where:
                return not item.text.strip()
            texts += [after] * (file.path == path)
        if not number.isdecimal():
            return False
        return any(_same("".join(t.split("\n")[int(number) - 1 : int(number)]), item.text) for t in texts)

    def _step(self, item: Evidence) -> bool:
        """A turn, counted from 1, whose action or reply holds the text."""
        number = item.where.removeprefix("step ")
        turns = self.trajectory.turns
        if not number.isdecimal() or not 1 <= int(number) <= len(turns):
            return False
        turn = turns[int(number) - 1]
        if not item.text.strip():
            return not turn.action.strip()  # an empty action can only be quoted as empty
        return _holds(turn.action, item.text) or _holds(turn.observation, item.text)

    def _command(self, item: Evidence) -> bool:
        """A command of the grader's record that printed the text, one of the times that it ran."""
        outputs = self.commands.get(item.where, ())
        return bool(item.text.strip()) and any(_holds(output, item.text) for output in outputs)

    def _fact(self, item: Evidence) -> bool:
        """A field of the member's computed facts with this value."""
        if item.where != "patch_lines" and item.where not in {f.name for f in dataclasses.fields(Facts)}:
            return False
        return str(getattr(trajectory_facts(self.trajectory, self.base_files), item.where)) == item.text


def _same(line: str, quoted: str) -> bool:
    """A model saw the line as `visible` shows it: a hidden character must not make it unquotable."""
    return bool(quoted.strip()) and quoted.strip() in (line.strip(), visible(line).strip())


def _holds(text: str, quoted: str) -> bool:
    return quoted in text or quoted in visible(text)
