"""Comments that a patch adds to a Python file, and which of them are code. Lines in, line numbers out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from gagar_jax.grading.parsing import parsed
from gagar_jax.grading.patch import Line

_BLOCK = re.compile(r"(if|for|while|with|try|else|elif|except|finally|def|class)\b.*:$")


def added_comments(added: Iterable[Line], removed: Iterable[Line], base: str) -> Iterator[tuple[int, bool]]:
    """(line number, is it commented-out code) of each comment that the base file did not have.

    A comment that was on a removed line (kept beside a changed statement, or moved) is not new.
    """
    old = [line.text for line in removed]
    statements = {text.strip() for text in old}
    for line in added:
        comment = _comment(line.text) if "#" in line.text else ""
        if comment and not any(comment in text for text in old):
            yield line.number, _is_code(comment.lstrip("#").strip(), statements, base)


def _comment(line: str) -> str:
    if line.lstrip().startswith("#"):
        return line.strip()
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline):
            if token.type == tokenize.COMMENT:
                return token.string
    except (tokenize.TokenError, SyntaxError):
        pass  # the line opens a bracket or a string and does not close it: no comment came before that
    return ""


def _is_code(text: str, removed: set[str], base: str) -> bool:
    if not text or text in removed:
        return bool(text)
    tree = parsed(text + " pass" if _BLOCK.match(text) else text)
    if isinstance(tree, SyntaxError):
        return False
    match tree.body:
        case [ast.Return(value=ast.Name(id=name))] | [ast.Raise(exc=ast.Name(id=name))]:
            return re.search(rf"\b{re.escape(name)}\b", base) is not None  # "return early" is prose
        case [ast.Expr(value=ast.Call() | ast.Await() | ast.Yield())]:
            return True
        case [ast.Expr() | ast.Pass() | ast.Break() | ast.Continue() | ast.AnnAssign(value=None)] | []:
            return False
    return True
