"""One walk over one syntax tree: every print, dead statement, broad except … in it, with its line.

Says what is there, not whether a patch put it there (`syntax` compares) nor whether it is bad
(`structural` scores).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from gagar_jax.grading.findings import Found

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_PRINTS = frozenset({"print", "pprint", "pp"})
_DEBUGGERS = frozenset({"breakpoint", "set_trace", "post_mortem"})
_DEBUG_MODULES = frozenset({"pdb", "ipdb", "pudb"})
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_TEST_RUNNERS = frozenset({"pytest", "unittest", "PYTEST_CURRENT_TEST", "PYTEST_VERSION"})


@dataclasses.dataclass(frozen=True)
class Hit:
    """A finding at a 1-based line of the file.

    literals: of a LITERAL_BRANCH, the inputs it asks for, as a test's output would show them; of an
    IMPORT, the top-level modules ("" for a relative one).
    """

    found: Found
    line: int
    literals: tuple[str, ...] = ()


def nodes_of(root: FunctionNode | ast.Module) -> list[ast.AST]:
    """The nodes of a function, or of a module's own statements (functions in it excluded)."""
    nodes: list[ast.AST] = [root]
    skipped = FunctionNode if isinstance(root, ast.Module) else ast.expr_context
    for node in nodes:  # grows as it is read; `ast.walk` takes three times as long
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [v for v in value if isinstance(v, ast.AST) and not isinstance(v, skipped)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                nodes.append(value)
    return nodes


def scan(nodes: list[ast.AST], offset: int = 0) -> list[Hit]:
    """All hits among the nodes of one function or module, in line order.

    Args:
      nodes: from `nodes_of`, the root first.
      offset: added to the tree's line numbers.
    """
    hits = [hit for node in nodes for hit in _at(node)]
    if not isinstance(nodes[0], ast.Module):
        hits += _unused(nodes)
    hits = [dataclasses.replace(hit, line=hit.line + offset) for hit in hits]
    return sorted(hits, key=lambda hit: (hit.line, hit.found))


def checks(nodes: list[ast.AST]) -> list[int]:
    """Lines of the raise and assert statements among the nodes, in the tree's own numbers."""
    return sorted(n.lineno for n in nodes if isinstance(n, (ast.Raise, ast.Assert)))


def _at(node: ast.AST) -> Iterator[Hit]:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            if name in _PRINTS and (isinstance(node.func, ast.Name) or name != "print"):
                yield Hit(Found.PRINT, node.lineno)
            elif name in _DEBUGGERS:
                yield Hit(Found.DEBUGGER, node.lineno)
        case ast.Import(names=aliases):
            yield from _import(node.lineno, tuple(a.name.partition(".")[0] for a in aliases))
        case ast.ImportFrom(module=module, level=level):
            yield from _import(node.lineno, ("" if level else (module or "").partition(".")[0],))
        case (
            ast.ExceptHandler(type=None) | ast.ExceptHandler(type=ast.Name(id="Exception" | "BaseException"))
        ):
            yield Hit(Found.BROAD_EXCEPT, node.lineno)
        case ast.If(test=test, body=[ast.Return(value=ast.expr() as value)]) if _is_literal(value):
            yield from _literal_branch(node.lineno, test)
        case ast.IfExp(test=test, body=value) if _is_literal(value):
            yield from _literal_branch(node.lineno, test)
        case ast.Constant(value=str() as text) if text in _TEST_RUNNERS:
            yield Hit(Found.SPECIAL_CASE, node.lineno)
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=source)) if target == source:
            yield Hit(Found.NO_EFFECT, node.lineno)
    if isinstance(node, (ast.If, ast.While)) and isinstance(node.test, ast.Constant) and not node.test.value:
        yield Hit(Found.UNREACHABLE, node.body[0].lineno)
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list):
            yield from _block(block, may_hold_docstring=name == "body")


def _import(line: int, modules: tuple[str, ...]) -> Iterator[Hit]:
    found = Found.DEBUGGER if _DEBUG_MODULES & set(modules) else Found.IMPORT
    yield Hit(found, line, modules)


def _block(block: list[ast.stmt], *, may_hold_docstring: bool) -> Iterator[Hit]:
    ended = False
    for i, statement in enumerate(block):
        if ended:
            yield Hit(Found.UNREACHABLE, statement.lineno)
            return  # what follows is one piece of dead code, however long
        ended = isinstance(statement, _ENDS)
        is_docstring = may_hold_docstring and i == 0
        bare = (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and not is_docstring
        )
        if len(block) > 1 and (isinstance(statement, ast.Pass) or bare):
            yield Hit(Found.NO_EFFECT, statement.lineno)


def _unused(nodes: list[ast.AST]) -> Iterator[Hit]:
    """Plain assignments to names that nothing in the function reads. `_` names and tuples are left alone."""
    stores: list[ast.Name] = []
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stores += [t for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")]
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            used.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            used.add(node.target.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            used.update(node.names)
        elif isinstance(node, ast.ClassDef):  # assignments in a class body are attributes
            used.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    if not used & {"locals", "exec", "eval"}:
        yield from (Hit(Found.UNUSED_ASSIGNMENT, n.lineno) for n in stores if n.id not in used)


def _literal_branch(line: int, test: ast.expr) -> Iterator[Hit]:
    literals = tuple(_asked_for(test))
    if literals:
        yield Hit(Found.LITERAL_BRANCH, line, literals)


def _asked_for(test: ast.expr) -> Iterator[str]:
    """The particular inputs a condition compares with; small and empty values are ordinary edge cases."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _asked_for(value)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.In)):
        sides = (test.left, test.comparators[0])
        if sum(_is_literal(side) for side in sides) == 1:
            yield from _particular(next(ast.literal_eval(side) for side in sides if _is_literal(side)))


def _particular(value: object) -> Iterator[str]:
    match value:
        case bool() | None:
            return
        case int() | float() | complex():
            yield from _number(value)
        case str() if len(value) > 1:
            yield value
        case bytes() if len(value) > 1:
            yield repr(value)
        case list() | tuple() | set() | dict():
            for item in value:
                yield from _particular(item)


def _number(value: complex) -> Iterator[str]:
    try:
        text = str(value) if abs(value) > 2 else ""
    except (ValueError, OverflowError):
        return  # too large to be written out: no test's output shows it
    if text:
        yield text


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError):
        return False
    return True
