"""Verdicts are given again to equal groups, whatever the order of members, and to no others."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gagar_jax.config import GradingConfig
from gagar_jax.files import DiskFull
from gagar_jax.grading.cache import CachedGrader, read_verdicts
from gagar_jax.grading.service import GradingService
from gagar_jax.grading.structural import StructuralGrader
from gagar_jax.grading.verdict import VoidVerdict, validate
from gagar_jax.types import Evidence, Group, GroupVerdict, Status, Turn
from tests.grading.builders import FIXED, Diff, group_of, trajectory

WORSE = FIXED.replace("        return low\n", "        print(value)\n        return low\n")


class Counting:
    """The structural grader, asked visibly, with what only an agent adds."""

    name, version, audits_external = "counting", "1", True

    def __init__(self) -> None:
        self.asked = 0

    def grade(self, group: Group) -> GroupVerdict:
        self.asked += 1
        verdict = StructuralGrader().grade(group)
        failed = next(t.ticket.member for t in group.trajectories if not t.passed)
        copied = (Evidence("step", "step 1", "core"),)
        return dataclasses.replace(verdict, external={failed: copied}, commands={failed: {"ls": ("pkg",)}})


@pytest.fixture
def group(diff: Diff) -> Group:
    good, worse = diff({"pkg/core.py": FIXED}), diff({"pkg/core.py": WORSE})
    failed = trajectory(2, b"", status=Status.FAILED)
    return group_of([trajectory(0, good), trajectory(1, worse), failed, trajectory(3, good)])


def shuffled(group: Group, number: int, order: list[int]) -> Group:
    """The same attempts under other numbers, in another group of the same task."""
    members = [
        dataclasses.replace(
            group.trajectories[old],
            ticket=dataclasses.replace(group.trajectories[old].ticket, group=number, member=new),
        )
        for new, old in enumerate(order)
    ]
    return dataclasses.replace(group, group=number, trajectories=members)


def test_an_equal_group_gets_the_same_verdict_in_its_own_numbers(group: Group, tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    real = Counting()
    grader = CachedGrader(real, kept={}, keep=kept.append)
    first = grader.grade(group)
    again = shuffled(group, 9, [2, 3, 1, 0])
    second = grader.grade(again)
    assert (real.asked, grader.reused, len(kept)) == (1, 1, 1)
    assert grader.audits_external
    assert {c.member: c.scores for c in second.candidates} == {
        c.member: c.scores for c in Counting().grade(again).candidates
    }
    assert first.external.keys() == {2}
    assert second.external.keys() == second.commands.keys() == {0}
    assert validate(second, again)[1] == 0

    # In another process, from the file.
    path = tmp_path / "verdicts.jsonl"
    path.write_text(json.dumps(kept[0]) + "\n")
    other = Counting()
    assert CachedGrader(other, kept=read_verdicts(path), keep=kept.append).grade(again) == second
    assert other.asked == 0


@pytest.mark.parametrize("what", ["patch", "transcript", "outcome", "task", "version"])
def test_another_question_is_asked(group: Group, what: str) -> None:
    real = Counting()
    grader = CachedGrader(real, kept={}, keep=lambda record: None)
    grader.grade(group)
    (first, *rest), other = group.trajectories, group
    if what == "patch":
        other = dataclasses.replace(
            group, trajectories=[dataclasses.replace(first, patch=rest[0].patch), *rest]
        )
    elif what == "transcript":
        turns = (Turn("view pkg/other.py", "…"), *first.turns)
        other = dataclasses.replace(group, trajectories=[dataclasses.replace(first, turns=turns), *rest])
    elif what == "outcome":
        failed = dataclasses.replace(first.outcome, status=Status.FAILED)
        other = dataclasses.replace(group, trajectories=[dataclasses.replace(first, outcome=failed), *rest])
    elif what == "task":
        other = dataclasses.replace(group, task=dict(group.task) | {"instance_id": "pkg__2"})
    else:
        real.version = "2"
        grader = CachedGrader(real, kept=grader._kept, keep=lambda record: None)
    grader.grade(other)
    assert real.asked == 2


def test_what_a_grader_raises_is_not_kept(group: Group) -> None:
    class Bad(Counting):
        def grade(self, group: Group) -> GroupVerdict:
            self.asked += 1
            raise VoidVerdict("no")

    bad = Bad()
    grader = CachedGrader(bad, kept={}, keep=lambda record: pytest.fail("kept"))
    for _ in range(2):
        with pytest.raises(VoidVerdict):
            grader.grade(group)
    assert bad.asked == 2


def test_a_void_verdict_is_neither_kept_nor_given_again(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    class Inventing(Counting):
        def grade(self, group: Group) -> GroupVerdict:
            given = super().grade(group)
            return dataclasses.replace(given, external={0: (Evidence("step", "step 9", "curl"),)})

    inventing = Inventing()
    grader = CachedGrader(inventing, kept={}, keep=lambda record: pytest.fail("kept"))
    for _ in range(2):
        with pytest.raises(VoidVerdict, match="does not exist"):
            grader.grade(group)
    assert inventing.asked == 2

    # One that was kept before it was checked, or under other checks.
    kept: list[dict[str, Any]] = []
    asked = Counting()
    key, members = CachedGrader(asked, kept={}, keep=kept.append)._question(group)
    void = dataclasses.replace(Counting().grade(group), external={9: ()})
    grader = CachedGrader(asked, kept={key: void}, keep=kept.append)
    with caplog.at_level(logging.WARNING):
        assert [grader.grade(group).external.keys() for _ in range(2)] == [{2}, {2}]
    assert "the kept verdict on group 0 is void" in caplog.text
    assert (asked.asked, grader.reused, len(kept)) == (1, 1, 1)
    assert members


def test_a_verdict_that_cannot_be_kept_is_given_all_the_same(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    def full(record: dict[str, Any]) -> None:
        raise DiskFull("no space")

    real = Counting()
    grader = CachedGrader(real, kept={}, keep=full)
    assert grader.grade(group) == grader.grade(group) == Counting().grade(group)
    assert (real.asked, grader.unkept) == (1, 1)
    assert "a record could not be kept (1 so far)" in caplog.text
    service = GradingService(grader, GradingConfig(), mode="none")
    assert service.counts()["unkept"] == 1
    service.close()


def test_lines_that_are_no_verdict_are_left_alone(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[dict[str, Any]] = []
    CachedGrader(Counting(), kept={}, keep=kept.append).grade(group)
    path = tmp_path / "verdicts.jsonl"
    assert read_verdicts(path) == {}
    bad = kept[0] | {"verdict": kept[0]["verdict"] | {"candidates": [{"member": 0}]}}
    path.write_text("\n".join(["[]", json.dumps(kept[0]), json.dumps(bad), json.dumps(kept[0])[:-20]]))
    with caplog.at_level(logging.WARNING):
        assert list(read_verdicts(path)) == [kept[0]["key"]]
    assert all(f"line {n} is no verdict" in caplog.text for n in (1, 3, 4))
