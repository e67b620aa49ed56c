"""`gagar grade`: stored groups graded again, a sheet a group; and how far two graders agree on them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import rich.console
import rich.table
import rich.text

from gagar_jax.config import Config
from gagar_jax.console import number
from gagar_jax.grading import rubric
from gagar_jax.grading.agreement import Agreement, agreement, mean, share, total
from gagar_jax.grading.fence import visible
from gagar_jax.grading.regrade import Regraded, regrade
from gagar_jax.report.groups import Surroundings, read_groups
from gagar_jax.types import CandidateVerdict, Evidence, Grade, Ungraded, UserError

COLUMNS = ("place", "member", "tier", "f", *rubric.WEIGHTS, "flags")
SHOWN = 6
"""Items of evidence that a sheet shows for one member's scores; flags show all of theirs."""


def grade(source: Path, config: Config, *, grader: str | None, groups: Collection[int] | None) -> None:
    """Prints the sheet of every group that has something to rank, and one line on all of them.

    Groups named in `groups` are shown whatever became of them.

    Raises:
      UserError: see `read_groups` and `Surroundings.grader`; or a group asked for is not there.
    """
    surroundings = Surroundings(config)
    judge = surroundings.grader(grader)
    console = rich.console.Console(highlight=False)
    results = []
    for group in read_groups(source, surroundings, only=groups):
        result = regrade(judge, group, config.grading.tiers())
        if groups is not None or result.cause is None or result.verdict or result.detail:
            for part in sheet(result):
                console.print(part, soft_wrap=True)
        results.append(dataclasses.replace(result, group=dataclasses.replace(group, base_files={})))
    _check_found(groups, results, source)
    console.print(summary(results), markup=False, soft_wrap=True)


def compare(
    source: Path, config: Config, *, graders: tuple[str, str], groups: Collection[int] | None
) -> None:
    """Prints how far two graders agree over the groups that both gave a usable verdict on.

    Raises:
      UserError: as `grade`.
    """
    surroundings = Surroundings(config)
    first, second = (surroundings.grader(name) for name in graders)
    pairs = []
    for group in read_groups(source, surroundings, only=groups):
        pairs.append(tuple(regrade(judge, group, config.grading.tiers()) for judge in (first, second)))
    _check_found(groups, [one for one, _ in pairs], source)
    parts = [agreement(one.grades, two.grades) for one, two in pairs if one.grades and two.grades]
    eligible = sum(one.cause is None or bool(one.detail) for one, _ in pairs)
    console = rich.console.Console(highlight=False)
    console.print(
        f"{graders[0]} and {graders[1]}: both graded {len(parts)} of {eligible} groups", markup=False
    )
    console.print(agreement_table(parts, graders))


def sheet(result: Regraded) -> Iterator[rich.console.RenderableType]:
    """What became of one group: ranking, scores, flags with evidence, and what was voided or dropped."""
    group, verdict = result.group, result.verdict
    valid = [t for t in group.trajectories if t.valid]
    passed = sum(t.passed for t in valid)
    head = f"group {group.group} · {group.trajectories[0].ticket.instance_id}"
    head += f" · {len(valid)} valid, {passed} passed"
    if verdict:
        head += f" · {verdict.grader}, {result.seconds:.3g} s"
    yield rich.text.Text(head, "bold")
    if result.cause is not None:
        yield rich.text.Text(f"  not graded: {reason(result)}")
    if verdict is None:
        yield ""
        return
    judged = {c.member: c for c in verdict.candidates}
    if result.grades:
        table = rich.table.Table(box=None, padding=(0, 2, 0, 0))
        for column in COLUMNS:
            table.add_column(column.replace("_", " "), justify="left" if column == "flags" else "right")
        for grade in sorted(result.grades.values(), key=lambda g: (g.rank, g.member)):
            table.add_row(*_row(grade, judged[grade.member]))
        yield table
    for member, evidence in verdict.external.items():
        yield rich.text.Text(f"  member {member} is out of the ranking: copied from outside")
        yield from _evidence(evidence)
    for grade in sorted(result.grades.values(), key=lambda g: (g.rank, g.member)):
        candidate = judged[grade.member]
        if candidate.flags or candidate.evidence:
            yield rich.text.Text(f"  member {grade.member}")
        for flag, evidence in candidate.flags.items():
            yield rich.text.Text(f"    flag {flag.value}")
            yield from _evidence(evidence)
        of_flags = {item for evidence in candidate.flags.values() for item in evidence}
        rest = [item for item in dict.fromkeys(candidate.evidence) if item not in of_flags]
        yield from _evidence(rest[:SHOWN])
        if len(rest) > SHOWN:
            yield rich.text.Text(f"      … and {len(rest) - SHOWN} more")
    for claim in result.dropped:
        yield rich.text.Text(f"  dropped, for it had no evidence: {claim}")
    yield ""


def reason(result: Regraded) -> str:
    """Why there are no grades, in words."""
    words = {
        Ungraded.DROPPED: "all valid members passed, or none did",
        Ungraded.ONE_PASSED: "one passed member, nothing to rank",
        Ungraded.IDENTICAL: "all passed patches are the same",
        Ungraded.VOID: "the verdict is void",
        Ungraded.ERROR: "the grader failed",
    }
    text = words.get(result.cause, str(result.cause)) if result.cause else ""
    return text + (f": {visible(result.detail)}" if result.detail else "")


def summary(results: Sequence[Regraded]) -> str:
    """One line on all groups."""
    graded = [r for r in results if r.cause is None]
    tiers = collections.Counter(g.tier for r in graded for g in r.grades.values())
    causes = collections.Counter(str(r.cause.value) for r in results if r.cause)
    parts = [f"{len(results)} groups: {len(graded)} graded"]
    parts += [f"{count} {cause}" for cause, count in sorted(causes.items())]
    text = ", ".join(parts)
    if graded:
        shares = (f"tier {t} {share(tiers[t], tiers.total()):.3f}" for t in (1, 2, 3))
        text += f" · {tiers.total()} members: {', '.join(shares)}"
        text += f" · claims dropped {sum(len(r.dropped) for r in graded)} of {sum(r.claims for r in graded)}"
        text += f" · {number(mean(r.seconds for r in graded))} s a group"
        tokens = [float(r.tokens) for r in graded if r.tokens is not None]
        text += f", {number(mean(tokens))} tokens" if tokens else ""
    return text


def agreement_table(parts: Sequence[Agreement], graders: tuple[str, str]) -> rich.table.Table:
    """Pair counts of all groups together, tier agreement, and Kendall's tau-b averaged over groups."""
    sums = total(parts)
    table = rich.table.Table("", box=None, padding=(0, 2, 0, 0))
    for column in ("share", "count"):
        table.add_column(column, justify="right")
    for label, count in (
        ("pairs ordered the same way", sums.same),
        ("pairs ordered oppositely", sums.reversed),
        (f"tied by {graders[0]} alone", sums.tied_first),
        (f"tied by {graders[1]} alone", sums.tied_second),
        ("tied by both", sums.tied_both),
    ):
        table.add_row(label, decimal(share(count, sums.pairs)), f"{count} of {sums.pairs}")
    table.add_row("same tier", decimal(sums.tier_share), f"{sums.same_tier} of {sums.members}")
    defined = [part.tau_b for part in parts if part.tau_b == part.tau_b]
    table.add_row("Kendall's tau-b, mean", decimal(mean(defined)), f"{len(defined)} of {len(parts)} groups")
    return table


def decimal(value: float) -> str:
    """Three decimals, or a dash for NaN."""
    return "–" if value != value else f"{value:.3f}"


def _row(grade: Grade, candidate: CandidateVerdict) -> list[str]:
    scores = [str(getattr(candidate.scores, name)) for name in rubric.WEIGHTS]
    flags = ", ".join(flag.value for flag in candidate.flags)
    return [str(grade.rank + 1), str(grade.member), str(grade.tier), f"{grade.quality:.3g}", *scores, flags]


def _evidence(items: Sequence[Evidence]) -> Iterator[rich.text.Text]:
    for item in items:
        name = item.where if item.kind == "step" else f"{item.kind} {item.where}"
        where = visible(name).replace("\n", "\\n")
        first, _, more = item.text.partition("\n")
        yield rich.text.Text(f"      {where}  {visible(first)}{' …' if more else ''}".rstrip(), "dim")


def _check_found(groups: Collection[int] | None, results: Sequence[Regraded], source: Path) -> None:
    missing = sorted(set(groups or ()) - {result.group.group for result in results})
    if missing:
        raise UserError(f"{source} has no group {', '.join(map(str, missing))} (--groups)")
