"""Groupwise grading: facts → a grader's verdict → its validation → tiers and coefficients. No jax here.

Start at `service` (what the trainer talks to); `rubric` holds the arithmetic, `structural` the grader
of record when no model is configured.
"""
