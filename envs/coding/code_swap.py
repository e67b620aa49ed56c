"""Puts the changed functions of a module into a process that has already imported the module.

Standard library only: it runs inside the sandbox. A change qualifies when the module's syntax tree
differs solely inside the bodies of existing functions and methods (nested functions belong to the
body they stand in). Then each changed function is compiled where it stands in the new file, and every
live function made from the old code gets the new code, so that decorators, closures, defaults and
references elsewhere keep working. Anything else raises `NeedsCold` with its cause.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import inspect
import types
from collections.abc import Iterable, Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_KIND_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class NeedsCold(Exception):
    """The change cannot be judged by swapping code; the message is the cause, for counting."""


@dataclasses.dataclass
class Module:
    """A pristine source file: where it is, its tree without function bodies, and each body."""

    path: str
    skeleton: str
    names: list[str]
    bodies: list[str]
    lines: list[int]


def parse_module(path: str, text: str) -> Module:
    """What a changed version of the file is compared with."""
    tree = ast.parse(text)
    definitions = list(_definitions(tree))
    bodies = [_dump(node) for _, node in definitions]
    lines = [_first_line(node) for _, node in definitions]
    for _, node in definitions:
        node.body = []
    return Module(path, ast.dump(tree), [name for name, _ in definitions], bodies, lines)


def live_functions(paths: Iterable[str]) -> dict[tuple[str, str, int], list[types.FunctionType]]:
    """Every live function made from one of the files, by (path, qualified name, first line)."""
    wanted = set(paths)
    found: dict[tuple[str, str, int], list[types.FunctionType]] = {}
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and thing.__code__.co_filename in wanted:
            code = thing.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(thing)
    return found


def changed_functions(pristine: Module, text: str) -> tuple[list[int], ast.Module, list[Definition]]:
    """Which definitions differ: their indices, with the new tree and its definitions, bodies in place.

    Raises:
      SyntaxError, ValueError: the text does not parse.
      NeedsCold: it differs outside the bodies of existing functions.
    """
    try:
        tree = ast.parse(text)
        definitions = list(_definitions(tree))
        kept = [node.body for _, node in definitions]
        bodies = [_dump(node) for _, node in definitions]
        for _, node in definitions:
            node.body = []
        skeleton = ast.dump(tree)
    except (RecursionError, MemoryError):
        raise NeedsCold("too deep to parse") from None
    if skeleton != pristine.skeleton:
        raise NeedsCold("changed outside function bodies")
    for (_, node), body in zip(definitions, kept, strict=True):
        node.body = body
    changed = [i for i, body in enumerate(bodies) if body != pristine.bodies[i]]
    return changed, tree, [node for _, node in definitions]


def swap(
    pristine: Module, text: str, live: dict[tuple[str, str, int], list[types.FunctionType]]
) -> tuple[list[str], list[tuple[types.FunctionType, types.CodeType, str | None]]]:
    """Plans the swap of one file, without running any of its code.

    Returns:
      the changed functions' qualified names, and (function, new code, new docstring) to assign.

    Raises:
      SyntaxError, ValueError: the text does not compile.
      NeedsCold: the change does not qualify.
    """
    changed, tree, definitions = changed_functions(pristine, text)
    for index, node in enumerate(definitions):
        if index not in changed:  # compiled for nothing otherwise; its place and line stay
            node.body = [ast.copy_location(ast.Pass(), node)]
    try:
        compiled = compile(tree, pristine.path, "exec", dont_inherit=True)
    except (RecursionError, MemoryError):
        raise NeedsCold("too deep to compile") from None
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(compiled)}
    assignments = []
    for index in changed:
        name, node = pristine.names[index], definitions[index]
        functions = live.get((pristine.path, name, pristine.lines[index]), [])
        new = codes.get((name, _first_line(node)))
        if not functions or new is None:
            raise NeedsCold("no live function found")
        for function in functions:
            old = function.__code__
            if old.co_freevars != new.co_freevars:
                raise NeedsCold("closes over other variables")
            if (old.co_flags ^ new.co_flags) & _KIND_FLAGS:
                raise NeedsCold("function became a generator or ceased to be one")
            assignments.append((function, new, ast.get_docstring(node, clean=False)))
    return [pristine.names[index] for index in changed], assignments


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Functions that no function encloses, in source order, with qualified names."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif not isinstance(child, ast.expr):
                yield from walk(child, prefix)

    return walk(tree, "")


def _dump(node: Definition) -> str:
    return ast.dump(ast.Module(node.body, []))


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)
