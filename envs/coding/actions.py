"""The agent's actions and their grammar: text in, an action or why it is none out. `tools` carries them out.

An action is one command on its first line; `edit` and `insert` take the lines below it.

    view NAME | view PATH A-B     open the window on a function or class, or on lines of a file
    search TEXT                   lines that contain TEXT, sources first
    edit A-B | edit A             replace these lines of the window by the lines below (none: delete)
    insert A                      put the lines below after line A of the window (0: before the first)
    test | submit                 run the tests of the task; end the episode

Lines count from 1 within the window as it stands now.
"""

from __future__ import annotations

import dataclasses
import re

GRAMMAR = "use: view NAME | view PATH A-B | search TEXT | edit A-B | insert A | test | submit"
MAX_ACTION_CHARS = 20_000


@dataclasses.dataclass(frozen=True)
class View:
    name: str


@dataclasses.dataclass(frozen=True)
class ViewLines:
    path: str
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Search:
    text: str


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replaces lines first..last of the window; first = last + 1 inserts after `last`."""

    first: int
    last: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RunTests:
    pass


@dataclasses.dataclass(frozen=True)
class Submit:
    pass


@dataclasses.dataclass(frozen=True)
class Malformed:
    """An action that is none; `why` goes to the agent."""

    why: str


Action = View | ViewLines | Search | Edit | RunTests | Submit | Malformed


def parse_action(text: str) -> Action:
    """Reads an action; anything that is not one comes back as `Malformed`, never as an exception."""
    if len(text) > MAX_ACTION_CHARS:
        return Malformed(f"longer than {MAX_ACTION_CHARS} characters")
    if _SURROGATE.search(text):  # half a character: no file can hold it
        return Malformed("characters that are no Unicode text")
    head, _, body = text.partition("\n")
    word, _, argument = head.strip().partition(" ")
    argument = argument.strip()
    if word in ("edit", "insert"):
        return _parse_edit(word, argument, body)
    if body.strip():
        return Malformed(
            f"{word or 'the command'} takes one line" if word in _ONE_LINE else "no command on line 1"
        )
    if word in ("test", "submit"):
        return (
            Malformed(f"{word} takes nothing") if argument else (RunTests() if word == "test" else Submit())
        )
    if word == "search":
        return Search(argument) if argument else Malformed("search for what?")
    if word == "view":
        lines = re.fullmatch(r"(\S+) (\d{1,6})-(\d{1,6})", argument)
        if lines:
            return ViewLines(lines[1], int(lines[2]), int(lines[3]))
        return (
            View(argument)
            if re.fullmatch(r"\w+(\.\w+)*", argument)
            else Malformed("view needs a NAME or PATH A-B")
        )
    return Malformed(f"no command {word[:20]!r}" if word else "empty action")


_SURROGATE = re.compile("[\ud800-\udfff]")
_ONE_LINE = ("view", "search", "test", "submit")


def _parse_edit(word: str, argument: str, body: str) -> Action:
    lines = tuple(body.removesuffix("\n").split("\n")) if body else ()
    single = re.fullmatch(r"\d{1,6}", argument)
    if word == "insert":
        if not single:
            return Malformed("insert needs one line number")
        return (
            Edit(int(argument) + 1, int(argument), lines)
            if lines
            else Malformed("insert needs lines below it")
        )
    span = re.fullmatch(r"(\d{1,6})-(\d{1,6})", argument)
    if span and int(span[1]) <= int(span[2]):
        return Edit(int(span[1]), int(span[2]), lines)
    return (
        Edit(int(argument), int(argument), lines)
        if single
        else Malformed("edit needs a line number A or lines A-B")
    )
