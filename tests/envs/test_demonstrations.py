"""Demonstrations repair what they show, in the styles asked for, the same every time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from envs.coding.demonstrations import SLOPPY, Problem, choose_styles, edit_actions, plan
from envs.coding.env import CodeRepairEnv
from envs.coding.plugin import CODE_REPAIR
from envs.coding.tasks import load_tasks
from gagar_jax.config import EnvConfig
from gagar_jax.types import Status
from tests.envs.tiny import quiet, tiny_tasks

pytestmark = pytest.mark.confined


def demonstrate(seed: int = 0, **env: Any) -> list[Any]:
    ids = [task["instance_id"] for task in load_tasks(tiny_tasks()) if task["split"] == "train"][:6]
    return CODE_REPAIR.demonstrations(
        tiny_tasks(),
        EnvConfig(**env).model_dump(mode="json"),
        instance_ids=ids,
        per_task=4,
        clean_share=0.5,
        seed=seed,
        progress=quiet,
    )


def test_they_are_real_seeded_and_half_clean() -> None:
    made = demonstrate()
    assert len(made) == 24
    assert sum(d.style == "clean" for d in made) == 12
    assert demonstrate() == made
    assert demonstrate(seed=1) != made
    for demonstration in made:
        *shown, last = demonstration.turns
        assert last == ("submit", "")
        assert all(observation for _, observation in shown)


@pytest.mark.parametrize("style", ["clean", *SLOPPY])
def test_every_style_repairs_the_bug(style: str) -> None:
    env = CodeRepairEnv(tiny_tasks())
    try:
        for task in load_tasks(tiny_tasks())[::7]:
            env.reset(options={"instance_id": task["instance_id"]})
            for action in plan(Problem(task, env.package(task)), style, random.Random(task["instance_id"])):
                observation, *_, info = env.step(action)
                assert not info["malformed"], (action, observation)
                assert "syntax error" not in observation
            assert info["outcome"].status is Status.PASSED, (style, task["instance_id"], info["outcome"])
    finally:
        env.close()


@pytest.mark.parametrize("locate", ["none", "line"])
def test_they_follow_the_difficulty_dial(locate: str) -> None:
    for demonstration in demonstrate(locate=locate):
        assert demonstration.turns[0][0].startswith("view ") == (locate == "none") or locate == "line"
        assert len(demonstration.turns) <= EnvConfig().max_turns


def test_a_short_turn_limit_leaves_clean_ones() -> None:
    made = demonstrate(max_turns=2)
    assert made
    assert all(len(demonstration.turns) <= 2 for demonstration in made)


@pytest.mark.parametrize(
    ("broken", "wanted", "actions"),
    [
        ("abc", "axc", ["edit 2\nx"]),
        ("abc", "ac", ["edit 2"]),
        ("ac", "abc", ["insert 1\nb"]),
        ("abcd", "axyd", ["edit 2-3\nx\ny"]),
        ("abcde", "xbcdy", ["edit 5\ny", "edit 1\nx"]),
    ],
)
def test_edit_actions_are_minimal_and_from_the_bottom_up(
    broken: str, wanted: str, actions: list[str]
) -> None:
    assert edit_actions(list(broken), list(wanted)) == actions


def test_styles_keep_the_share_on_average() -> None:
    rng = random.Random(0)
    styles = [style for _ in range(400) for style in choose_styles(5, 0.3, rng)]
    assert abs(styles.count("clean") / len(styles) - 0.3) < 0.02
    assert set(styles) == {"clean", *SLOPPY}


def test_the_corpus_holds_sources_prompts_and_actions() -> None:
    texts = list(CODE_REPAIR.corpus(tiny_tasks()))
    joined = "\n".join(texts)
    assert "def count_above(values, limit):" in joined
    assert "1|def " in joined
    assert any(text.startswith(("edit ", "insert ")) for text in texts)
    unseen = next(t["qualname"] for t in load_tasks(tiny_tasks()) if t["split"] == "unseen_function")
    assert f"tiny/__init__.py {unseen}\n" not in joined


def test_the_doctor_sees_pip_and_confinement() -> None:
    rows = {name: (ok, text) for name, ok, text in CODE_REPAIR.doctor()}
    assert rows["pip"][0]
    assert rows["confinement"] == (True, rows["confinement"][1])
