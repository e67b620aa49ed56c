"""`gagar export-verdicts`: a grader's conversations that may be learnt from, as a file of examples."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pydantic
import rich.console

from gagar_jax import config as settings
from gagar_jax.files import replacing
from gagar_jax.grading.distill import Audited, Conversation, LeftOut, Standards, chat, left_out
from gagar_jax.report.groups import check_result_path
from gagar_jax.types import UserError

SHORTEST_SECRET = 8
"""Characters. A shorter value of the key's variable is a placeholder ("none") that any text may hold."""


def export(
    run_dir: Path,
    out: Path,
    *,
    standards: Standards,
    audit: Path | None,
    arguments: Literal["text", "object"],
) -> collections.Counter[LeftOut | None]:
    """Writes one example a line, and prints how many there are and why others were left out.

    Args:
      run_dir: of a run whose grader was a chat model.
      out: is replaced as a whole, and only if there is something to write.
      standards: what the audit must bear out, and two orders of one call.
      audit: a file of `gagar audit-grader --json`; None holds the grader to nothing but its own verdicts.
      arguments: see `distill.chat`.

    Returns:
      How many conversations were left out, by reason; those exported under None.

    Raises:
      UserError: no conversations, a damaged line, an audit that does not bear the standards out, or nothing
        left to export.
    """
    path = run_dir / "grading.jsonl"
    if not path.exists():
        raise UserError(
            f"{path} does not exist: only the conversations of a run graded by a chat model are kept "
            "(grading.grader: agentic)"
        )
    check_result_path("--out", out)
    if out.resolve() == path.resolve():
        raise UserError(f"--out {out}: must be another file, not the run's own grading.jsonl")
    audited = read_audit(audit) if audit else None
    if audited and (short := standards.shortfalls(audited)):
        raise UserError(
            f"{audit}: {audited.grader} is not fit to be learnt from: {'; '.join(short)}. Nothing was "
            "written."
        )
    grader = audited.grader if audited else None
    counts: collections.Counter[LeftOut | None] = collections.Counter()
    unchecked, secrets, graders = 0, _secrets(run_dir), set()
    with replacing(out) as file:
        for conversation in conversations(path):
            reason = (
                left_out(conversation, grader=grader, min_order=standards.min_order, secrets=secrets)
                if conversation
                else LeftOut.TORN
            )
            counts[reason] += 1
            if conversation and reason is None:
                unchecked += conversation.order_agreement is None
                graders.add(conversation.grader)
                file.write(json.dumps(chat(conversation, arguments=arguments)).encode() + b"\n")
        if not counts[None]:
            raise UserError(
                f"{path}: none of {counts.total()} conversations can be exported "
                f"({'; '.join(_reasons(counts)) or 'it is empty'}). Nothing was written."
            )
    shown = rich.console.Console(highlight=False)
    lines = [
        f"{counts[None]} of {counts.total()} conversations of {', '.join(sorted(graders))} → {out}",
        *(f"left out: {reason}" for reason in _reasons(counts)),
    ]
    if unchecked:
        lines.append(
            f"{unchecked} of those exported were judged in one order only, or had one member to judge"
        )
    if audited is None:
        lines.append(
            "no audit was given (--audit): nothing here says that the grader is fit to be learnt from"
        )
    for line in lines:
        shown.print(line, markup=False, soft_wrap=True)
    return counts


def conversations(path: Path) -> Iterator[Conversation | None]:
    """Those of a grading.jsonl, in its order; None for a last line that was not written to its end.

    Raises:
      UserError: a line that is no conversation, named by its number.
    """
    with path.open("rb") as lines:
        for at, line in enumerate(lines, 1):
            try:
                yield Conversation.model_validate_json(line)
            except pydantic.ValidationError as error:
                if not line.endswith(b"\n"):
                    yield None
                    continue
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise UserError(
                    f"{path}, line {at}: not a conversation of a grader ({where}{': ' if where else ''}"
                    f"{first['msg']}). Remove the line, or give another run"
                ) from None


def read_audit(path: Path) -> Audited:
    """Raises UserError where the file is not what `gagar audit-grader --json` writes."""
    try:
        return Audited.model_validate_json(path.read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise UserError(
            f"--audit {path}: not an audit ({reason}). Make one: gagar audit-grader RUN_DIR --json {path}"
        ) from None


def _secrets(run_dir: Path) -> list[str]:
    """The key that the run's grader is asked with, where this environment has it."""
    saved = run_dir / "config.yaml"
    config = settings.load(saved) if saved.exists() else settings.Config()
    value = os.environ.get(config.grading.agentic.api_key_env, "")
    return [value] if len(value) >= SHORTEST_SECRET else []


def _reasons(counts: collections.Counter[LeftOut | None]) -> list[str]:
    return [f"{counts[reason]} {reason.value}" for reason in LeftOut if counts[reason]]
