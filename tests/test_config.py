"""Settings: closed, typed, explained; from YAML and from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gagar_jax.config import Config, ConfigError, Section, dump, load, parse
from gagar_jax.overrides import leaves, override, resolve


def test_dump_and_load_give_the_same_settings(tmp_path: Path) -> None:
    config = parse({"name": "x", "train": {"optimizer": {"lr": 3e-4}}, "tasks": {"packages": ["toolz"]}})
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert load(path) == config


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert load(path) == Config()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"trian": {}}, ["unknown key 'trian'", "did you mean 'train'"]),
        ({"train": {"optimizer": {"learning": 1}}}, ["'train.optimizer.learning'"]),
        ({"train": {"lambda_maxx": 2}}, ["did you mean 'lambda_max'"]),
        ({"train": {"lambda_max": 0.5}}, ["train.lambda_max", "greater than or equal to 1", "0.5"]),
        ({"train": {"mode": "gagar"}}, ["train.mode", "'sum_preserving'", "'gagar'"]),
        ({"model": {"heads": 3, "kv_heads": 2}}, ["model.heads 3", "model.kv_heads 2"]),
    ],
)
def test_mistakes_are_named(data: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data, where="some.yaml")
    assert str(caught.value).startswith("some.yaml: ")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("- a\n- b", "must be a mapping"), ("a: [", "not readable as YAML"), (None, "no such config file")],
)
def test_unusable_files_are_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_any_leaf_can_be_set() -> None:
    """Every setting, by its full name, to the value it has: nothing changes and nothing is refused."""
    config = Config()
    arguments: list[str] = []
    for name in leaves():
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        words = [str(v) for v in value] if isinstance(value, tuple) else [str(value)]
        arguments += ["--" + name.replace("_", "-"), *words]
    assert override(config, arguments) == config


@pytest.mark.parametrize(
    ("arguments", "read", "value"),
    [
        (["--train.optimizer.lr", "3e-4"], lambda c: c.train.optimizer.lr, 3e-4),
        (["--train.lr", "3e-4"], lambda c: c.train.optimizer.lr, 3e-4),
        (["--train.steps=7"], lambda c: c.train.steps, 7),
        (["--run-dir", "elsewhere"], lambda c: c.run_dir, Path("elsewhere")),
        (["--run_dir", "elsewhere"], lambda c: c.run_dir, Path("elsewhere")),
        (["--seed", "5"], lambda c: (c.seed, c.tasks.seed), (5, 0)),
        (["--confinement", "none"], lambda c: c.env.confinement, "none"),
        (["--tasks.packages", "toolz", "parse"], lambda c: c.tasks.packages, ("toolz", "parse")),
        (["--tasks.packages"], lambda c: c.tasks.packages, ()),
        (["--tasks.dir", "none"], lambda c: c.tasks.dir, None),
        (["--model.scan-layers"], lambda c: c.model.scan_layers, True),
        (["--model.scan-layers", "false"], lambda c: c.model.scan_layers, False),
        (["--mesh.data", "-1"], lambda c: c.mesh.data, -1),
        (["--seed", "1", "--seed", "2"], lambda c: c.seed, 2),
    ],
)
def test_command_line_settings(arguments: list[str], read: object, value: object) -> None:
    assert callable(read)
    assert read(override(Config(), arguments)) == value


def test_a_file_s_values_stay_under_the_command_line() -> None:
    config = parse({"sft": {"steps": 9, "optimizer": {"lr": 1e-3}}})
    changed = override(config, ["--sft.steps", "10"])
    assert (changed.sft.steps, changed.sft.optimizer.lr) == (10, 1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trian.mode", "none"], ["unknown setting --trian.mode", "did you mean --train.mode"]),
        (["--confinment", "none"], ["did you mean --env.confinement"]),
        (["--lr", "1"], ["--sft.optimizer.lr", "--train.optimizer.lr", "name one in full"]),
        (["--train.lr", "-1"], ["train.optimizer.lr", "greater than 0", "'-1'"]),
        (["--train.steps", "many"], ["train.steps", "valid integer", "'many'"]),
        (["--confinement", "no"], ["env.confinement", "'bubblewrap'", "'no'"]),
        (["--seed"], ["--seed takes one value"]),
        (["--seed", "1", "2"], ["--seed takes one value, got 1 2"]),
        (["stray"], ["'stray' belongs to no setting"]),
    ],
)
def test_command_line_mistakes(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        override(Config(), arguments)
    assert all(word in str(caught.value) for word in ["command line: ", *words]), str(caught.value)


def test_full_names_win_over_short_ones() -> None:
    assert resolve("name") == "name"
    assert resolve("tasks.seed") == "tasks.seed"
    assert resolve("env.id") == resolve("id") == "env.id"


def test_sections_cannot_be_changed_in_place() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    assert issubclass(Config, Section)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_tier_values_are_coefficients(value: float) -> None:
    with pytest.raises(ConfigError, match=r"grading\.tier3"):
        parse({"grading": {"tier3": value}})
