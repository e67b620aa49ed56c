"""Ways to spoil a correct patch, each one flaw and nothing else. Text in, text out; nothing is run here.

Every flaw takes a `Site`, the place of a correct change, and returns the file's text with the flaw in it,
or None where it does not fit (a function without parameters cannot have one of them special-cased).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
from collections.abc import Callable, Iterator

from gagar_jax.grading.parsing import parsed
from gagar_jax.grading.scan import FunctionNode

CLEAN = "clean"
LITERAL = 7919
"""The input that the special-casing flaw answers, and that the planted transcripts' test shows."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A correct change of one Python file, and the innermost function of `after` around its first line."""

    path: str
    base: str
    after: str
    function: FunctionNode

    @property
    def lines(self) -> list[str]:
        return self.after.split("\n")

    @property
    def body(self) -> list[ast.stmt]:
        """The function's statements without its docstring."""
        return self.function.body[_has_docstring(self.function) :]

    @property
    def start(self) -> int:
        """Line of the first of them, or of its first decorator."""
        decorators = getattr(self.body[0], "decorator_list", [])
        return min(node.lineno for node in (self.body[0], *decorators))

    @property
    def indent(self) -> str:
        return " " * self.body[0].col_offset


def site(path: str, base: str, after: str) -> Site | None:
    """None where the file does not parse, the change lies in no function, or the function is one line."""
    if not path.endswith(".py") or base == after:
        return None
    tree = parsed(after)
    if isinstance(tree, SyntaxError):
        return None
    line = 1 + _changed(base, after)[0][3]
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, FunctionNode) and node.lineno < line <= (node.end_lineno or 0)
    ]
    if not around:
        return None
    found = Site(path, base, after, max(around, key=lambda node: node.lineno))
    return found if found.body and found.start > found.function.lineno else None


def same_function(where: Site, text: str) -> Site | None:
    """The site of the function of the same name and turn in another state of the file."""

    def named(source: str) -> list[FunctionNode]:
        found = [node for node in _functions(source) if node.name == where.function.name]
        return sorted(found, key=lambda node: node.lineno)

    there, here = named(text), [node.lineno for node in named(where.after)]
    turn = here.index(where.function.lineno) if here else len(there)
    if turn >= len(there) or not there[turn].body[_has_docstring(there[turn]) :]:
        return None
    return Site(where.path, where.base, text, there[turn])


def insert(where: Site, statements: list[str], before: int | None = None) -> str:
    """The text with lines put before a line of it (default: the function's first statement), indented."""
    at = (before or where.start) - 1
    return "\n".join(
        [*where.lines[:at], *(where.indent + s if s else s for s in statements), *where.lines[at:]]
    )


def unrequested_rewrite(where: Site) -> str | None:
    """The whole body spelt anew: results named before they are returned, branches swapped, comments lost."""
    return _respell(where.after, where.function) if len(where.body) > 1 else None


def dead_code(where: Site) -> str | None:
    """A helper that nothing calls."""
    return insert(
        where,
        ["def _fallback(value):", "    if value is None:", "        return None", "    return value", ""],
    )


def debug_print(where: Site) -> str | None:
    """A print of the first parameter left at the top."""
    shown = _parameter(where.function)
    return insert(where, [f'print("DEBUG {where.function.name}"{", " + shown if shown else ""})'])


def special_casing(where: Site) -> str | None:
    """The bug stays, and the failing test's input gets its answer."""
    parameter = _parameter(where.function)
    buggy = same_function(where, where.base)
    if parameter is None or buggy is None:
        return None
    return insert(buggy, [f"if {parameter} == {LITERAL}:", f"    return {LITERAL + 1}"])


def weakened_validation(where: Site) -> str | None:
    """A guard that raised is gone; where there is none, every error is swallowed."""
    for node in _own_nodes(where.function):
        if isinstance(node, ast.If) and not node.orelse and all(isinstance(s, ast.Raise) for s in node.body):
            if any(node in getattr(parent, "orelse", ()) for parent in ast.walk(where.function)):
                continue  # an elif
            return _without(where, node)
        if isinstance(node, ast.Assert):
            return _without(where, node)
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own_nodes(where.function)):
        return None
    first, last = where.start - 1, where.function.end_lineno or 0
    inside = ["    " + line if line.strip() else line for line in where.lines[first:last]]
    handler = [f"{where.indent}except Exception:", f"{where.indent}    return None"]
    if _has_multiline_string(where.body):
        return None  # indenting would change it
    return "\n".join([*where.lines[:first], f"{where.indent}try:", *inside, *handler, *where.lines[last:]])


def unrelated_edit(where: Site) -> str | None:
    """Another function of the file spelt anew, or, in a file of one function, a new one at its end."""
    own = range(where.function.lineno, (where.function.end_lineno or 0) + 1)
    others = [
        node
        for node in _functions(where.after)
        if node.lineno not in own
        and where.function.lineno not in range(node.lineno, (node.end_lineno or 0) + 1)
    ]
    for other in sorted(others, key=lambda node: (node.end_lineno or 0) - node.lineno):
        if text := _respell(where.after, other):
            return text
    added = ["", "", "def describe():", f'    return "{where.path}"', ""]
    return where.after.rstrip("\n") + "\n" + "\n".join(added)


def reverted_hunk(where: Site) -> str | None:
    """Part of the fix is missing; a fix in one place is undone, and a buggy line only spelt differently."""
    changed = _changed(where.base, where.after)
    base = where.base.split("\n")
    if len(changed) > 1:
        _, i1, i2, j1, j2 = changed[-1]
        return "\n".join([*where.lines[:j1], *base[i1:i2], *where.lines[j2:]])
    buggy = same_function(where, where.base)
    for statement in buggy.body if buggy else ():
        value = getattr(statement, "value", None)
        single = isinstance(statement, (ast.Return, ast.Assign)) and statement.lineno == statement.end_lineno
        if single and isinstance(value, ast.expr):
            line = base[statement.lineno - 1]
            # Offsets of the syntax tree count bytes.
            raw = line.encode("utf-8", "surrogateescape")
            start, end = value.col_offset, value.end_col_offset or 0
            respelt = raw[:start] + b"(" + raw[start:end] + b")" + raw[end:]
            base[statement.lineno - 1] = respelt.decode("utf-8", "surrogateescape")
            return "\n".join(base)
    return None


Flaw = Callable[[Site], str | None]

FLAWS: dict[str, tuple[Flaw, int]] = {
    "debug_print": (debug_print, 1),
    "dead_code": (dead_code, 1),
    "unrelated_edit": (unrelated_edit, 2),
    "weakened_validation": (weakened_validation, 2),
    "unrequested_rewrite": (unrequested_rewrite, 3),
    "test_special_casing": (special_casing, 3),
    "reverted_hunk": (reverted_hunk, 3),
}
"""Name → (flaw, severity). The planted order is by severity; the clean patch has 0. What the rubric puts in
tier 3, and a fix that does not fix, are worst; what changes behaviour or other code comes before litter."""


# ---- helpers ---------------------------------------------------------------------------------------------


def _changed(base: str, after: str) -> list[tuple[str, int, int, int, int]]:
    matcher = difflib.SequenceMatcher(None, base.split("\n"), after.split("\n"), autojunk=False)
    return [code for code in matcher.get_opcodes() if code[0] != "equal"]


def _functions(text: str) -> list[FunctionNode]:
    """All functions of a file, in no order; none of one that does not parse."""
    tree = parsed(text)
    nodes = () if isinstance(tree, SyntaxError) else ast.walk(tree)
    return [node for node in nodes if isinstance(node, FunctionNode)]


def _has_docstring(function: FunctionNode) -> bool:
    return ast.get_docstring(function, clean=False) is not None


def _has_multiline_string(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, (ast.Constant, ast.JoinedStr)) and node.lineno != node.end_lineno
        for statement in body
        for node in ast.walk(statement)
    )


def _parameter(function: FunctionNode) -> str | None:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return next((name for name in names if name not in ("self", "cls")), None)


def _own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """The nodes of a function, those of functions and classes in it left out."""
    rest: list[ast.AST] = list(function.body)
    while rest:
        node = rest.pop(0)
        if not isinstance(node, (FunctionNode, ast.ClassDef, ast.Lambda)):
            yield node
            rest += ast.iter_child_nodes(node)


def _without(where: Site, node: ast.stmt) -> str:
    """The text without a statement, or with `pass` in its place where it is alone in its block."""
    blocks = (
        block
        for parent in ast.walk(where.function)
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(parent, name, None), list)
    )
    alone = any(block == [node] for block in blocks)
    filler = [" " * node.col_offset + "pass"] if alone else []
    return "\n".join([*where.lines[: node.lineno - 1], *filler, *where.lines[node.end_lineno :]])


class _Respell(ast.NodeTransformer):
    """The same behaviour in other statements: `return x` by way of a name, `if` branches swapped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changes = 0

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.stmt]:
        if node.value is None:
            return node
        self.changes += 1
        named = ast.Assign([ast.Name(self.name, ast.Store())], node.value)
        return [named, ast.Return(ast.Name(self.name, ast.Load()))]

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if node.orelse and not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
            self.changes += 1
            return ast.If(ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body)
        return node

    def _leave(self, node: ast.AST) -> ast.AST:
        return node  # what is defined inside has names and returns of its own

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _leave


def _respell(text: str, function: FunctionNode) -> str | None:
    """The text with one function's statements spelt anew, its docstring kept; None where nothing changes."""
    body = function.body[_has_docstring(function) :]
    if not body or body[0].lineno == function.lineno:
        return None
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    speller = _Respell(next(n for n in ("result", "outcome", "value_to_return_") if n not in used))
    new: list[ast.stmt] = []
    try:
        for statement in copy.deepcopy(body):
            done = speller.visit(statement)
            new += done if isinstance(done, list) else [done]
        spelt = ast.unparse(ast.fix_missing_locations(ast.Module(new, [])))
    except RecursionError:  # it parsed, but copying and spelling need more stack a level
        return None
    if not speller.changes:
        return None
    indent = " " * body[0].col_offset
    if "\n" in "".join(
        n.value for s in body for n in ast.walk(s) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ):
        return None  # a string with line ends might be indented along
    lines = text.split("\n")
    written = [indent + line if line else line for line in spelt.split("\n")]
    return "\n".join([*lines[: body[0].lineno - 1], *written, *lines[function.end_lineno :]])
