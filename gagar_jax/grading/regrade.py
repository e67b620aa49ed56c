"""One group through a grader, its verdict's validation and the rubric, at once: the service without threads.

For grading stored groups, auditing graders and comparing two runs. The trainer uses `service`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping

from gagar_jax.grading import rubric
from gagar_jax.grading.ledger import eligibility
from gagar_jax.grading.service import Grader
from gagar_jax.grading.verdict import VoidVerdict, validate
from gagar_jax.types import Grade, Group, GroupVerdict, Ungraded

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Regraded:
    """What became of one group.

    cause: why there are no grades, None where there are; `detail` says more of an error or a void verdict.
    dropped: claims left out because they had no evidence, in words; claims: how many were made.
    seconds: of the grader's call; tokens: it used, None where it does not count them.
    """

    group: Group
    cause: Ungraded | None = None
    detail: str = ""
    verdict: GroupVerdict | None = None
    grades: Mapping[int, Grade] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    claims: int = 0
    seconds: float = 0.0
    tokens: int | None = None


def regrade(grader: Grader, group: Group, tiers: Mapping[str, float]) -> Regraded:
    """Asks the grader about a group that has something to rank, or one answer to audit; never raises.

    Args:
      grader: is called at most once.
      group: complete, with the base text of the files its members touched.
      tiers: see `GradingConfig.tiers`.
    """
    cause = eligibility(group)
    audit = cause is Ungraded.ONE_PASSED and getattr(grader, "audits_external", False)
    if cause is not None and not audit:
        return Regraded(group, cause)
    return ask(grader, group, tiers, cause=cause)


def ask(
    grader: Grader, group: Group, tiers: Mapping[str, float], *, cause: Ungraded | None = None
) -> Regraded:
    """Asks the grader about a group, whether or not training would have it graded; never raises.

    Args:
      grader, group, tiers: as in `regrade`.
      cause: why its members are not to be ranked, so that only `external` counts; None ranks them.
    """
    before, started = getattr(grader, "tokens", None), time.monotonic()
    given: GroupVerdict | None = None
    result = Regraded(group, cause)
    try:
        given = grader.grade(group)
        verdict, _ = validate(given, group)
        entries = {
            c.member: (c.scores, c.flags) for c in verdict.candidates if c.member not in verdict.external
        }
        grades = rubric.coefficients(entries, **tiers) if cause is None else {}
        result = dataclasses.replace(result, verdict=verdict, grades=grades, dropped=_unproved(given))
    except VoidVerdict as void:
        result = dataclasses.replace(result, cause=Ungraded.VOID, detail=void.reason)
    except (Exception, SystemExit) as error:
        _log.debug("regrading group %d failed", group.group, exc_info=True)
        detail = f"{type(error).__name__}: {error}"
        result = dataclasses.replace(result, cause=Ungraded.ERROR, detail=detail)
    return dataclasses.replace(
        result,
        claims=_claims(given) if result.verdict else 0,
        seconds=time.monotonic() - started,
        tokens=None if before is None else getattr(grader, "tokens", before) - before,
    )


def _unproved(verdict: GroupVerdict) -> tuple[str, ...]:
    flags = [
        f"member {c.member}: {flag.value}"
        for c in verdict.candidates
        for flag, evidence in c.flags.items()
        if not evidence
    ]
    return (*flags, *(f"member {m}: external" for m, evidence in verdict.external.items() if not evidence))


def _claims(verdict: GroupVerdict | None) -> int:
    return sum(len(c.flags) for c in verdict.candidates) + len(verdict.external) if verdict else 0
