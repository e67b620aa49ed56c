"""The grader of record when no model is configured: scores and flags by rule, out of the facts alone.

It reads no meaning: a passed patch is taken to be right, and is marked down for what it did besides.
Whether an answer was copied from outside cannot be seen in structure, so `external` is never set.

All of it is this project's own choice; the paper grades with a model. Every score starts at 5. A rule
of `RULES` lowers the scores it names, once, where the trajectory has at least `at_least` of the finding;
three more rules compare with the smallest that was enough (`_size`, `_places`, `_turns`); `_rewrites`
flags. No score falls below 1. What "enough" is: the smallest passed patch of the group, or the task's
reference patch where that is smaller; special-casing patches set no such mark. The order of the members
never matters.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gagar_jax.grading import patch as patches
from gagar_jax.grading import rubric
from gagar_jax.grading.facts import Facts, trajectory_facts
from gagar_jax.grading.findings import Found
from gagar_jax.types import CandidateVerdict, Evidence, Flag, Grade, Group, GroupVerdict, Scores, Trajectory

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Where at least `at_least` of a finding were made: how much each score falls, and the flag."""

    found: Found
    at_least: int = 1
    approach: int = 0
    precision: int = 0
    minimality: int = 0
    side_effects: int = 0
    consistency: int = 0
    flag: Flag | None = None


RULES = (
    # the patch games or breaks something
    Rule(Found.SPECIAL_CASE, approach=4, flag=Flag.TEST_SPECIFIC_WORKAROUND),
    Rule(Found.LITERAL_BRANCH, approach=1),
    Rule(Found.TEST_EDITED, precision=1, side_effects=2, flag=Flag.SEVERE_PROCESS_ISSUE),
    Rule(Found.SYNTAX_ERROR, approach=2, side_effects=4, consistency=2, flag=Flag.UNRESOLVED_REGRESSION),
    Rule(Found.CHECK_REMOVED, approach=1, side_effects=2),
    Rule(Found.BROAD_EXCEPT, approach=2, side_effects=1),
    Rule(Found.SIGNATURE, side_effects=2),
    Rule(Found.FUNCTION_REMOVED, side_effects=2),
    # something was left behind
    Rule(Found.DEBUGGER, minimality=2, side_effects=2, consistency=2),
    Rule(Found.PRINT, minimality=2, side_effects=1, consistency=2),
    Rule(Found.COMMENTED_CODE, minimality=2, consistency=2),
    Rule(Found.UNREACHABLE, minimality=2, consistency=1),
    Rule(Found.UNUSED_ASSIGNMENT, minimality=2, consistency=1),
    Rule(Found.NO_EFFECT, minimality=2, consistency=1),
    Rule(Found.COMMENT, consistency=1),
    # it reaches further than the file
    Rule(Found.NEW_FILE, minimality=2, consistency=1),
    Rule(Found.BINARY, minimality=2, consistency=2),
    Rule(Found.IMPORT, consistency=1),
    Rule(Found.DEPENDENCY, side_effects=1, consistency=2),
    # the way there
    Rule(Found.NEEDLESS_VIEW, precision=1),
    Rule(Found.NEEDLESS_VIEW, at_least=3, precision=1),
    Rule(Found.REPEATED_CALL, precision=1),
    Rule(Found.REPEATED_CALL, at_least=2, precision=1),
    Rule(Found.REPEATED_CALL, at_least=4, flag=Flag.SEVERE_PROCESS_ISSUE),
    Rule(Found.OVERWRITTEN_EDIT, precision=1),
    Rule(Found.OVERWRITTEN_EDIT, at_least=3, precision=1),
    Rule(Found.MALFORMED, precision=1),
    Rule(Found.MALFORMED, at_least=3, precision=1),
)

SIZE = ((1.0, 0, 0), (1.5, 2, 1), (2.5, 4, 2), (4.0, 8, 3))
"""(times the smallest, lines more than it, minimality lost) while either holds; 4 beyond the last row."""

REWRITE_SHARE = 0.5
REWRITE_TIMES = 3
REWRITE_EXTRA = 4
"""An unrequested rewrite changes this share of a function's lines, and in this function alone at least so
many times, and so many more, lines than the smallest whole patch."""


@dataclasses.dataclass(frozen=True)
class _Enough:
    """The smallest that was enough in this group."""

    lines: int
    functions: int
    files: int
    turns: int


class StructuralGrader:
    """Grades by rule; deterministic, order-blind, about a millisecond a member."""

    name = "structural"

    def grade(self, group: Group) -> GroupVerdict:
        """Scores every passed member of a group.

        Raises:
          ValueError: a passed member's patch or the task's reference patch cannot be read.
        """
        facts = {
            t.ticket.member: _with_reference(
                trajectory_facts(t, group.base_files), reference_lines(group.task)
            )
            for t in group.trajectories
            if t.passed
        }
        if not facts:
            return GroupVerdict(self.name, ())
        enough = _enough(list(facts.values()), group.task)
        return GroupVerdict(self.name, tuple(_judge(m, f, enough) for m, f in facts.items()))


def reference_lines(task: Mapping[str, Any]) -> frozenset[str] | None:
    """Every line that the task's reference patch adds or removes, stripped; None where there is none.

    Data sets differ in the direction of `patch` (the fix, or the bug it undoes); both sides serve.
    """
    reference = _reference(task)
    if reference is None:
        return None
    return frozenset(line.text.strip() for f in reference for line in (*f.added, *f.removed))


def _reference(task: Mapping[str, Any]) -> tuple[patches.FilePatch, ...] | None:
    text = task.get("patch")
    if not text:
        return None
    try:
        return patches.parse(text.encode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise ValueError(
            f"task {task.get('instance_id')}: its reference patch cannot be read: {error}"
        ) from None


def _with_reference(facts: Facts, reference: frozenset[str] | None) -> Facts:
    """Settles which literal answers are special cases, where there is a reference: those it does not give."""
    if reference is None:
        return facts
    kinds = (Found.SPECIAL_CASE, Found.LITERAL_BRANCH)
    special = tuple(e for kind in kinds for e in facts.found.get(kind, ()) if e.text not in reference)
    found = {kind: evidence for kind, evidence in facts.found.items() if kind not in kinds}
    return dataclasses.replace(facts, found=found | ({Found.SPECIAL_CASE: special} if special else {}))


def _enough(facts: Sequence[Facts], task: Mapping[str, Any]) -> _Enough:
    honest = [f for f in facts if not f.count(Found.SPECIAL_CASE)] or list(facts)
    lines = min(f.patch_lines for f in honest)
    if reference := _reference(task):
        lines = min(lines, sum(len(f.added) + len(f.removed) for f in reference))
    return _Enough(
        lines=max(lines, 1),
        functions=max(min(len(f.functions) for f in honest), 1),
        files=max(min(len(f.files) for f in honest), 1),
        turns=min(f.turns for f in honest),
    )


def _judge(member: int, facts: Facts, enough: _Enough) -> CandidateVerdict:
    lost = dict.fromkeys(rubric.WEIGHTS, 0)
    flags: dict[Flag, tuple[Evidence, ...]] = {}
    evidence: list[Evidence] = []
    for rule in RULES:
        if facts.count(rule.found) < rule.at_least:
            continue
        for name in lost:
            lost[name] += getattr(rule, name)
        if rule.flag is not None:
            flags[rule.flag] = (*flags.get(rule.flag, ()), *facts.found[rule.found])
        if rule.at_least == 1:
            evidence += facts.found[rule.found]
    for rules in (_size, _places, _turns):
        for name, points, shown in rules(facts, enough):
            lost[name] += points
            evidence.append(shown)
    if rewritten := _rewrites(facts, enough):
        flags[Flag.UNREQUESTED_REWRITE] = rewritten
    scores = Scores(**{name: max(1, 5 - points) for name, points in lost.items()})
    return CandidateVerdict(member, scores, flags, tuple(evidence))


def _fact(facts: Facts, name: str) -> Evidence:
    return Evidence("fact", name, str(getattr(facts, name)))


def _size(facts: Facts, enough: _Enough) -> Iterator[tuple[str, int, Evidence]]:
    """Minimality falls with the patch's lines over the smallest, by the table `SIZE`."""
    lines = facts.patch_lines
    fits = (lost for times, more, lost in SIZE if lines <= max(times * enough.lines, enough.lines + more))
    if points := next(fits, 4):
        yield "minimality", points, _fact(facts, "patch_lines")


def _places(facts: Facts, enough: _Enough) -> Iterator[tuple[str, int, Evidence]]:
    """Precision −2 and side effects −1 for more functions, or more files, than were enough."""
    for name, fewest in (("functions", enough.functions), ("files", enough.files)):
        if len(getattr(facts, name)) > fewest:
            yield "precision", 2, _fact(facts, name)
            yield "side_effects", 1, _fact(facts, name)


def _turns(facts: Facts, enough: _Enough) -> Iterator[tuple[str, int, Evidence]]:
    """Precision −1 for more than twice, and at least three more, turns than were enough."""
    if facts.turns > 2 * enough.turns and facts.turns >= enough.turns + 3:
        yield "precision", 1, _fact(facts, "turns")


def _rewrites(facts: Facts, enough: _Enough) -> tuple[Evidence, ...]:
    least = max(REWRITE_TIMES * enough.lines, enough.lines + REWRITE_EXTRA)
    return tuple(c.evidence for c in facts.changes if c.share >= REWRITE_SHARE and c.lines >= least)


def grade_quality(
    trajectories: Sequence[Trajectory],
    *,
    task: Mapping[str, Any],
    base_files: Mapping[str, str],
    **tiers: float,
) -> list[Grade | None]:
    """The structural grade of trajectories of one task, each judged on its own (evaluation's tier shares).

    Without a group to compare with, "enough" is the task's reference patch, or the trajectory itself.

    Args:
      trajectories: of one task, passed or not.
      task: its record.
      base_files: as in `Group`.
      **tiers: the tier values of `rubric.coefficients`.

    Returns:
      One entry a trajectory, in order: None for those that did not pass, or whose facts cannot be
      computed (logged).
    """
    grades: list[Grade | None] = []
    for t in trajectories:
        grades.append(None)
        if not t.passed:
            continue
        try:
            verdict = StructuralGrader().grade(Group(t.ticket.group, dict(task), [t], dict(base_files)))
        except Exception:  # as in `ledger`: an evaluation must not end with it
            _log.exception("a passed trajectory of %s has no tier", t.ticket.instance_id)
            continue
        (judged,) = verdict.candidates
        grades[-1] = rubric.coefficients({judged.member: (judged.scores, judged.flags)}, **tiers)[
            judged.member
        ]
    return grades
