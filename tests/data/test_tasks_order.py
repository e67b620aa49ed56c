"""The order of prompts: whole epochs, a new order each, and nothing lost or repeated over a restart."""

from __future__ import annotations

import json

import pytest

from gagar_jax.data.tasks import task_iterator
from gagar_jax.types import UserError

RECORDS = [{"instance_id": f"task-{n}", "n": n} for n in range(7)]


def draw(iterator, count: int) -> list[int]:
    return [next(iterator)["n"] for _ in range(count)]


def test_every_epoch_visits_each_task_once_in_its_own_order() -> None:
    iterator = task_iterator(RECORDS, 0)
    epochs = [draw(iterator, 7) for _ in range(6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3


def test_the_seed_is_the_order() -> None:
    assert draw(task_iterator(RECORDS, 5), 30) == draw(task_iterator(RECORDS, 5), 30)
    assert draw(task_iterator(RECORDS, 5), 30) != draw(task_iterator(RECORDS, 6), 30)


@pytest.mark.parametrize("before", [0, 1, 7, 10, 21])
def test_no_task_is_lost_or_repeated_over_a_restart(before: int) -> None:
    whole = draw(task_iterator(RECORDS, 1), before + 25)
    first = task_iterator(RECORDS, 1)
    assert draw(first, before) == whole[:before]
    saved = json.dumps(first.get_state())
    second = task_iterator(RECORDS, 1)
    second.set_state(json.loads(saved))
    assert draw(second, 25) == whole[before:]


def test_no_tasks_is_said_in_words() -> None:
    with pytest.raises(UserError, match="gagar tasks build"):
        task_iterator([], 0)
