"""The agent's editor: one window on a working copy, moved and changed by the actions of `actions`.

Texts are short because tokens are dear, and hold no path of this machine, no time and nothing else that
differs between runs. Tests are run in `env.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Sequence

from envs.coding.actions import Edit
from envs.coding.mutation import docstring_lines
from envs.coding.workspace import Workspace, WorkspacePathError
from gagar_jax.types import parse_python

MAX_WINDOW_LINES = 60
MAX_HITS = 4
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What parsing an agent's text may raise; every one of them is the text's fault."""
_HIT_CHARS = 60


@dataclasses.dataclass
class Window:
    """Lines first..last (1-based, inclusive; last is first - 1 when empty) of a file, and their name."""

    path: str
    first: int
    last: int
    title: str
    definition: bool = False  # whether the lines are one whole function or class of a file that parses


class Editor:
    """One window on one working copy.

    Args:
      workspace: the working copy.
      sources, tests: paths of the package, in the order in which names and texts are looked up.
      observation_chars: longer observations are cut in the middle.
    """

    def __init__(
        self, workspace: Workspace, *, sources: Sequence[str], tests: Sequence[str], observation_chars: int
    ):
        self.workspace = workspace
        self.paths = [*sources, *tests]
        self.observation_chars = observation_chars
        self.window: Window | None = None

    def view(self, name: str) -> str:
        """Opens the window on a function or class by name, qualified or not; the current file comes first."""
        window = self.window
        if window and window.definition and window.title == name:  # it is open, and edits kept it up to date
            return self.show()
        here = [window.path] if window else []
        leaf = name.split(".")[-1]
        definition = re.compile(
            rf"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+{re.escape(leaf)}\b", re.MULTILINE
        )
        for path in dict.fromkeys([*here, *self.paths]):
            text = self._text(path)
            if definition.search(text) and (found := locate(text, name)):
                self.window = Window(path, *found, name, definition=_parse(text) is not None)
                return self.show()
        return f"no function or class {name}"

    def view_lines(self, path: str, first: int, last: int) -> str:
        """Opens the window on lines of a file."""
        try:
            text = self.workspace.read(path)
        except WorkspacePathError as error:
            return str(error)
        if text is None:
            return f"no file {path}"
        count = len(split_lines(text))
        if not 1 <= first <= min(last, count):
            return f"{path} has lines 1-{count}"
        last = min(last, count, first + MAX_WINDOW_LINES - 1)
        self.window = Window(path, first, last, f"{first}-{last}")
        return self.show()

    def _text(self, path: str) -> str:
        """A file's text; "" where it has none, which no name and no search is found in."""
        try:
            return self.workspace.read(path) or ""
        except WorkspacePathError:
            return ""

    def show(self) -> str:
        """The window: its file and name, then `N|code` a line, a docstring folded to its first line."""
        window = self.window
        assert window is not None
        text = self.workspace.read(window.path) or ""
        return self.cut(describe(window, text))

    def search(self, wanted: str) -> str:
        """Lines that contain a text: how many, and the first few."""
        hits = []
        for path in self.paths:
            text = self._text(path)
            if wanted in text:
                lines = split_lines(text)
                hits += [
                    f"{path}:{n}: {line.strip()[:_HIT_CHARS]}"
                    for n, line in enumerate(lines, 1)
                    if wanted in line
                ]
        if not hits:
            return "no hits"
        total = f"{len(hits)} hits" if len(hits) > 1 else "1 hit"
        return self.cut(
            "\n".join([f"{total}, first {MAX_HITS}:" if len(hits) > MAX_HITS else total, *hits[:MAX_HITS]])
        )

    def edit(self, action: Edit) -> str:
        """Changes lines of the window and says so in a word or two.

        Raises:
          OSError: the disk failed.
        """
        window = self.window
        if window is None:
            return "no window is open: view NAME first"
        size = window.last - window.first + 1
        inserts = action.first == action.last + 1
        if action.last > size or (action.first < 1):
            return f"the window has lines 1-{size}"
        text = self.workspace.read(window.path) or ""
        lines = split_lines(text)
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        new = [line.rstrip("\r") + end for line in action.lines]
        start, stop = window.first - 1 + action.first - 1, window.first - 1 + action.last
        if inserts and start and not lines[start - 1].endswith("\n"):
            lines[start - 1] += end
        edited = "".join([*lines[:start], *new, *lines[stop:]])
        if edited == text:
            return "ok, nothing changed"
        self.workspace.write(window.path, edited)
        delta = len(new) - (stop - start)
        window.last += delta
        error = self._syntax_error(window, lines, edited)
        said = f"ok, {size + delta} lines" if delta else "ok"
        if error:
            place = error.lineno - window.first + 1 if error.lineno else 0
            where = f" at {place}" if 1 <= place <= size + delta else ""
            return self.cut(f"{said}; syntax error{where}: {error.msg}")
        return said

    def _syntax_error(self, window: Window, before: list[str], edited: str) -> SyntaxError | None:
        """What is wrong with the edited file.

        A window that is a definition is parsed alone first: what parses by itself, at the indent that was
        there, parses in its file.
        """
        if not window.path.endswith(".py"):
            return None
        now = split_lines(edited)[window.first - 1 : window.last]
        kept_indent = now and _indent(now[0]) == _indent(before[window.first - 1])
        if window.definition and kept_indent and _parse_lines("".join(now)) is not None:
            return None
        error = syntax_error(edited)
        window.definition = window.definition and error is None
        return error

    def cut(self, text: str) -> str:
        """`cut` at this editor's limit."""
        return cut(text, self.observation_chars)


def cut(text: str, limit: int) -> str:
    """The text, or its head and tail by whole lines around a note on what was left out.

    Args:
      limit: most characters to return.
    """
    if len(text) <= limit:
        return text
    lines, half = text.split("\n"), (limit - len("\n[999999 lines cut]\n")) // 2
    head: list[str] = []
    tail: list[str] = []
    while lines and sum(len(line) + 1 for line in [*head, lines[0]]) <= half:
        head.append(lines.pop(0))
    while lines and sum(len(line) + 1 for line in [*tail, lines[-1]]) <= half:
        tail.insert(0, lines.pop())
    if not head and not tail:
        return text[:half] + "\n[cut]\n" + text[-half:]
    return "\n".join([*head, f"[{len(lines)} lines cut]", *tail])


def describe(window: Window, text: str) -> str:
    """A window on a file's text: its path and name, then `N|code` a line."""
    return f"{window.path} {window.title}\n{render(text, window.first, window.last)}"


def split_lines(text: str) -> list[str]:
    """Lines with their ends; only `\\n` ends a line, as in git."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def render(text: str, first: int, last: int) -> str:
    """Lines first..last as `N|code` a line, N from 1; a docstring inside is one line, `N|    \"\"\"...`."""
    lines = split_lines(text)
    folds = _docstrings(text, first, last)
    shown, number = [], first
    while number <= min(last, len(lines)):
        line = lines[number - 1].rstrip("\r\n")
        fold = folds.get(number)
        if fold and fold <= last:
            line = _indent(line) + '"""...'
        shown.append(f"{number - first + 1}|{line}")
        number = (fold if fold and fold <= last else number) + 1
    return "\n".join(shown)


def _docstrings(text: str, first: int, last: int) -> dict[int, int]:
    """First line -> last line of every docstring in a window; none where neither it nor the file parses."""
    lines = split_lines(text)[first - 1 : last]
    tree, shift = _parse_lines("".join(lines)), first - 1
    if tree is None:
        tree, shift = _parse(text), 0
    elif lines[0][:1].isspace():
        shift -= 1
    found = (docstring_lines(node) for node in ast.walk(tree)) if tree else ()
    return {span[0] + shift: span[1] + shift for span in found if span}


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _parse_lines(text: str) -> ast.Module | None:
    """A piece of a file as a tree; an indented piece stands in an `if` on a line before it."""
    return _parse(f"if 1:\n{text}" if text[:1].isspace() else text) if text.strip() else None


def parses(lines: str) -> bool:
    """Whether whole lines of a file, at whatever indent, parse by themselves."""
    return _parse_lines(lines) is not None


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ast.Module | None:
    try:
        return parse_python(text)
    except UNPARSABLE:
        return None


@functools.lru_cache(maxsize=128)
def locate(text: str, name: str) -> tuple[int, int] | None:
    """First and last line of a definition, decorators included; by syntax or, failing that, by indent."""
    try:
        tree = parse_python(text)
    except UNPARSABLE:
        return _locate_by_indent(text, name.split(".")[-1])
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]] = []
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, node = stack.pop(0)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append((prefix + child.name, child))
                stack.append((f"{prefix}{child.name}.", child))
            elif isinstance(child, ast.If | ast.Try | ast.With):
                stack.append((prefix, child))
    for qualname, node in found:
        if qualname == name or qualname.endswith(f".{name}"):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return first, node.end_lineno or node.lineno
    return None


def _locate_by_indent(text: str, leaf: str) -> tuple[int, int] | None:
    lines = split_lines(text)
    for index, line in enumerate(lines):
        match = re.match(rf"([ \t]*)(?:async[ \t]+)?(?:def|class)[ \t]+{re.escape(leaf)}\b", line)
        if match:
            last = index
            for below in range(index + 1, len(lines)):
                stripped = lines[below].strip()
                indent = len(lines[below]) - len(lines[below].lstrip())
                if stripped and indent <= len(match[1]) and not stripped.startswith(")"):
                    break
                last = below if stripped else last
            return index + 1, last + 1
    return None


@functools.lru_cache(maxsize=128)
def syntax_error(text: str) -> SyntaxError | None:
    """Why the text does not compile, if it does not."""
    try:
        parse_python(text)
    except SyntaxError as error:
        return error
    except ValueError as error:  # NUL bytes
        return SyntaxError(str(error))
    except (RecursionError, MemoryError):  # the parser's stack is full; an agent can write that
        return SyntaxError("nested too deeply")
    return None
