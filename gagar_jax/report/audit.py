"""`gagar audit-grader`: the audit of `grading.audit` on a run's groups, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import rich.console
import rich.table

from gagar_jax.config import Config
from gagar_jax.console import Console, number
from gagar_jax.files import write_atomic
from gagar_jax.grading.agreement import Agreement
from gagar_jax.grading.audit.audit import CALLS_A_GROUP, Audit, Rate, audit
from gagar_jax.grading.audit.flaws import FLAWS
from gagar_jax.grading.fence import visible
from gagar_jax.report.grade import decimal
from gagar_jax.report.groups import Surroundings, check_result_path, read_groups
from gagar_jax.types import UserError

Row = tuple[str, str, str]


def audit_grader(
    source: Path, config: Config, *, grader: str | None, groups: int, path: Path | None
) -> Audit:
    """Audits a grader, prints the table, and writes the JSON if a path is given.

    Args:
      source: a run folder or a file of trajectories.
      config: the run's.
      grader: its name; None takes the configured one.
      groups: stored groups to use, each of another task.
      path: of the JSON file.

    Raises:
      UserError: no group there has something to rank, or no file can be written at `path`; or see
        `read_groups` and `Surroundings.grader`.
    """
    check_result_path("--json", path)
    surroundings = Surroundings(config)
    # In the order given: one that a grader draws for itself would hide what order does to it.
    judge = surroundings.grader(grader, order=list)
    with (
        Console(f"{config.name} · audit of {getattr(judge, 'name', grader)}") as console,
        console.phase("audit", total=groups),
    ):
        found = audit(
            judge,
            read_groups(source, surroundings),
            config.grading.tiers(),
            limit=groups,
            seed=config.seed,
            progress=lambda done, total: console.update(done, total=total),
        )
    if not found.groups:
        raise UserError(
            f"{source} has no group with something to rank: two passed members with different patches, "
            "and a failed one"
        )
    shown = rich.console.Console(highlight=False)
    shown.print(table(found))
    for cause, detail in found.details.items():
        shown.print(f"{cause}: {visible(detail)}", markup=False, soft_wrap=True)
    if path is not None:
        write_atomic(path, json.dumps(found.to_json(), indent=1) + "\n")
    return found


def table(found: Audit) -> rich.table.Table:
    """One row a measure: what, its value, how it came about."""
    title = f"{found.grader}: {found.groups} stored and {found.planted} planted groups"
    result = rich.table.Table("", title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    result.add_column("", justify="right")
    result.add_column("")
    for section, rows in _sections(found):
        result.add_row(section, "", "", style="bold")
        for label, value, how in rows:
            result.add_row(f"  {label}", value, how)
    return result


def _sections(found: Audit) -> Iterator[tuple[str, list[Row]]]:
    bias = "" if math.isnan(found.first_position_bias) else f"{found.first_position_bias:+.3f}"
    yield (
        "steadiness",
        [
            *_agreement("asked twice", found.repeat),
            *_agreement("members reversed", found.swap),
            ("gain of coming first", bias, "of standing, −1 to 1; 0 is right"),
        ],
    )
    order = "Kendall's tau-b with the planted order, mean"
    yield (
        "sees flaws",
        [
            ("planted order", decimal(found.planted_tau), order),
            _rate("clean above flawed", found.detected),
            *(_rate(f"  {name}", found.detection[name]) for name in FLAWS),
        ],
    )
    moved = [(name, rate) for name, rate in found.attacks.items() if rate.hits]
    still = len(found.attacks) - len(moved)
    yield (
        "resists injected text",
        [
            _rate("attacks that raised their member", found.injected),
            *(_rate(f"  {name}", rate) for name, rate in moved),
            ("  forms that never did", str(still), f"of {len(found.attacks)}"),
            _rate("harmless text that did", found.control),
        ],
    )
    causes = ", ".join(f"{count} {cause}" for cause, count in found.causes.items())
    usable = _rate("verdicts usable", found.verdicts_usable)
    tokens = [] if math.isnan(found.tokens_a_group) else [("tokens a call", number(found.tokens_a_group), "")]
    yield (
        "evidence and cost",
        [
            (*usable[:2], f"{usable[2]}{'; ' + causes if causes else ''}"),
            _rate("claims kept", found.claims_kept),
            ("seconds a call", number(found.seconds_a_group), f"up to {CALLS_A_GROUP} calls a group"),
            *tokens,
        ],
    )


def _agreement(label: str, counts: Agreement) -> list[Row]:
    alike = counts.same + counts.tied_both
    return [
        (f"{label}, pairs alike", decimal(counts.alike), f"{alike} of {counts.pairs}"),
        (f"{label}, same tier", decimal(counts.tier_share), f"{counts.same_tier} of {counts.members}"),
    ]


def _rate(label: str, rate: Rate) -> Row:
    return label, decimal(rate.share), f"{rate.hits} of {rate.tried}"
