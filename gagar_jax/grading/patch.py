"""Reading and applying what `git diff --binary` wrote. No git process, no syntax trees, no judgement.

Text is UTF-8 with surrogate escapes, lines are cut at "\\n" only, so every byte survives. Binary parts
are recorded, not decoded.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_SILENT = ("index ", "old mode ", "new mode ", "similarity index ", "dissimilarity index ")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a hunk: its 1-based number (before for removed, after for added and context)."""

    number: int
    text: str


@dataclasses.dataclass(frozen=True)
class Hunk:
    """A run of base lines `start … start + len(before)` (zero-based) and what replaces it."""

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    ends_without_newline: bool


@dataclasses.dataclass(frozen=True)
class FilePatch:
    """One file's part of a patch. `path` is where the file is afterwards (before, when deleted)."""

    path: str
    old_path: str
    new: bool
    deleted: bool
    binary: bool
    hunks: tuple[Hunk, ...]
    added: tuple[Line, ...]
    removed: tuple[Line, ...]


class _Reader:
    """The lines of a patch and the place in them."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        if self.lines and self.lines[-1] == "":
            self.lines.pop()
        self.at = 0

    def peek(self) -> str | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def take(self) -> str:
        line = self.peek()
        if line is None:
            raise ValueError("malformed patch: it ends in the middle of a hunk or header")
        self.at += 1
        return line

    def error(self, what: str) -> ValueError:
        return ValueError(f"malformed patch, line {self.at}: {what}")


@functools.lru_cache(maxsize=1024)
def parse(patch: bytes) -> tuple[FilePatch, ...]:
    """The files a git patch touches, in its order; `b""` is no file.

    Raises:
      ValueError: not a git patch, or a hunk's lines do not match its header; the message gives the line.
    """
    reader = _Reader(patch.decode("utf-8", "surrogateescape"))
    files = []
    while reader.peek() is not None:
        files.append(_file(reader))
    return tuple(files)


def _file(reader: _Reader) -> FilePatch:
    header = reader.take()
    if not header.startswith("diff --git "):
        raise reader.error(f"expected 'diff --git', found {header[:60]!r}")
    old, new = _header_paths(header.removeprefix("diff --git "))
    is_new = deleted = binary = False
    hunks: list[Hunk] = []
    added: list[Line] = []
    removed: list[Line] = []
    while (line := reader.peek()) is not None and not line.startswith("diff --git "):
        reader.take()
        if line.startswith("@@ "):
            hunks.append(_hunk(line, reader, added, removed))
        elif line.startswith("new file mode "):
            is_new = True
        elif line.startswith("deleted file mode "):
            deleted = True
        elif line.startswith(("rename from ", "copy from ")):
            old = _unquote(line.split(" from ", 1)[1])
        elif line.startswith(("rename to ", "copy to ")):
            new = _unquote(line.split(" to ", 1)[1])
        elif line.startswith("--- "):
            old = _side(line[4:]) or old
        elif line.startswith("+++ "):
            new = _side(line[4:]) or new
        elif line.startswith("Binary files "):
            binary = True
        elif line == "GIT binary patch":
            binary = True
            _skip_binary(reader)
        elif not line.startswith(_SILENT):
            raise reader.error(f"unknown line {line[:60]!r}")
    if not new or not old:
        raise reader.error(f"no path can be read from {header[:120]!r}")
    path = old if deleted else new
    return FilePatch(path, old, is_new, deleted, binary, tuple(hunks), tuple(added), tuple(removed))


def _hunk(header: str, reader: _Reader, added: list[Line], removed: list[Line]) -> Hunk:
    match = _HUNK.match(header)
    if match is None:
        raise reader.error(f"unreadable hunk header {header[:60]!r}")
    start, count, new_start, new_count = (1 if g is None else int(g) for g in match.groups())
    # A hunk without base (or new) lines names the line before it, so it is already zero-based.
    old_at, new_at = start if count else start + 1, new_start if new_count else new_start + 1
    before: list[str] = []
    after: list[str] = []
    bare = False
    while len(before) < count or len(after) < new_count:
        line = reader.take()
        sign, text = line[:1] or " ", line[1:]
        if sign == "\\":
            continue  # the old side ends without a newline; the new side's marker comes after the last line
        if sign not in " +-":
            raise reader.error(f"a hunk line starts with {sign!r}")
        if sign == "-":
            removed.append(Line(old_at + len(before), text))
        if sign == "+":
            added.append(Line(new_at + len(after), text))
        if sign in " -":
            before.append(text)
        if sign in " +":
            after.append(text)
    if len(before) != count or len(after) != new_count:
        raise reader.error(f"hunk {header[:40]!r} has {len(before)} old and {len(after)} new lines")
    last_sign = reader.lines[reader.at - 1][:1]
    if (reader.peek() or "").startswith("\\"):
        reader.take()
        bare = last_sign in ("+", " ")
    return Hunk(old_at - 1, tuple(before), tuple(after), bare)


def _skip_binary(reader: _Reader) -> None:
    # Two blocks (forward and reverse) of a header, base-85 lines and an empty line.
    while (line := reader.peek()) is not None and not line.startswith("diff --git "):
        reader.take()


def _side(name: str) -> str:
    """The path of a `---` or `+++` line; "" for /dev/null. Git ends a name that has a space with a tab."""
    name = _unquote(name.removesuffix("\t"))
    return "" if name == "/dev/null" else name.partition("/")[2]


def _header_paths(names: str) -> tuple[str, str]:
    quoted = _QUOTED.findall(names)
    if len(quoted) == 2:
        return _unquote(quoted[0]).partition("/")[2], _unquote(quoted[1]).partition("/")[2]
    # Unquoted names may hold spaces; only equal ones ("a/P b/P") are ambiguous without other lines.
    half = len(names) // 2
    old, new = names[:half], names[half + 1 :]
    if old.partition("/")[2] == new.partition("/")[2]:
        return old.partition("/")[2], new.partition("/")[2]
    return "", ""


def _unquote(name: str) -> str:
    if not name.startswith('"'):
        return name
    raw, _ = codecs.escape_decode(name[1:-1].encode("utf-8", "surrogateescape"))
    return raw.decode("utf-8", "surrogateescape")


def lines_of(text: str) -> list[str]:
    """The lines of a text, cut at "\\n" only; a final newline does not make an empty last line."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def apply(file: FilePatch, base: str) -> str:
    """The file's text after the patch ("" when deleted).

    Args:
      file: one text file of a parsed patch.
      base: its text before ("" for a new file).

    Raises:
      ValueError: a context or removed line is not what the base holds there, or the file is binary.
    """
    if file.binary:
        raise ValueError(f"{file.path}: a binary patch has no text")
    lines = lines_of(base)
    result: list[str] = []
    at = 0
    for hunk in file.hunks:
        end = hunk.start + len(hunk.before)
        found = lines[hunk.start : end]
        # Readers that translate newlines drop the carriage return that the patch still shows.
        if hunk.start < at or [x.rstrip("\r") for x in found] != [x.rstrip("\r") for x in hunk.before]:
            raise ValueError(
                f"{file.path}: the patch does not apply to the base text at line {hunk.start + 1}"
            )
        result += lines[at : hunk.start]
        result += hunk.after
        at = end
    rest = lines[at:]
    result += rest
    if file.deleted or not result:
        return ""
    bare = not base.endswith("\n") if rest or not file.hunks else file.hunks[-1].ends_without_newline
    return "\n".join(result) + ("" if bare else "\n")


def apply_all(patch: bytes, base_files: Mapping[str, str]) -> Iterator[tuple[FilePatch, str, str]]:
    """(file, base text, after text) of every file of a patch; both texts are "" for a binary one.

    Raises:
      ValueError: the patch is malformed, does not apply, or changes a file that `base_files` lacks.
    """
    for file in parse(patch):
        if file.binary:
            yield file, "", ""
            continue
        if not file.new and file.old_path not in base_files:
            raise ValueError(f"{file.old_path}: the patch changes it but its base text is missing")
        base = "" if file.new else base_files[file.old_path]
        yield file, base, apply(file, base)


def count_lines(patch: bytes) -> int:
    """Added plus removed text lines."""
    return sum(len(f.added) + len(f.removed) for f in parse(patch))
