"""What a patch did to the syntax trees of one Python file. Text and trees in, findings out; no transcript.

Parsing a whole module for each of a group's members would cost more than the rest of grading, so the
functions around the changed lines are cut out by indentation and parsed alone. Where that is not
possible (changes outside functions, odd layout) both whole modules are parsed instead: same findings,
slower.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

from gagar_jax.grading.findings import Found
from gagar_jax.grading.scan import FunctionNode, Hit, checks, nodes_of, scan

_HEADER = re.compile(r"(async\s+def|def|class)\s+(\w+)")
_CLOSERS = (")", "]", "}")
_AT_A_DISTANCE = frozenset({Found.UNREACHABLE, Found.UNUSED_ASSIGNMENT})


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """How much of one function changed. Docstring and blank lines are not counted.

    share: removed lines over the lines it had, in [0, 1]; lines: added plus removed lines in it.
    """

    function: str
    share: float
    lines: int
    line: int  # of its header, in the base file


@dataclasses.dataclass(frozen=True)
class Proof:
    """A finding and its line: 1-based, in the base or the after text. `literals`: see `scan.Hit`."""

    found: Found
    side: Literal["base", "after"]
    line: int
    literals: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`functions` are the qualified names of the outermost functions with a changed line."""

    functions: tuple[str, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    proofs: tuple[Proof, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Side:
    """A parsed function (or module) and what to add to its line numbers to get the file's."""

    node: FunctionNode | ast.Module
    offset: int = 0

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return nodes_of(self.node)

    @functools.cached_property
    def hits(self) -> list[Hit]:
        return scan(self.nodes, self.offset)

    def span(self) -> range:
        if isinstance(self.node, ast.Module):
            return range(0)
        return range(self.node.lineno + self.offset, (self.node.end_lineno or 0) + self.offset + 1)


@dataclasses.dataclass(frozen=True)
class _Unit:
    """One outermost function before and after; the module's own statements have the name ""."""

    name: str
    base: _Side | None
    after: _Side | None


@functools.lru_cache(maxsize=256)
def compare(base: str, after: str, removed: tuple[int, ...], added: tuple[int, ...]) -> Comparison:
    """The syntactic findings of one changed Python file.

    Args:
      base, after: its text before ("" when new) and after ("" when deleted).
      removed, added: 1-based numbers of the changed lines, in `base` and in `after`.

    Returns:
      A SYNTAX_ERROR proof and nothing else where only `after` does not parse; nothing where `base`
      does not parse either.
    """
    base_lines, after_lines = _lines(base), _lines(after)
    units = _local_units(base, after, removed, added)
    if units is None:
        before = _parse(base)
        if isinstance(before, SyntaxError):
            return Comparison()
        now = _parse(after)
        if isinstance(now, SyntaxError):
            last = len(after_lines) - (after_lines[-1] == "")
            return Comparison(
                proofs=(Proof(Found.SYNTAX_ERROR, "after", min(now.lineno or 1, max(last, 1))),)
            )
        units = _module_units(before, now, removed, added)
    return _compare_units(units, base_lines, after_lines, removed, added)


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ast.Module | SyntaxError:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError) as error:  # null bytes; nesting beyond what the parser takes
        return SyntaxError(str(error))


# ---- finding the functions around changed lines ------------------------------------------------------------


def _local_units(base: str, after: str, removed: Iterable[int], added: Iterable[int]) -> list[_Unit] | None:
    """The touched functions, cut out by indentation, and changed imports; None where that is not enough."""
    keys: dict[tuple[str, int], None] = {}
    imports: tuple[list[ast.stmt], list[ast.stmt]] = [], []
    for text, numbers, statements in ((base, removed, imports[0]), (after, added, imports[1])):
        for number in numbers:
            line = _lines(text)[number - 1].strip()
            place = _enclosing(_lines(text), number - 1) if line else None
            if place is not None:
                name, start = place
                starts = _starts(text, name)
                if start not in starts:
                    return None
                keys[name, starts.index(start)] = None
            elif line.startswith(("import ", "from ")) and (found := _statement(line, number)):
                statements.append(found)
            elif line and not line.startswith("#"):
                return None
    units = [_Unit("", *(_Side(ast.Module(body, [])) for body in imports))]
    for name, nth in keys:
        old, new = _cut_nth(base, name, nth), _cut_nth(after, name, nth)
        if isinstance(old, SyntaxError) or isinstance(new, SyntaxError):
            return None
        units.append(_Unit(name, old, new))
    whole = _covers(base, removed, [u.base for u in units]) and _covers(
        after, added, [u.after for u in units]
    )
    return units if whole else None


def _statement(line: str, number: int) -> ast.stmt | None:
    try:
        return ast.increment_lineno(ast.parse(line), number - 1).body[0]
    except SyntaxError:
        return None  # it goes on in the next line


def _covers(text: str, numbers: Iterable[int], sides: Iterable[_Side | None]) -> bool:
    """Whether every changed line of code lies in a function that was cut out, or is an import."""
    spans = [side.span() for side in sides if side is not None]
    rest = [_lines(text)[n - 1].strip() for n in numbers if not any(n in span for span in spans)]
    return all(line.startswith(("#", "import ", "from ")) or not line for line in rest)


def _cut_nth(text: str, name: str, nth: int) -> _Side | SyntaxError | None:
    starts = _starts(text, name)
    if nth >= len(starts):
        return None  # the function came, or went
    lines = _lines(text)
    return _cut(tuple(lines[starts[nth] : _end(lines, starts[nth])]), starts[nth])


def _enclosing(lines: list[str], index: int) -> tuple[str, int] | None:
    """(qualified name, index of its header) of the outermost function around a line, by indentation."""
    stripped = lines[index].lstrip()
    indent = len(lines[index]) - len(stripped)
    headers: list[tuple[str, str, int]] = []
    for i in range(index, -1, -1):
        text = lines[i].lstrip()
        width = len(lines[i]) - len(text)
        if not text or (i != index and (width >= indent or text.startswith(("#", *_CLOSERS)))):
            continue
        if match := _HEADER.match(text):
            headers.append((match[1], match[2], i))
        indent = min(indent, width)
        if indent == 0:
            break
    names = []
    for kind, name, i in reversed(headers):
        names.append(name)
        if kind != "class":
            return ".".join(names), i
    return None


@functools.lru_cache(maxsize=256)
def _starts(text: str, name: str) -> tuple[int, ...]:
    """Indices of all headers of the function with this qualified name."""
    needle = f"def {name.rpartition('.')[2]}"
    lines = _lines(text)
    starts = []
    position = text.find(needle)
    while position >= 0:
        line = text.count("\n", 0, position)
        if _enclosing(lines, line) == (name, line):
            starts.append(line)
        position = text.find(needle, position + len(needle))
    return tuple(starts)


@functools.lru_cache(maxsize=256)
def _lines(text: str) -> list[str]:
    """Shared between callers: not to be changed."""
    return text.split("\n")


def _end(lines: list[str], start: int) -> int:
    """One past the last line of the function whose header is at `start`."""
    width = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    for i in range(start + 1, len(lines)):
        text = lines[i].lstrip()
        if not text:
            continue
        deeper = len(lines[i]) - len(text) > width
        if not deeper and not text.startswith(("#", *_CLOSERS)):
            break
        if deeper or text.startswith(_CLOSERS):
            end = i + 1
    return end


@functools.lru_cache(maxsize=1024)
def _cut(chunk: tuple[str, ...], start: int) -> _Side | SyntaxError:
    """The function that these lines are, from zero-based line `start` on."""
    indented = chunk[0][:1].isspace()
    tree = _parse(("if 1:\n" if indented else "") + "\n".join(chunk) + "\n")
    if isinstance(tree, SyntaxError):
        return tree
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    if len(body) != 1 or not isinstance(body[0], FunctionNode):
        return SyntaxError("not one function: the indentation misleads")
    return _Side(body[0], start - indented)


# ---- the same from whole modules ---------------------------------------------------------------------------


def _module_units(
    base: ast.Module, after: ast.Module, removed: tuple[int, ...], added: tuple[int, ...]
) -> list[_Unit]:
    sides = [defaultdict(list), defaultdict(list)]  # type: list[dict[str, list[_Side]]]
    for tree, by_name in zip((base, after), sides, strict=True):
        for name, node in _functions(tree.body, ()):
            by_name[name].append(_Side(node))
    units = [_Unit("", _Side(base), _Side(after))]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        olds, news = sides[0].get(name, []), sides[1].get(name, [])
        for nth in range(max(len(olds), len(news))):
            old, new = olds[nth] if nth < len(olds) else None, news[nth] if nth < len(news) else None
            gone = old and any(n in old.span() for n in removed)
            come = new and any(n in new.span() for n in added)
            if gone or come:
                units.append(_Unit(name, old, new))
    return units


def _functions(body: Iterable[ast.stmt], names: tuple[str, ...]) -> Iterator[tuple[str, FunctionNode]]:
    for node in body:
        if isinstance(node, FunctionNode):
            yield ".".join((*names, node.name)), node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, (*names, node.name))
        else:  # a definition under `if` or `try`
            for block in ("body", "orelse", "finalbody", "handlers"):
                yield from _functions(getattr(node, block, ()), names)


# ---- before against after ----------------------------------------------------------------------------------


def _compare_units(
    units: list[_Unit], base: list[str], after: list[str], removed: tuple[int, ...], added: tuple[int, ...]
) -> Comparison:
    gone, come = frozenset(removed), frozenset(added)
    proofs: list[Proof] = []
    rewrites: list[Rewrite] = []
    for unit in units:
        before = unit.base.hits if unit.base else []
        proofs += _more_than_before(before, unit.after.hits if unit.after else [], come)
        if unit.base and unit.after and unit.name:
            proofs += _function_changes(unit.base, unit.after, gone)
            rewrites.append(_rewrite(unit, base, after, gone, come))
        elif unit.base and not unit.after:
            proofs.append(Proof(Found.FUNCTION_REMOVED, "base", unit.base.span().start))
    names = tuple(u.name for u in units if u.name)
    return Comparison(names, tuple(rewrites), tuple(proofs))


def _more_than_before(before: list[Hit], now: list[Hit], come: frozenset[int]) -> Iterator[Proof]:
    spare: dict[Found, int] = defaultdict(int)
    for hit in now:
        spare[hit.found] += 1
    for hit in before:
        spare[hit.found] -= 1
    # A statement can die, or an assignment lose its reader, without being touched itself.
    for hit in sorted(now, key=lambda hit: hit.line not in come):
        if spare[hit.found] > 0 and (hit.line in come or hit.found in _AT_A_DISTANCE):
            spare[hit.found] -= 1
            yield Proof(hit.found, "after", hit.line, hit.literals)


def _function_changes(base: _Side, after: _Side, gone: frozenset[int]) -> Iterator[Proof]:
    assert isinstance(base.node, FunctionNode)
    assert isinstance(after.node, FunctionNode)
    if _parameters(base.node.args) != _parameters(after.node.args):
        yield Proof(Found.SIGNATURE, "base", base.span().start)
    old, new = checks(base.nodes), checks(after.nodes)
    lost = [line for line in (n + base.offset for n in old) if line in gone]
    for line in lost[: max(0, len(old) - len(new))]:
        yield Proof(Found.CHECK_REMOVED, "base", line)


def _parameters(args: ast.arguments) -> tuple[object, ...]:
    """Names, kinds and whether there is a default; a default's value is behaviour, not interface."""
    named = tuple(tuple(a.arg for a in group) for group in (args.posonlyargs, args.args, args.kwonlyargs))
    optional = (len(args.defaults), tuple(d is not None for d in args.kw_defaults))
    return (*named, args.vararg and args.vararg.arg, args.kwarg and args.kwarg.arg, optional)


def _rewrite(
    unit: _Unit, base: list[str], after: list[str], gone: frozenset[int], come: frozenset[int]
) -> Rewrite:
    assert unit.base
    assert unit.after
    span = unit.base.span()
    counted = [n for n in span if base[n - 1].strip() and n not in _docstring(unit.base)]
    changed = [n for n in counted if n in gone]
    new = [
        n for n in unit.after.span() if n in come and after[n - 1].strip() and n not in _docstring(unit.after)
    ]
    return Rewrite(unit.name, len(changed) / max(len(counted), 1), len(changed) + len(new), span.start)


def _docstring(side: _Side) -> range:
    first = side.node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return range(first.lineno + side.offset, (first.end_lineno or 0) + side.offset + 1)
    return range(0)
