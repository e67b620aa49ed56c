"""What is known of each submitted group, and how the run folder and the metrics show it. No threads."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

from gagar_jax.grading.facts import trajectory_facts
from gagar_jax.types import Grade, Group, GroupVerdict, Trajectory, Ungraded, to_json

_log = logging.getLogger(__name__)

PENDING, RUNNING, DONE = "pending", "running", "done"
_INELIGIBLE = (Ungraded.DROPPED, Ungraded.ONE_PASSED, Ungraded.IDENTICAL, Ungraded.DISABLED)


@dataclasses.dataclass(eq=False)
class Job:
    """One submitted group. `cause` None and `stage` done means graded."""

    group: Group
    audit: bool = False  # one passed member: asked about external reliance alone
    stage: str = PENDING
    cause: Ungraded | None = None
    detail: str = ""
    verdict: GroupVerdict | None = None
    grades: dict[int, Grade] = dataclasses.field(default_factory=dict)
    redeemed: bool = False  # its batch has been told what there was
    abandoned: bool = False  # … while the grader was at work on it
    grade_s: float | None = None
    wait_s: float = 0.0

    @property
    def graded(self) -> bool:
        return self.stage == DONE and self.cause is None

    @property
    def usable(self) -> bool:
        return self.graded or (self.audit and self.stage == DONE and self.cause is Ungraded.ONE_PASSED)

    @property
    def settled(self) -> bool:
        return self.stage == DONE or self.redeemed

    def __str__(self) -> str:
        return f"group {self.group.group} ({self.group.task.get('instance_id', 'task without id')})"


def eligibility(group: Group) -> Ungraded | None:
    """Why a group has nothing to rank, from its valid members; None when it should be graded."""
    valid = [t for t in group.trajectories if t.valid]
    passed = [t for t in valid if t.passed]
    if not passed or len(passed) == len(valid):
        return Ungraded.DROPPED
    if len(passed) == 1:
        return Ungraded.ONE_PASSED
    if len({t.patch for t in passed}) == 1:
        return Ungraded.IDENTICAL
    return None


def record(job: Job) -> dict[str, Any]:
    """All that is known of a group, JSON-ready.

    Returns:
      {"group", "instance_id", "graded", "cause", "detail", "grader", "grade_s", "external", "members"}.
      "detail" says more of an error, a void verdict or a late one. "external" maps the member (as text) to
      the evidence that its answer was copied from outside. A late verdict is here if it came by now, though
      nothing is made of it. "members" maps the member to {"facts", "facts_error", "verdict", "tier", "rank",
      "quality"}; facts are null where they cannot be computed, and `facts_error` says why.
    """
    verdict = job.verdict
    judged = {c.member: c for c in verdict.candidates} if verdict else {}
    members = {}
    for trajectory in job.group.trajectories:
        member = trajectory.ticket.member
        grade = job.grades.get(member) if job.graded else None
        members[str(member)] = {
            **_facts(trajectory, job.group),
            "verdict": to_json(judged.get(member)),
            "tier": grade.tier if grade else None,
            "rank": grade.rank if grade else None,
            "quality": grade.quality if grade else 1.0,
        }
    return {
        "group": job.group.group,
        "instance_id": job.group.task.get("instance_id"),
        "graded": job.graded,
        "cause": to_json(job.cause),
        "detail": job.detail,
        "grader": verdict.grader if verdict else None,
        "grade_s": job.grade_s,
        "external": to_json(verdict.external) if verdict else {},
        "members": members,
    }


def _facts(trajectory: Trajectory, group: Group) -> dict[str, Any]:
    try:
        facts = trajectory_facts(trajectory, group.base_files)
    except Exception as error:
        # A member may have written anything. Whatever its facts fail for, it would meet every resume again.
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        where = f"group {group.group} member {trajectory.ticket.member}"
        _log.warning("grading: no facts of %s: %s", where, reason, exc_info=not isinstance(error, ValueError))
        return {"facts": None, "facts_error": reason}
    return {"facts": to_json(facts) | {"patch_lines": facts.patch_lines}, "facts_error": None}


def metrics(jobs: Sequence[Job]) -> dict[str, float]:
    """One step's numbers over its groups; a mean or share of nothing is NaN.

    Returns:
      tier1_share (of graded passed members), graded_share (of groups with something to rank),
      ungraded_<cause> (groups), grade_wait_s (what the train step waited), grade_s_mean (seconds a call).
    """
    causes = collections.Counter(j.cause for j in jobs)
    tiers = [grade.tier for j in jobs if j.graded for grade in j.grades.values()]
    eligible = [j for j in jobs if j.cause not in _INELIGIBLE]
    return {
        "tier1_share": _mean([t == 1 for t in tiers]),
        "graded_share": _mean([j.graded for j in eligible]),
        **{f"ungraded_{cause.value}": float(causes[cause]) for cause in Ungraded},
        "grade_wait_s": max((j.wait_s for j in jobs), default=0.0),
        "grade_s_mean": _mean([j.grade_s for j in jobs if j.grade_s is not None]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
