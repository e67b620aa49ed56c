"""Patches that parsers, or walks over their trees, have no stack for: one member's loss, never a run's."""

from __future__ import annotations

import json
import sys
import textwrap
import threading

import numpy as np
import pytest

from gagar_jax.config import GradingConfig
from gagar_jax.grading.agentic.workspace import Workspace
from gagar_jax.grading.audit import flaws
from gagar_jax.grading.comments import added_comments
from gagar_jax.grading.facts import trajectory_facts
from gagar_jax.grading.findings import Found
from gagar_jax.grading.patch import Line
from gagar_jax.grading.service import GradingService
from gagar_jax.grading.structural import StructuralGrader, grade_quality
from gagar_jax.grading.units import parse
from gagar_jax.types import Group, Status
from tests.grading.builders import FIXED, MODULE, Diff, group_of, trajectory

LINE = "        return low\n"
DEEP = {
    "signs": "y = " + "-" * 3000 + "1",
    "more signs": "y = " + "-" * 9000 + "1",
    "signs that parse": "y = " + "-" * 2000 + "1",
    "attributes": "a" + ".b" * 3000,
    "attributes that parse": "a" + ".b" * 2000,
    "calls": "f" + "()" * 3000,
    "lambdas": "f = " + "lambda: " * 3000 + "1",
    "lambdas that parse": "f = " + "lambda: " * 1200 + "1",
    "a sum": "y = " + "+".join("1" * 3000),
    "branches": "y = " + "1 if a else " * 2000 + "2",
    "brackets": "y = " + "(" * 500 + ")" * 500,
    "lists": "y = 1 if value == " + "[" * 150 + "]" * 150 + " else 2",
    "a large number": "y = 1 if value == 0x" + "f" * 9000 + " else 2",
    "a large sum": "y = 1 if value == 1e308+1e308j else 2",
    "a sum too large": "y = 1 if value == 0x" + "f" * 9000 + "+1j else 2",
    "a null byte": "y = 1\0",
}
PLACES = {
    "in a function": (LINE, "        {}\n" + LINE),
    "in a comment": (LINE, "        # {}\n" + LINE),
    "behind a statement": (LINE, "        return low  # {}\n"),
    "beside an import": ("import re\n", "import re\nimport os; {}\n"),
    "outside functions": ("import re\n", "import re\n{}\n"),
    "in the header of a block": (LINE, "        # if {}:\n" + LINE),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", DEEP)
def test_a_run_goes_on(diff: Diff, what: str, place: str) -> None:
    old, new = PLACES[place]
    patch = diff({"pkg/core.py": FIXED.replace(old, new.format(DEEP[what]))})
    if b"Binary files" in patch or b"GIT binary patch" in patch:
        pytest.skip("to git a null byte is no text")
    goes_on(group_of([trajectory(0, diff({"pkg/core.py": FIXED})), trajectory(1, patch), failed(patch)]))


@pytest.mark.parametrize("length", [300, 900, 1400, 4000])
def test_a_long_chain_of_elif(diff: Diff, length: int) -> None:
    """Every elif is one level deeper in the tree, though not in the text."""
    chain = "if __name__ == 'a':\n    pass\n" + "elif __name__ == 'b':\n    pass\n" * length
    inside = textwrap.indent(chain, "        ")
    patches = [
        diff({"pkg/core.py": FIXED + "\n\n" + chain}),
        diff({"pkg/core.py": FIXED.replace(LINE, inside + LINE)}),
        diff({"pkg/core.py": FIXED}),
    ]
    goes_on(group_of([*(trajectory(n, patch) for n, patch in enumerate(patches)), failed(b"")]))


def failed(patch: bytes):
    return trajectory(9, patch, status=Status.FAILED)


def goes_on(group: Group) -> None:
    """All that the trainer, an evaluation and the graders ask of facts, on a thread as in training."""
    config = GradingConfig(deadline_s=30)
    service = GradingService(StructuralGrader(), config, mode="sum_preserving")
    service.submit(group)
    members = np.array([t.ticket.member for t in group.trajectories])
    _, _, graded = service.redeem(np.zeros(len(members), np.int32), members, np.zeros(1, np.int32))
    record = json.loads(json.dumps(service.record(0)))
    service.close()
    assert graded.tolist() == [1]
    assert all(member["facts"] for member in record["members"].values())
    passed = [t for t in group.trajectories if t.passed]
    assert all(grade_quality(passed, task=group.task, base_files=group.base_files, **config.tiers()))
    workspace = Workspace(group, members.tolist())
    assert "cannot be read" not in "".join(map(workspace.summary, workspace.members))


@pytest.mark.parametrize("depth", [50, 400, 1500, 3500])
def test_flaws_are_left_out_where_a_tree_is_too_deep(depth: int) -> None:
    after = FIXED.replace(LINE, f"        value = {'-' * depth}value\n{LINE}")
    where = flaws.site("pkg/core.py", MODULE, after)
    assert (where is None) == (depth > 3000)
    if where is not None:
        assert [name for name, (flaw, _) in flaws.FLAWS.items() if flaw(where) is not None]
        assert (flaws.unrequested_rewrite(where) is None) == (depth > 300)


@pytest.mark.parametrize("what", DEEP)
def test_a_comment_of_any_kind_is_told(what: str) -> None:
    ((number, _),) = added_comments([Line(7, f"    # {DEEP[what]}")], [], "")
    assert number == 7


def test_what_follows_an_import_in_its_line_is_seen(diff: Diff) -> None:
    after = FIXED.replace("import re\n", "import re\nimport os; print(os)\n")
    facts = trajectory_facts(trajectory(0, diff({"pkg/core.py": after})), {"pkg/core.py": MODULE})
    assert facts.count(Found.PRINT) == 1


def test_a_shallow_stack_is_not_needed() -> None:
    """Near the end of the stack parsing fails where it would not elsewhere: that is an error value too."""
    results = []

    def down(levels: int) -> None:
        if levels:
            down(levels - 1)
        else:
            results.append(parse("y = " + "-" * 1000 + "1  # near the end"))

    thread = threading.Thread(target=down, args=(sys.getrecursionlimit() - 60,))
    thread.start()
    thread.join()
    assert isinstance(results[0], SyntaxError)
