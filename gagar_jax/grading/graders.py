"""A grader by its name in the settings. What each one does is in its own file."""

from __future__ import annotations

from gagar_jax.config import GradingConfig
from gagar_jax.grading.service import Grader
from gagar_jax.grading.structural import StructuralGrader


def make_grader(config: GradingConfig) -> Grader:
    """The grader that `grading.grader` names."""
    return StructuralGrader()
