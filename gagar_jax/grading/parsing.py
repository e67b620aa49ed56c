"""Python that an agent wrote, as a syntax tree, or why there is none: every grading module parses here."""

from __future__ import annotations

import ast

from gagar_jax.types import parse_python


def parsed(text: str) -> ast.Module | SyntaxError:
    """`parse_python`, its error returned: what one member wrote must not end a run.

    Beyond plain syntax errors there are null bytes (ValueError), and nesting that the parser has no stack
    for (MemoryError) or that makes no tree (RecursionError, in expressions of some thousand operators).
    """
    try:
        return parse_python(text)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError) as error:
        return SyntaxError(str(error))
