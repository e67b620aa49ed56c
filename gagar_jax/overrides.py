"""Settings from the command line: `--train.optimizer.lr 3e-4` on top of a YAML file.

Names are resolved and checked here; types and ranges are config.py's. A flag may leave sections out
where one setting only fits: `--train.lr` is train.optimizer.lr, `--confinement` is env.confinement.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any

import pydantic

from gagar_jax.config import Config, ConfigError, Section, parse

_WHERE = "command line"


def leaves(section: type[Section] = Config, prefix: str = "") -> dict[str, Any]:
    """Every setting's dotted name with its annotation, in the order of config.py."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            found |= leaves(typing.cast("type[Section]", annotation), f"{prefix}{name}.")
        else:
            found[prefix + name] = annotation
    return found


def resolve(flag: str) -> str:
    """The dotted name a flag means.

    Args:
      flag: without dashes in front; dashes and underscores inside are the same.

    Raises:
      ConfigError: nothing fits (with the nearest name) or several settings do (with all of them).
    """
    names = list(leaves())
    name = flag.replace("-", "_")
    if name in names:
        return name
    fits = [candidate for candidate in names if _shortens(name.split("."), candidate.split("."))]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ConfigError(f"{_WHERE}: --{flag} could mean any of --{', --'.join(fits)}; name one in full")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5) or _same_ending(name, names)
    raise ConfigError(
        f"{_WHERE}: unknown setting --{flag}"
        + (f"; did you mean --{close[0]}?" if close else "")
        + " (every setting: gagar train CONFIG --help)"
    )


def override(config: Config, arguments: Sequence[str]) -> Config:
    """The settings with those of a command line put in.

    Args:
      config: what the YAML file says.
      arguments: `--name value`, `--name=value`, or `--name v1 v2 …` for a list; a bare `--name` is true.

    Raises:
      ConfigError: an unknown or ambiguous name, a wrong type or a value out of range.
    """
    data = config.model_dump()
    for name, values in _pairs(arguments):
        *sections, leaf = name.split(".")
        target = data
        for section in sections:
            target = target[section]
        target[leaf] = _value(name, leaves()[name], values)
    return parse(data, where=_WHERE)


def _shortens(short: list[str], full: list[str]) -> bool:
    """Whether `short` is `full` with sections left out: same last part, the others in order."""
    if short[-1] != full[-1]:
        return False
    rest = iter(full[:-1])
    return all(part in rest for part in short[:-1])


def _same_ending(name: str, names: list[str]) -> list[str]:
    endings = {candidate.rsplit(".", 1)[-1]: candidate for candidate in names}
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(endings), n=1, cutoff=0.6)
    return [endings[ending] for ending in close]


def _pairs(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    pairs: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument[2:].partition("=")
            pairs.append((resolve(flag), [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(argument)
        else:
            raise ConfigError(
                f"{_WHERE}: {argument!r} belongs to no setting; settings look like --name value"
            )
    return pairs


def _value(name: str, annotation: Any, values: list[str]) -> Any:
    if typing.get_origin(annotation) is tuple:
        return tuple(values)
    if annotation is bool and not values:
        return True
    if len(values) != 1:
        raise ConfigError(f"{_WHERE}: --{name} takes one value, got {' '.join(values) or 'none'}")
    optional = isinstance(annotation, types.UnionType) and types.NoneType in typing.get_args(annotation)
    return None if optional and values[0].lower() in ("none", "null") else values[0]
