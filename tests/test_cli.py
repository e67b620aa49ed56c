"""The command `gagar` as a person meets it: help, mistakes, ctrl-C. Its work is tested where it is done."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gagar_jax import cli
from gagar_jax.types import UserError

Gagar = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def gagar(user_environment: dict[str, str], tmp_path: Path) -> Gagar:
    """Runs the installed command in an empty folder, as a person at a shell would."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("gagar")), *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=user_environment,
            cwd=tmp_path,
        )

    return run


def test_help_is_quick_and_imports_no_jax(user_environment: dict[str, str]) -> None:
    code = (
        "import sys, contextlib\nfrom gagar_jax import cli\n"
        "with contextlib.suppress(SystemExit):\n    cli.main(['--help'])\n"
        "print(sorted({'jax', 'flax', 'tyro', 'rich', 'matplotlib', 'gymnasium'} & set(sys.modules)))"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=user_environment
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - began < 5  # about 0.1 s on a quiet machine


def commands(parser: argparse.ArgumentParser, above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield [*above, name]
                yield from commands(below, (*above, name))


COMMANDS = list(commands(cli._parser()))


def test_every_command_is_in_the_documents(repository: Path) -> None:
    text = (repository / "docs" / "running.md").read_text()
    leaves = [c for c in COMMANDS if c != ["tasks"]]
    assert len(leaves) >= 11
    assert [c for c in leaves if f"| `gagar {' '.join(c)}" not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "Example:\n  gagar " + " ".join(command) in shown


def test_help_after_a_file_lists_every_setting(gagar: Gagar) -> None:
    done = gagar("train", "configs/smoke.yaml", "--help")
    assert done.returncode == 0
    from gagar_jax.overrides import leaves

    shown = "".join(done.stdout.split())
    assert [name for name in leaves() if f"--{name}" not in shown] == []
    assert "runs/smoke" in shown  # the file's value, not the class's, is the default shown


def test_a_module_is_the_same_command(user_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gagar_jax", "train", "nowhere.yaml"],
        capture_output=True,
        text=True,
        check=False,
        env=user_environment,
    )
    assert (done.returncode, done.stderr) == (2, "gagar: nowhere.yaml: no such config file\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "configs/smoke.yaml", "--trian.mode", "none"], "did you mean --train.mode"),
        (
            ["train", "configs/smoke.yaml", "--train.lr", "0"],
            "train.optimizer.lr: Input should be greater than 0",
        ),
        (["train", "--seed", "1"], "comes first"),
        (["trian", "configs/smoke.yaml"], "invalid choice: 'trian'"),
        (["eval", "no/run"], "no/run is not the folder of a run"),
        (["eval", ".", "--stage", "best"], "--stage is rl or sft"),
        (
            ["tasks", "build", "configs/smoke.yaml", "--env.id", "cart/Pole-v1"],
            "no installed package prepares",
        ),
    ],
)
def test_mistakes_are_one_paragraph_and_status_2(gagar: Gagar, arguments: list[str], words: str) -> None:
    done = gagar(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_for_the_user_and_bugs_part_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> int:
        raise UserError("There is no way to confine processes here.")

    monkeypatch.setattr(cli, "_run_doctor", refuse)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "gagar: There is no way to confine processes here.\n"

    def bug(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run_doctor", bug)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_ctrl_c_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run_train", interrupted)
    assert cli.main(["train", "configs/smoke.yaml", "--run-dir", "my runs/a"]) == 130
    assert "gagar train configs/smoke.yaml --run-dir 'my runs/a'" in capsys.readouterr().err


def test_doctor_finds_what_is_here(gagar: Gagar) -> None:
    done = gagar("doctor")
    assert done.returncode in (0, 1), done.stderr
    for word in ("python", "git", "jax devices", "memory", "environments"):
        assert word in done.stdout
    assert ("Missing: " in done.stdout) == (done.returncode == 1)
