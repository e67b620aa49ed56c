"""Mutations: exact spans, one small edit each, every operator, nothing where nothing may change."""

from __future__ import annotations

import ast
import difflib

import pytest

from envs.coding.mutation import Mutation, find_functions, find_mutations
from tests.envs.tiny import SOURCE


def mutants(source: str, name: str = "f") -> dict[str, set[str]]:
    """Operator -> the function's body lines that differ, joined, of every mutant."""
    found: dict[str, set[str]] = {}
    for mutation in find_mutations(source, name):
        changed = [
            line[1:].strip()
            for line in difflib.ndiff(source.splitlines(), mutation.apply(source).splitlines())
            if line[0] == "+"
        ]
        found.setdefault(mutation.operator, set()).add(" ; ".join(changed))
    return found


@pytest.mark.parametrize(
    ("line", "operator", "expected"),
    [
        ("return a < b", "comparison", {"return a <= b", "return a > b"}),
        ("return (a) <(b)", "comparison", {"return (a) <=(b)", "return (a) >(b)"}),
        ("return a not  in b", "comparison", {"return a in b"}),
        ("return a is not b", "comparison", {"return a is b"}),
        ("return a + b", "arithmetic", {"return a - b"}),
        ("a += b", "arithmetic", {"a -= b"}),
        ("return a and b", "boolean", {"return a or b"}),
        ("return a and b", "dropped_condition", {"return a", "return b"}),
        ("return not a", "negation", {"return a"}),
        ("return a if b else None", "swapped_branches", {"return None if b else a"}),
        ("return a[1:]", "boundary", {"return a[2:]", "return a[0:]"}),
        ("return True", "constant", {"return False"}),
        ("return g(a, b)", "swapped_arguments", {"return g(b, a)"}),
        ("return a - b", "swapped_operands", {"return b - a"}),
        ("return a[b]", "off_by_one", {"return a[b + 1]", "return a[b - 1]"}),
        ("return g(a, key=b)", "dropped_argument", {"return g(a)"}),
        ("return a.lower()", "wrong_call", {"return a.upper()"}),
        ("return g(a)", "changed_return", {"return a"}),
        ("return a", "dropped_return", {"a"}),
        ("return a", "wrong_name", {"return b"}),
    ],
)
def test_operator(line: str, operator: str, expected: set[str]) -> None:
    assert mutants(f"def f(a, b):\n    {line}\n")[operator] == expected


def test_dropped_statements_keep_blocks_valid() -> None:
    source = "def f(a):\n    g(a)\n    if a:\n        h(a)\n    return a\n"
    dropped = {m.apply(source) for m in find_mutations(source, "f") if m.operator == "dropped_statement"}
    assert dropped == {
        "def f(a):\n    if a:\n        h(a)\n    return a\n",
        "def f(a):\n    g(a)\n    if a:\n        pass\n    return a\n",
    }


@pytest.mark.parametrize(
    "body",
    [
        "while a < b:\n        a += 1",  # most edits of a loop's condition hang
        "raise ValueError('a' + str(1))",
        "'''Only a docstring with 1 < 2.'''",
        "x: int = None",
    ],
)
def test_nothing_is_mutated_here(body: str) -> None:
    assert mutants(f"def f():\n    {body}\n") == {}


def test_edits_are_single_spans_and_all_else_is_identical() -> None:
    source = "# é\n" + SOURCE.replace("total += 1", "total  +=  1  # ünusual   spacing")
    for function in find_functions(source):
        found = find_mutations(source, function.qualname)
        assert len({m.apply(source) for m in found}) == len(found)
        for mutation in found:
            before, after = source.encode(), mutation.apply(source).encode()
            tail = len(before) - mutation.end
            assert after[: mutation.start] == before[: mutation.start]
            assert after[len(after) - tail :] == before[len(before) - tail :]
            assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
            assert function.first_line <= mutation.line <= function.last_line


def test_find_functions_names_lines_and_docstrings() -> None:
    functions = {f.qualname: f for f in find_functions(SOURCE)}
    assert list(functions) == [
        "clamp",
        "count_above",
        "Stack.__init__",
        "Stack.push",
        "Stack.top",
        "untested",
    ]
    clamp = functions["clamp"]
    assert SOURCE.splitlines()[clamp.first_line - 1].startswith("def clamp")
    assert clamp.docstring == (clamp.first_line + 1, clamp.first_line + 5)
    assert clamp.code_lines == 6
    assert clamp.text.endswith("return value\n")


def test_a_name_defined_twice_is_left_out() -> None:
    assert find_functions("def f():\n    return 1\ndef f():\n    return 2\n") == []


def test_unknown_function_is_an_error() -> None:
    with pytest.raises(ValueError, match="no function 'nope'"):
        find_mutations(SOURCE, "nope")


def test_apply_counts_bytes_not_characters() -> None:
    source = "é = 1\n"
    assert Mutation("boundary", 1, 5, 6, "2").apply(source) == "é = 2\n"
