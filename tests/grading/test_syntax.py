"""The quick way (functions cut out by indentation) against the thorough one (whole modules)."""

from __future__ import annotations

import difflib
import inspect
import random
import shlex
import textwrap

import pytest

from gagar_jax.grading import syntax
from gagar_jax.grading.findings import Found

INSERTED = (
    "print(x)", "pass", "return 1", "x = 3", "# note", "import os", "raise ValueError", "", "x = (1,",
    "def helper(a):\n{0}    return a", "if x == 'abc':\n{0}    return 4",
    "try:\n{0}    x\n{0}except Exception:\n{0}    pass",
)  # fmt: skip


def edited(base: list[str], rng: random.Random) -> list[str]:
    """A few lines put in, replaced or taken out at random, some of it nonsense."""
    lines = list(base)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines) - 1)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        new = [indent + line for line in rng.choice(INSERTED).format("").split("\n")]
        lines[at : at + rng.choice((0, 0, 1))] = new if rng.random() < 0.7 else []
        if rng.random() < 0.3:
            del lines[at : at + rng.choice((1, 2, 8))]
    return lines


def changed(base: list[str], after: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    codes = [c for c in difflib.SequenceMatcher(None, base, after, False).get_opcodes() if c[0] != "equal"]
    removed = tuple(n + 1 for _, start, end, _, _ in codes for n in range(start, end))
    return removed, tuple(n + 1 for _, _, _, start, end in codes for n in range(start, end))


def by_content(found: syntax.Comparison) -> tuple[list, list, list]:
    return sorted(found.functions), sorted(map(str, found.rewrites)), sorted(map(str, found.proofs))


@pytest.mark.parametrize("seed", range(120))
def test_both_ways_find_the_same(seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(seed)
    base = inspect.getsource(rng.choice((textwrap, shlex))).split("\n")
    after = edited(base, rng)
    arguments = ("\n".join(base), "\n".join(after), *changed(base, after))
    quick = syntax.compare.__wrapped__(*arguments)
    monkeypatch.setattr(syntax, "local_units", lambda *_: None)
    assert by_content(quick) == by_content(syntax.compare.__wrapped__(*arguments))


def test_the_quick_way_is_taken_for_what_agents_do():
    base = inspect.getsource(textwrap).split("\n")
    at = next(i for i, line in enumerate(base) if line.startswith("def shorten"))
    end = next(i for i in range(at + 1, len(base)) if base[i].startswith("    return"))
    for new in (
        ["    return ''"],
        ["    # note", base[end]],
        ["    print(width)", base[end], "    return text"],
    ):
        after = base[:end] + new + base[end + 1 :]
        units = syntax.local_units("\n".join(base), "\n".join(after), *changed(base, after))
        assert units is not None
        assert [u.name for u in units if u.name] == ["shorten"]


def test_a_file_that_did_not_parse_before_is_not_blamed_on_the_patch():
    found = syntax.compare("x = (\n", "x = ((\n", (1,), (1,))
    assert found == syntax.Comparison()
    found = syntax.compare("x = 1\n", "x = (\n", (1,), (1,))
    assert [p.found for p in found.proofs] == [Found.SYNTAX_ERROR]
