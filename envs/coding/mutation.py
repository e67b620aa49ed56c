"""Bugs by syntax tree: finds functions in a module and the small edits that could break each of them.

An edit replaces one exact span of the source, so formatting elsewhere stays byte-identical. Whether an
edit is a usable bug is not decided here but by the suite (`build.py`).

Our own choices: nothing inside a `while` statement is mutated (most such edits hang), nor defaults,
decorators, annotations, docstrings, f-strings or exception messages.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Iterator

from gagar_jax.types import parse_python

_COMPARISONS = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "is not": ("is",),
    "is": ("is not",),
    "not in": ("in",),
    "in": ("not in",),
}
_ARITHMETIC = {
    "+": ("-",),
    "-": ("+",),
    "*": ("+", "//"),
    "/": ("*", "//"),
    "//": ("/", "%"),
    "%": ("//",),
    "**": ("*",),
    "&": ("|",),
    "|": ("&",),
    "^": ("&",),
    "<<": (">>",),
    ">>": ("<<",),
}
_WORDS = {
    "startswith": "endswith",
    "lower": "upper",
    "lstrip": "rstrip",
    "strip": "lstrip",
    "split": "rsplit",
    "keys": "values",
    "items": "keys",
    "append": "extend",
    "add": "discard",
    "find": "rfind",
    "index": "count",
    "popitem": "clear",
    "min": "max",
    "any": "all",
    "isalpha": "isdigit",
    "islice": "takewhile",
    "floor": "ceil",
    "partition": "rpartition",
    "ljust": "rjust",
}
_SWAPS = _WORDS | {b: a for a, b in _WORDS.items() if b not in _WORDS}


@dataclasses.dataclass(frozen=True)
class Function:
    """A function or method: where it stands and how long it is.

    first_line/last_line: 1-based in the file, decorators included. docstring: its (first, last) lines.
    """

    qualname: str
    first_line: int
    last_line: int
    docstring: tuple[int, int] | None
    text: str

    @property
    def code_lines(self) -> int:
        folded = self.docstring[1] - self.docstring[0] + 1 if self.docstring else 0
        return self.last_line - self.first_line + 1 - folded


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One edit: bytes [start, end) of the UTF-8 source become `replacement`."""

    operator: str
    line: int
    start: int
    end: int
    replacement: str

    def apply(self, source: str) -> str:
        """The source with the bug in it."""
        data = source.encode()
        return (data[: self.start] + self.replacement.encode() + data[self.end :]).decode()


def docstring_lines(node: ast.AST) -> tuple[int, int] | None:
    """First and last line of a function's or class's docstring, if it has one on lines of its own."""
    if (
        not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        or ast.get_docstring(node) is None
    ):
        return None
    first = node.body[0]
    alone = len(node.body) == 1 or node.body[1].lineno > (first.end_lineno or first.lineno)
    return (first.lineno, first.end_lineno or first.lineno) if alone and first.lineno > node.lineno else None


def find_functions(source: str) -> list[Function]:
    """Module-level functions and methods of module-level classes whose qualified name is unique, in order.

    Raises:
      SyntaxError: the source does not parse.
    """
    lines = [line.decode() for line in source.encode().splitlines(keepends=True)]
    found: list[Function] = []
    tree = parse_python(source)
    classes = [(c.body, f"{c.name}.") for c in tree.body if isinstance(c, ast.ClassDef)]
    for body, prefix in [(tree.body, ""), *classes]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                last = node.end_lineno or node.lineno
                text = "".join(lines[first - 1 : last])
                found.append(Function(prefix + node.name, first, last, docstring_lines(node), text))
    names = [f.qualname for f in found]
    return sorted((f for f in found if names.count(f.qualname) == 1), key=lambda f: f.first_line)


def find_mutations(source: str, qualname: str) -> list[Mutation]:
    """Every edit of the named function that parses and changes its syntax tree, in source order.

    Args:
      source: the module's text.
      qualname: as in `Function.qualname`.

    Raises:
      ValueError: the module has no such function.
    """
    finder = _Finder(source, qualname)
    original = _tree(finder.function_text(None))
    seen: set[str] = set()
    kept = []
    for mutation in sorted(finder.mutations(), key=lambda m: (m.start, m.end, m.operator, m.replacement)):
        mutant = finder.function_text(mutation)
        if mutant not in seen and (tree := _tree(mutant)) and tree != original:
            seen.add(mutant)
            kept.append(mutation)
    return kept


def _tree(function_text: str) -> str | None:
    """The function's syntax tree as text; None where it does not compile without a warning."""
    source = f"if 1:\n{function_text}" if function_text[:1].isspace() else function_text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            tree = parse_python(source)
            compile(source, "<mutant>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):  # `break` left outside a loop, `is` with a literal, …
            return None
    return ast.dump(tree)


class _Finder:
    """Walks one function and proposes edits. Each `_on_X` yields for nodes of class X."""

    def __init__(self, source: str, qualname: str):
        self.data = source.encode()
        self.tree = parse_python(source)
        self.line_starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.function = self._locate(qualname)
        arguments = self.function.args
        named = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        self.names = [a.arg for a in named if a]
        nodes = list(self._nodes())
        self.names += [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.names = sorted(set(self.names) - {"self", "cls", "_"})
        strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        self.strings = list(dict.fromkeys(strings))

    def _locate(self, qualname: str) -> ast.FunctionDef:
        owner: ast.AST = self.tree
        for part in qualname.split("."):
            body = getattr(owner, "body", [])
            match = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
            if not match:
                raise ValueError(f"no function {qualname!r} in the module")
            owner = match[0]
        if not isinstance(owner, ast.FunctionDef):
            raise ValueError(f"{qualname!r} is a class, not a function")
        return owner

    def function_text(self, mutation: Mutation | None) -> str:
        """The function's own lines, with or without an edit: cheap to parse, which whole modules are not."""
        first = self.line_starts[
            min([self.function.lineno, *(d.lineno for d in self.function.decorator_list)]) - 1
        ]
        last = self.line_starts[self.function.end_lineno or 0]
        if mutation is None:
            return self.data[first:last].decode()
        middle = mutation.replacement.encode()
        return (self.data[first : mutation.start] + middle + self.data[mutation.end : last]).decode()

    def _nodes(self) -> Iterator[ast.AST]:
        """The body's nodes, without what is never mutated."""
        body = self.function.body[1 if ast.get_docstring(self.function) is not None else 0 :]
        stack: list[ast.AST] = list(reversed(body))
        while stack:
            node = stack.pop()
            if isinstance(node, ast.While | ast.JoinedStr | ast.FormattedValue | ast.arguments):
                continue
            yield node
            children = list(ast.iter_child_nodes(node))
            if isinstance(node, ast.AnnAssign):
                children.remove(node.annotation)
            if isinstance(node, ast.FunctionDef):  # a nested one: its decorators and annotations stay
                children = list(node.body)
            if isinstance(node, ast.Raise):
                children = []
            stack.extend(reversed(children))

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def mutations(self) -> Iterator[Mutation]:
        for node in self._nodes():
            handler: Callable[[ast.AST], Iterator[Mutation]] | None = getattr(
                self, f"_on_{type(node).__name__}", None
            )
            if handler:
                yield from handler(node)
        yield from self._dropped_statements()

    def _edit(self, operator: str, start: int, end: int, replacement: str) -> Mutation:
        line = self.data.count(b"\n", 0, start) + 1
        return Mutation(operator, line, start, end, replacement)

    def _replace(self, operator: str, node: ast.AST, replacement: str) -> Mutation:
        return self._edit(operator, *self.span(node), replacement)

    def _between(
        self, operator: str, left: ast.AST, right: ast.AST, table: dict[str, tuple[str, ...]]
    ) -> Iterator[Mutation]:
        """Replaces the operator token between two operands, whatever brackets and breaks are around it."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.data[start:end].decode()
        match = re.fullmatch(r"([\s)\\]*)([^\s()\\#]+(?:\s+(?:not|in)\b)?)([\s(\\]*)", gap)
        token = re.sub(r"\s+", " ", match[2]) if match else ""
        for replacement in table.get(token, ()):
            offset = start + len(match[1].encode())  # type: ignore[index]
            yield self._edit(operator, offset, offset + len(match[2].encode()), replacement)  # type: ignore[index]

    def _on_Compare(self, node: ast.Compare) -> Iterator[Mutation]:
        operands = [node.left, *node.comparators]
        for left, right in itertools.pairwise(operands):
            yield from self._between("comparison", left, right, _COMPARISONS)

    def _on_BinOp(self, node: ast.BinOp) -> Iterator[Mutation]:
        textual = any(
            isinstance(n, ast.Constant | ast.JoinedStr) and not _is_number(n) for n in (node.left, node.right)
        )
        if not textual:
            yield from self._between("arithmetic", node.left, node.right, _ARITHMETIC)
        swappable = (
            isinstance(node.op, ast.Add) if textual else isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv)
        )
        if swappable or (isinstance(node.op, ast.Mod) and not textual):
            yield from self._swap("swapped_operands", node.left, node.right)

    def _on_AugAssign(self, node: ast.AugAssign) -> Iterator[Mutation]:
        table = {f"{a}=": tuple(f"{b}=" for b in bs) for a, bs in _ARITHMETIC.items()}
        yield from self._between("arithmetic", node.target, node.value, table)

    def _on_BoolOp(self, node: ast.BoolOp) -> Iterator[Mutation]:
        for left, right in itertools.pairwise(node.values):
            yield from self._between("boolean", left, right, {"and": ("or",), "or": ("and",)})
        if len(node.values) == 2:
            yield self._replace("dropped_condition", node, self.text(node.values[0]))
            yield self._replace("dropped_condition", node, self.text(node.values[1]))

    def _on_UnaryOp(self, node: ast.UnaryOp) -> Iterator[Mutation]:
        operator = {ast.Not: "negation", ast.USub: "sign"}.get(type(node.op))
        if operator:
            yield self._edit(operator, self.span(node)[0], self.span(node.operand)[0], "")

    def _negate(self, test: ast.expr) -> Iterator[Mutation]:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            start = self.span(test)[0]
            yield self._edit("negation", start, start, "not ")

    def _on_If(self, node: ast.If) -> Iterator[Mutation]:
        yield from self._negate(node.test)

    def _on_IfExp(self, node: ast.IfExp) -> Iterator[Mutation]:
        yield from self._negate(node.test)
        yield from self._swap("swapped_branches", node.body, node.orelse)

    def _on_comprehension(self, node: ast.comprehension) -> Iterator[Mutation]:
        for test in node.ifs:
            yield from self._negate(test)

    def _on_Constant(self, node: ast.Constant) -> Iterator[Mutation]:
        value = node.value
        if isinstance(value, bool):
            yield self._replace("constant", node, str(not value))
        elif isinstance(value, int):
            yield self._replace("boundary", node, str(value + 1))
            if value > 0:
                yield self._replace("boundary", node, str(value - 1))
        elif isinstance(value, str) and self.text(node)[0] in "\"'":
            others = [s for s in self.strings if s != value]
            if others:
                position = self.strings.index(value) % len(others)
                yield self._replace("constant", node, repr(others[position]))

    def _on_Name(self, node: ast.Name) -> Iterator[Mutation]:
        if not isinstance(node.ctx, ast.Load):
            return
        if node.id in _SWAPS:
            yield self._replace("wrong_call", node, _SWAPS[node.id])
        if node.id in self.names:
            for other in self.names:
                if other != node.id:
                    yield self._replace("wrong_name", node, other)

    def _on_Attribute(self, node: ast.Attribute) -> Iterator[Mutation]:
        if node.attr in _SWAPS:
            end = self.span(node)[1]
            yield self._edit("wrong_call", end - len(node.attr.encode()), end, _SWAPS[node.attr])

    def _on_Call(self, node: ast.Call) -> Iterator[Mutation]:
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        if len(plain) == len(node.args) >= 2:
            yield from self._swap("swapped_arguments", plain[0], plain[1])
        if isinstance(node.func, ast.Name) and node.func.id == "range" and len(plain) == 1:
            yield self._replace("off_by_one", plain[0], f"{self.text(plain[0])} - 1")
        if len(node.args) + len(node.keywords) == 1 and isinstance(node.func, ast.Name) and plain:
            yield self._replace("dropped_call", node, self.text(plain[0]))
        ordered = sorted([*node.args, *node.keywords], key=self.span)
        if len(ordered) > 1 and isinstance(ordered[-1], ast.keyword) and ordered[-1].arg:
            yield self._edit("dropped_argument", self.span(ordered[-2])[1], self.span(ordered[-1])[1], "")

    def _on_Subscript(self, node: ast.Subscript) -> Iterator[Mutation]:
        bounds = [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
        for bound in bounds:
            if isinstance(bound, ast.Name | ast.Call | ast.BinOp) and isinstance(node.ctx, ast.Load):
                for sign in "+-":
                    yield self._replace("off_by_one", bound, f"{self.text(bound)} {sign} 1")

    def _on_Return(self, node: ast.Return) -> Iterator[Mutation]:
        if isinstance(node.value, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield self._replace("dropped_return", node, self.text(node.value))
        if isinstance(node.value, ast.Call) and len(node.value.args) == 1 and not node.value.keywords:
            yield self._replace("changed_return", node.value, self.text(node.value.args[0]))

    def _on_Break(self, node: ast.Break) -> Iterator[Mutation]:
        yield self._replace("control_flow", node, "continue")

    def _on_Continue(self, node: ast.Continue) -> Iterator[Mutation]:
        yield self._replace("control_flow", node, "break")

    def _swap(self, operator: str, left: ast.expr, right: ast.expr) -> Iterator[Mutation]:
        (start, left_end), (right_start, end) = self.span(left), self.span(right)
        between = self.data[left_end:right_start].decode()
        yield self._edit(operator, start, end, self.text(right) + between + self.text(left))

    def _dropped_statements(self) -> Iterator[Mutation]:
        """Whole one-line statements; the only one of a block becomes `pass`."""
        for node in [self.function, *self._nodes()]:
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if not isinstance(block, list):
                    continue
                for statement in block:
                    simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr)
                    first, last = self.line_starts[statement.lineno - 1], self.line_starts[statement.lineno]
                    whole = self.data[first:last].decode().strip() == self.text(statement)
                    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                    if simple and whole and not docstring:
                        if len(block) == 1:
                            yield self._replace("dropped_statement", statement, "pass")
                        else:
                            yield self._edit("dropped_statement", first, last, "")


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float | complex)
