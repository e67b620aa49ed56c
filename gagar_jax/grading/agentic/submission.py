"""The verdict as a grader submits it: a strict schema, no coercion, nothing filled in.

Whether its evidence exists is `grading.verdict`'s to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from gagar_jax.types import CandidateVerdict, Evidence, Flag, GroupVerdict, Scores

Score = Annotated[int, pydantic.Field(ge=1, le=5)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class EvidenceItem(_Strict):
    """Something a reader can check."""

    kind: Literal["patch", "file", "step", "command", "fact"]
    where: str
    """`path:line` (patch, file), `step N`, the exact command, or the fact's name."""
    text: str
    """The whole line, or a part of the step's or command's text, letter for letter."""


class ScoresItem(_Strict):
    approach: Score
    precision: Score
    minimality: Score
    side_effects: Score
    consistency: Score


class FlagsItem(_Strict):
    """Each flag with its evidence; an empty list says that it does not hold."""

    unrequested_rewrite: list[EvidenceItem] = []
    test_specific_workaround: list[EvidenceItem] = []
    severe_process_issue: list[EvidenceItem] = []
    unresolved_regression: list[EvidenceItem] = []


class CandidateItem(_Strict):
    id: str
    scores: ScoresItem
    flags: FlagsItem = FlagsItem()
    evidence: list[EvidenceItem] = []


class ExternalItem(_Strict):
    """A candidate, passed or not, whose answer was copied from outside."""

    id: str
    evidence: list[EvidenceItem]


class Submission(_Strict):
    candidates: list[CandidateItem]
    external: list[ExternalItem] = []


class Unusable(Exception):
    """The submission cannot be read; the message says why, for the grader and for a person."""


def read(text: str, members: Mapping[str, int], passed: list[str], grader: str) -> GroupVerdict:
    """A submission's JSON as a verdict on the group's members.

    Args:
      text: the tool call's arguments.
      members: anonymous name → member.
      passed: the names that must be scored, each once, and no other.
      grader: what to call the grader.

    Raises:
      Unusable: not one JSON object of the schema, or its candidates are not exactly `passed`.
    """
    try:
        submission = Submission.model_validate_json(text)
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'verdict'}: {e['msg']}" for e in error.errors()[:5]]
        raise Unusable("; ".join(problems)) from None
    named = [candidate.id for candidate in submission.candidates]
    if sorted(named) != sorted(passed):
        raise Unusable(f"candidates are {', '.join(named) or 'none'}; score each of {', '.join(passed)} once")
    outside = [item.id for item in submission.external]
    if len(set(outside)) != len(outside) or not members.keys() >= set(outside):
        raise Unusable(f"external names {', '.join(outside)}: each must be a candidate, and once")
    return GroupVerdict(
        grader,
        tuple(
            CandidateVerdict(
                members[c.id],
                Scores(**c.scores.model_dump()),
                {flag: shown for flag in Flag if (shown := _evidence(getattr(c.flags, flag.value)))},
                _evidence(c.evidence),
            )
            for c in submission.candidates
        ),
        {members[item.id]: _evidence(item.evidence) for item in submission.external},
    )


def schema() -> dict[str, Any]:
    """The JSON schema of the verdict, as the tool declares it."""
    return Submission.model_json_schema()


def _evidence(items: list[EvidenceItem]) -> tuple[Evidence, ...]:
    return tuple(Evidence(item.kind, item.where, item.text) for item in items)
