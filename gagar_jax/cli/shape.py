"""How every command of `gagar` is laid out and reads its settings; not what any of them does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gagar_jax.types import UserError

if TYPE_CHECKING:
    from gagar_jax.config import Config

_SETTINGS = """
Any setting can follow the file, by its dotted name; sections may be left out where one setting fits.
All of them, with their defaults:  gagar {command} {config} --help
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors point to the help of the command they belong to."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --"):
            message += " (CONFIG or RUN_DIR comes first, then its settings)"
        self.exit(2, f"{self.prog}: {message}\nSee: {self.prog} --help\n")


Commands = argparse._SubParsersAction  # what add_subparsers returns; argparse gives it no public name


def command(commands: Commands[Parser], name: str, brief: str, epilog: str, description: str = "") -> Parser:
    return commands.add_parser(
        name,
        help=brief,
        description=description or brief,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def configured(
    commands: Commands[Parser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    brief: str,
    description: str,
    example: str,
) -> None:
    """A command of the form `gagar NAME CONFIG [--setting value ...]`."""
    config = "configs/pocket.yaml"
    word = name.split()[-1]
    epilog = f"Example:\n  gagar {name} {config} --run-dir runs/mine {example}\n"
    parser = command(
        commands, word, brief, epilog + _SETTINGS.format(command=name, config=config), description
    )
    parser.usage = f"gagar {name} CONFIG [--run-dir DIR] [--confinement KIND] [--any.setting value ...]"
    parser.add_argument("config", metavar="CONFIG", help=f"a YAML file such as {config}; it comes first")
    take_settings(parser)
    parser.set_defaults(run=run, command=name)


def take_settings(parser: Parser) -> None:
    """Whatever follows the positional arguments is settings, read when the command runs."""
    parser.add_argument("settings", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def settings_of(parsed: argparse.Namespace, path: Path, arguments: Sequence[str]) -> Config:
    """The YAML file with the command line's settings put in; `--help` shows them all instead."""
    from gagar_jax.config import Config, load
    from gagar_jax.overrides import override

    config = load(_find(path))
    if "--help" in arguments or "-h" in arguments:
        import tyro

        tyro.cli(
            Config,
            default=config,
            args=["--help"],
            prog=f"gagar {parsed.command} {path}",
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    return override(config, arguments)


def _find(path: Path) -> Path:
    """The file itself, or the recipe of that name that came with the installed package."""
    shipped = Path(__file__).resolve().parents[2] / "configs" / path.name
    if not path.exists() and path.parent.name in ("", "configs") and shipped.exists():
        return shipped
    return path


def take(arguments: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag that is not a setting, and the arguments without it."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument == flag:
            if index + 1 == len(rest):
                raise UserError(f"command line: {flag} takes a value")
            return rest[index + 1], rest[:index] + rest[index + 2 :]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}="), rest[:index] + rest[index + 1 :]
    return None, rest
