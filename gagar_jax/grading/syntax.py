"""What a patch did to the syntax trees of one Python file. Text in, findings out; no transcript, no score."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from gagar_jax.grading.findings import Found
from gagar_jax.grading.scan import FunctionNode, Hit, checks
from gagar_jax.grading.units import Side, Unit, local_units, module_units, parse, split_lines

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
    base_lines, after_lines = split_lines(base), split_lines(after)
    units = local_units(base, after, removed, added)
    if units is None:
        before = parse(base)
        if isinstance(before, SyntaxError):
            return Comparison()
        now = parse(after)
        if isinstance(now, SyntaxError):
            last = len(after_lines) - (after_lines[-1] == "")
            return Comparison(
                proofs=(Proof(Found.SYNTAX_ERROR, "after", min(now.lineno or 1, max(last, 1))),)
            )
        gone = tuple(n for n in removed if base_lines[n - 1].strip())
        come = tuple(n for n in added if after_lines[n - 1].strip())
        units = module_units(before, now, gone, come)
    return _compare_units(units, base_lines, after_lines, removed, added)


def _compare_units(
    units: list[Unit], base: list[str], after: list[str], removed: tuple[int, ...], added: tuple[int, ...]
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


def _function_changes(base: Side, after: Side, gone: frozenset[int]) -> Iterator[Proof]:
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
    unit: Unit, base: list[str], after: list[str], gone: frozenset[int], come: frozenset[int]
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


def _docstring(side: Side) -> range:
    first = side.node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return range(first.lineno + side.offset, (first.end_lineno or 0) + side.offset + 1)
    return range(0)
