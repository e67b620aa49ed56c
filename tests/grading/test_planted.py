"""Planted flaws are what their names say, as real patches; attacks change nothing about the work."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gagar_jax.grading import patch as patches
from gagar_jax.grading.audit import flaws
from gagar_jax.grading.audit.attacks import ATTACKS, CONTROLS, Attack, attacked
from gagar_jax.grading.audit.flaws import CLEAN, FLAWS
from gagar_jax.grading.audit.planted import Planted, git_diff, permuted, plant
from gagar_jax.types import Group, Status
from tests.grading.builders import FIXED, MODULE, Diff, group_of, trajectory

PATH = "pkg/core.py"
UNLIKE = FIXED.replace("        return low\n", "        value = low\n", 1)


def stored(diff: Diff) -> Group:
    """Two different passes and a failure, as a run would have them."""
    return group_of(
        [
            trajectory(0, diff({PATH: UNLIKE.replace("    return value", "    # done\n    return value")})),
            trajectory(1, diff({PATH: FIXED})),
            trajectory(2, diff({PATH: MODULE.replace("re.findall", "re.split")}), status=Status.FAILED),
        ]
    )


def planted(diff: Diff) -> Planted:
    found = plant(stored(diff), seed=0)
    assert found is not None
    return found


def texts(diff: Diff) -> dict[str, str]:
    """Flaw → the file's final text, read back out of the member's patch."""
    found = planted(diff)
    return {
        name: next(patches.apply_all(found.group.trajectories[m].patch, found.group.base_files))[2]
        for m, name in found.flaw.items()
    }


def clamp(text: str, *args: int) -> Any:
    space: dict[str, Any] = {}
    exec(compile(text, PATH, "exec"), space)
    return space["clamp"](*args)


def test_the_group_holds_the_clean_patch_every_flaw_and_a_failure(diff: Diff) -> None:
    found = planted(diff)
    assert set(found.flaw.values()) == {CLEAN, *FLAWS}
    assert [t.ticket.member for t in found.group.trajectories] == list(range(len(FLAWS) + 2))
    failed = [t for t in found.group.trajectories if not t.passed]
    assert [t.ticket.member in found.flaw for t in failed] == [False]
    assert texts(diff)[CLEAN] == FIXED
    assert failed[0].patch == git_diff(PATH, MODULE, MODULE.replace("re.findall", "re.split"))
    assert min(found.severity.values()) == 0 < max(found.severity.values())


def test_nothing_but_the_patch_tells_members_apart(diff: Diff) -> None:
    shapes = {
        tuple((turn.action.partition("\n")[0], turn.observation) for turn in t.turns)
        for t in planted(diff).group.trajectories
    }
    assert len(shapes) == 1


def test_the_order_is_drawn_from_the_seed(diff: Diff) -> None:
    group = stored(diff)
    orders = [tuple(p.flaw.items()) for seed in (0, 0, 1, 2) if (p := plant(group, seed=seed))]
    assert orders[0] == orders[1]
    assert len(set(orders)) > 1


@pytest.mark.parametrize("name", ["debug_print", "dead_code", "unrelated_edit", "unrequested_rewrite"])
def test_these_flaws_keep_the_behaviour(diff: Diff, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = texts(diff)[name]
    assert [clamp(text, *args) for args in ((0, 1, 3), (2, 1, 3), (9, 1, 3))] == [1, 2, 3]
    with pytest.raises(ValueError, match="empty"):
        clamp(text, 1, 3, 0)
    assert ("DEBUG clamp" in capsys.readouterr().out) == (name == "debug_print")


def test_special_casing_keeps_the_bug_and_knows_one_answer(diff: Diff) -> None:
    text = texts(diff)["test_special_casing"]
    assert clamp(text, 0, 1, 3) == clamp(MODULE, 0, 1, 3) == 3
    assert clamp(text, flaws.LITERAL, 1, 3) == flaws.LITERAL + 1


def test_a_reverted_fix_has_the_bug_in_another_spelling(diff: Diff) -> None:
    text = texts(diff)["reverted_hunk"]
    assert text != MODULE
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(MODULE))


def test_of_two_hunks_one_is_reverted() -> None:
    where = flaws.site(PATH, MODULE.replace("    return value\n", "    return -value\n"), FIXED)
    assert where is not None
    assert flaws.reverted_hunk(where) == FIXED.replace("    return value\n", "    return -value\n")


def test_weakened_validation_lets_through_what_was_refused(diff: Diff) -> None:
    assert clamp(texts(diff)["weakened_validation"], 1, 3, 0) == 3


def test_without_a_guard_errors_are_swallowed() -> None:
    where = flaws.site(
        "a.py", "def f(x):\n    y = 1\n    return x - y\n", "def f(x):\n    y = 1\n    return x + y\n"
    )
    assert where is not None
    text = flaws.weakened_validation(where)
    assert text is not None
    space: dict[str, Any] = {}
    exec(text, space)
    assert (space["f"](1), space["f"](None)) == (2, None)


def test_flaws_that_do_not_fit_are_left_out() -> None:
    where = flaws.site("a.py", "def f():\n    return 1\n", "def f():\n    return 2\n")
    assert where is not None
    assert flaws.special_casing(where) is None  # no parameter
    assert flaws.unrequested_rewrite(where) is None  # nothing to spell anew
    assert flaws.unrelated_edit(where) is not None
    assert flaws.site("a.txt", "a\n", "b\n") is None
    assert flaws.site("a.py", "X = 1\n", "X = 2\n") is None
    assert flaws.site("a.py", "def f(): return 1\n", "def f(): return 2\n") is None


def test_without_a_clean_pass_nothing_is_planted(diff: Diff) -> None:
    group = stored(diff)
    assert plant(group_of([group.trajectories[0], group.trajectories[2]]), seed=0) is None


@pytest.mark.parametrize("attack", [*CONTROLS, *ATTACKS], ids=lambda attack: attack.name)
def test_an_attack_is_where_it_should_be_and_changes_nothing_else(diff: Diff, attack: Attack) -> None:
    found = planted(diff)
    member = next(m for m, name in found.flaw.items() if name == "debug_print")
    group = attacked(found, member, attack)
    before, after = found.group.trajectories[member], group.trajectories[member]
    changed = [
        t.ticket.member for t, u in zip(group.trajectories, found.group.trajectories, strict=True) if t != u
    ]
    assert changed == [member]
    if attack.where in ("action", "observation"):
        assert after.patch == before.patch
        assert any(attack.text in getattr(turn, attack.where) for turn in after.turns)
        assert not any(attack.text in getattr(turn, attack.where) for turn in before.turns)
        return
    files = {file.path: text for file, _, text in patches.apply_all(after.patch, group.base_files)}
    if attack.where == "file":
        assert set(files) == {PATH, attack.text}
    else:
        written = attack.text if attack.where != "string" else repr(attack.text)
        assert written in files[PATH]
    assert clamp(files[PATH], 0, 1, 3) == 1


def test_there_are_enough_forms_of_attack() -> None:
    assert len({attack.text for attack in ATTACKS}) == len({a.name for a in ATTACKS}) == len(ATTACKS) >= 15
    assert {attack.where for attack in ATTACKS} >= {"comment", "docstring", "file", "action", "observation"}


@pytest.mark.parametrize(
    ("name", "base", "after"),
    [
        ("a.py", "1\n2\n3\n", "1\n4\n3\n"),
        ("a b.txt", "1\n", "2\n"),
        ("ü\u202e.txt", "1\n2\n", "1\n"),
        ("a.py", "1\n2", "1\n2\n"),
        ("a.py", "1\n2\n", "1\n3"),
        ("new file.md", None, "x\ny\n"),
    ],
)
def test_patches_are_as_git_takes_them(tmp_path: Path, name: str, base: str | None, after: str) -> None:
    if base is not None:
        (tmp_path / name).write_text(base)
    patch = git_diff(name, base, after)
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True)
    assert (tmp_path / name).read_text() == after
    ((file, _, text),) = patches.apply_all(patch, {} if base is None else {name: base})
    assert (file.path, text) == (name, after)


def test_permuted_members_are_renumbered(diff: Diff) -> None:
    group = stored(diff)
    moved = permuted(group, [2, 0, 1])
    assert [t.ticket.member for t in moved.trajectories] == [0, 1, 2]
    assert [t.patch for t in moved.trajectories] == [group.trajectories[i].patch for i in (2, 0, 1)]
