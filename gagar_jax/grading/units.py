"""The functions that a patch touches, before and after, as syntax trees with their place in the file.

Parsing a whole module for each of a group's members would cost more than the rest of grading, so the
functions around the changed lines are cut out by indentation and parsed alone (`local_units`). Where
that may not be enough (changes outside functions, functions that come or go, odd layout) both whole
modules are parsed instead (`module_units`): the same result, slower.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from gagar_jax.grading.parsing import parsed
from gagar_jax.grading.scan import FunctionNode, Hit, nodes_of, scan

_HEADER = re.compile(r"(async\s+def|def|class)\s+(\w+)")
_CLOSERS = (")", "]", "}")


@dataclasses.dataclass(frozen=True)
class Side:
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
class Unit:
    """One outermost function before and after; the module's own statements have the name ""."""

    name: str
    base: Side | None
    after: Side | None


parse = functools.lru_cache(maxsize=256)(parsed)
"""Shared between callers: the tree is not to be changed."""


# ---- finding the functions around changed lines ------------------------------------------------------------


def local_units(base: str, after: str, removed: Iterable[int], added: Iterable[int]) -> list[Unit] | None:
    """The touched functions, cut out by indentation, and changed imports; None where that is not enough."""
    keys: dict[tuple[str, int], None] = {}
    imports: tuple[list[ast.stmt], list[ast.stmt]] = [], []
    for text, numbers, statements in ((base, removed, imports[0]), (after, added, imports[1])):
        for number in numbers:
            line = split_lines(text)[number - 1].strip()
            place = _enclosing(split_lines(text), number - 1) if line else None
            if place is not None:
                name, start = place
                starts = _starts(text, name)
                if start not in starts:
                    return None
                keys[name, starts.index(start)] = None
            elif found := _import_at(text, number):
                statements.append(found)
            elif line and not (line.startswith("#") and _is_top_level(text, number)):
                return None
    units = [Unit("", *(Side(ast.Module(body, [])) for body in imports))]
    for name, nth in keys:
        old, new = _cut_nth(base, name, nth), _cut_nth(after, name, nth)
        if isinstance(old, SyntaxError) or isinstance(new, SyntaxError):
            return None
        units.append(Unit(name, old, new))
    whole = _covers(base, removed, [u.base for u in units])
    whole = whole and _covers(after, added, [u.after for u in units])
    # A cut is right on both sides only if it leaves out the same unchanged lines.
    same = all(_unchanged(base, u.base, removed) == _unchanged(after, u.after, added) for u in units)
    return units if whole and same else None


def _import_at(text: str, number: int) -> ast.stmt | None:
    """The whole, top-level import statement on a line; None for anything else."""
    line = split_lines(text)[number - 1]
    if not line.startswith(("import ", "from ")) or not _is_top_level(text, number):
        return None
    tree = parsed(line)
    if isinstance(tree, SyntaxError) or len(tree.body) != 1:
        return None  # it goes on in the next line, or something else follows it
    return ast.increment_lineno(tree, number - 1).body[0]


def _is_top_level(text: str, number: int) -> bool:
    """Whether a line without indentation is between blocks, not amid one (or in a string)."""
    lines = split_lines(text)
    below = (lines[i] for i in range(number, len(lines)))
    next_code = next((x for x in below if x.strip() and not x.lstrip().startswith("#")), "")
    return not next_code[:1].isspace() and not lines[number - 1][:1].isspace()


def _unchanged(text: str, side: Side | None, numbers: Iterable[int]) -> int:
    """How many lines with something on them a function has that the patch leaves alone."""
    changed, lines = frozenset(numbers), split_lines(text)
    return sum(n not in changed and bool(lines[n - 1].strip()) for n in (side.span() if side else ()))


def _covers(text: str, numbers: Iterable[int], sides: Iterable[Side | None]) -> bool:
    """Whether every changed line of code lies in a function that was cut out, or is an import."""
    spans = [side.span() for side in sides if side is not None]
    rest = [split_lines(text)[n - 1].strip() for n in numbers if not any(n in span for span in spans)]
    return all(line.startswith(("#", "import ", "from ")) or not line for line in rest)


def _cut_nth(text: str, name: str, nth: int) -> Side | SyntaxError:
    starts = _starts(text, name)
    if nth >= len(starts):
        return SyntaxError("the function came, or went")
    lines = split_lines(text)
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
    lines = split_lines(text)
    starts = []
    position = text.find(needle)
    while position >= 0:
        line = text.count("\n", 0, position)
        if _enclosing(lines, line) == (name, line):
            starts.append(line)
        position = text.find(needle, position + len(needle))
    return tuple(starts)


@functools.lru_cache(maxsize=256)
def split_lines(text: str) -> list[str]:
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
def _cut(chunk: tuple[str, ...], start: int) -> Side | SyntaxError:
    """The function that these lines are, from zero-based line `start` on."""
    indented = chunk[0][:1].isspace()
    tree = parse(("if 1:\n" if indented else "") + "\n".join(chunk) + "\n")
    if isinstance(tree, SyntaxError):
        return tree
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    if len(body) != 1 or not isinstance(body[0], FunctionNode):
        return SyntaxError("not one function: the indentation misleads")
    return Side(body[0], start - indented)


# ---- the same from whole modules ---------------------------------------------------------------------------


def module_units(
    base: ast.Module, after: ast.Module, removed: tuple[int, ...], added: tuple[int, ...]
) -> list[Unit]:
    sides = [defaultdict(list), defaultdict(list)]  # type: list[dict[str, list[Side]]]
    for tree, by_name in zip((base, after), sides, strict=True):
        for name, node in _functions(tree.body):
            by_name[name].append(Side(node))
    units = [Unit("", Side(base), Side(after))]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        olds, news = sides[0].get(name, []), sides[1].get(name, [])
        for nth in range(max(len(olds), len(news))):
            old, new = olds[nth] if nth < len(olds) else None, news[nth] if nth < len(news) else None
            gone = old and any(n in old.span() for n in removed)
            come = new and any(n in new.span() for n in added)
            if gone or come:
                units.append(Unit(name, old, new))
    return units


def _functions(body: list[ast.stmt]) -> Iterator[tuple[str, FunctionNode]]:
    """(qualified name, node) of the outermost functions in their order. Every `elif` is one level deeper."""
    rest: list[tuple[tuple[str, ...], ast.AST]] = [((), node) for node in reversed(body)]
    while rest:
        names, node = rest.pop()
        if isinstance(node, FunctionNode):
            yield ".".join((*names, node.name)), node
        elif isinstance(node, ast.ClassDef):
            rest += [((*names, node.name), child) for child in reversed(node.body)]
        else:  # a definition under `if` or `try`
            for block in ("handlers", "finalbody", "orelse", "body"):
                rest += [(names, child) for child in reversed(getattr(node, block, ()))]
