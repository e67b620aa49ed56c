"""A grader by its name in the settings. What each one does is in its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gagar_jax.config import GradingConfig
from gagar_jax.grading.agentic.grader import AgenticGrader, Order, Repository
from gagar_jax.grading.service import Grader
from gagar_jax.grading.structural import StructuralGrader
from gagar_jax.types import CommandRunner


def make_grader(
    config: GradingConfig,
    *,
    run: CommandRunner | None = None,
    repository: Repository | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
    order: Order | None = None,
    spent: int = 0,
) -> Grader:
    """The grader that `grading.grader` names. Arguments are for `AgenticGrader`; see there.

    Raises:
      UserError: what it needs is not installed or not set.
    """
    if config.grader == "agentic":
        return AgenticGrader(
            config.agentic, run=run, repository=repository, keep=keep, order=order, spent=spent
        )
    return StructuralGrader()
