"""What a journal gives back: the attempts of these weights at these tasks, and nothing half written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gagar_jax.rollout.collector import Journal
from gagar_jax.rollout.exchange import Finished
from gagar_jax.types import UserError
from tests.trajectories import make_groups

(GROUP,) = make_groups("pfp")
NAME = GROUP.trajectories[0].ticket.instance_id
NUMBER = GROUP.group


def write(path: Path, weights: str) -> list[Finished]:
    finished = [Finished(t, {"a.py": "x = 1\n"}) for t in GROUP.trajectories]
    journal = Journal(path, weights)
    journal.read({})
    for one in finished:
        journal.append(one)
    return finished


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    finished = write(tmp_path / "journal", "aa")
    read = Journal(tmp_path / "journal", "aa").read({NUMBER: NAME})
    assert [f.trajectory for f in read] == [f.trajectory for f in finished]
    assert [f.base_files for f in read] == [{"a.py": "x = 1\n"}, {}, {}]


@pytest.mark.parametrize(("weights", "task"), [("bb", NAME), ("aa", "another")])
def test_other_weights_and_tasks_leave(
    tmp_path: Path, weights: str, task: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    write(path, "aa")
    with caplog.at_level(logging.WARNING):
        assert Journal(path, weights).read({NUMBER: task}) == []
    assert "3 trajectories of other weights or tasks were taken out" in caplog.text
    assert path.read_bytes() == b""


def test_groups_not_asked_for_stay(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, "aa")
    before = path.read_bytes()
    assert len(Journal(path, "aa").read({NUMBER + 1: "another"})) == 3
    assert path.read_bytes() == before


def test_a_torn_last_line_is_dropped_and_other_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, "aa")
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert len(Journal(path, "aa").read({})) == 2
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(UserError, match=r"journal, line 1: not a trajectory"):
        Journal(path, "aa").read({})
