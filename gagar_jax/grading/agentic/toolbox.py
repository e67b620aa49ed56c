"""The tools of an agentic grader. Whatever a candidate wrote comes back fenced.

A tool call that cannot be carried out gets a sentence that says why; it never raises. Results are cut to
`limit` characters, and the cut is said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from gagar_jax.grading.agentic import submission
from gagar_jax.grading.agentic.workspace import BASE, Workspace
from gagar_jax.grading.fence import Fence, visible
from gagar_jax.types import CommandRunner

SUBMIT = "submit_verdict"
_MATCHES = 60
_NAME = {"type": "string", "description": "a candidate such as c03, or base"}
_INTEGER = {"type": "integer"}
_TEXT = {"type": "string"}


class Toolbox:
    """The tools over one workspace. Not thread-safe: one grading call has one.

    Args:
      workspace: what is read.
      fence: around every result.
      run: carries commands out; None leaves the tool away.
      command_s: seconds one command may take.
      total_command_s: seconds all commands may take together.
      limit: characters of one result.
    """

    def __init__(
        self,
        workspace: Workspace,
        fence: Fence,
        run: CommandRunner | None,
        *,
        command_s: float,
        total_command_s: float,
        limit: int,
    ) -> None:
        self._workspace, self._fence, self._run = workspace, fence, run
        self._command_s, self._left_s, self._limit = command_s, total_command_s, limit
        self.commands: dict[int, dict[str, tuple[str, ...]]] = {}
        """Member → command → what it printed each time: the record that evidence is checked against."""
        self._tools: dict[str, tuple[Callable[..., str], str, dict[str, Any]]] = {
            "read_file": (
                self._read_file,
                "Lines of a file, numbered, both ends included.",
                {"candidate": _NAME, "path": _TEXT, "first": _INTEGER, "last": _INTEGER},
            ),
            "search": (
                self._search,
                "Lines that hold a piece of text (no pattern), over every text file.",
                {"candidate": _NAME, "text": _TEXT},
            ),
            "list_files": (self._list_files, "Paths of a tree.", {"candidate": _NAME}),
            "patch": (self._patch, "A candidate's patch against base.", {"candidate": _NAME}),
            "diff": (self._diff, "Where two final trees differ.", {"left": _NAME, "right": _NAME}),
            "transcript": (
                self._transcript,
                "Steps of what the candidate did and saw, both ends included.",
                {"candidate": _NAME, "first": _INTEGER, "last": _INTEGER},
            ),
        }
        if run is not None:
            self._tools["run"] = (
                self._run_command,
                "A shell command in a confined copy of a candidate's tree: no network, nothing is kept.",
                {"candidate": _NAME, "command": _TEXT},
            )

    def declarations(self) -> list[dict[str, Any]]:
        """The tools as a chat endpoint takes them, the verdict's among them."""
        tools = [
            _declare(name, text, {"type": "object", "properties": arguments, "required": list(arguments)})
            for name, (_, text, arguments) in self._tools.items()
        ]
        return [
            *tools,
            _declare(SUBMIT, "Your verdict on the whole group; ends the work.", submission.schema()),
        ]

    def call(self, name: str, arguments: str) -> str:
        """Carries one call out. `arguments` is JSON as the model wrote it."""
        if name not in self._tools:
            return f"There is no tool {visible(name)!r}; there are {', '.join([*self._tools, SUBMIT])}."
        function, _, wanted = self._tools[name]
        try:
            given = json.loads(arguments or "{}")
        except ValueError as error:
            return f"The arguments are not one JSON object: {error}."
        if not isinstance(given, dict) or given.keys() != wanted.keys():
            return f"{name} takes exactly these arguments: {', '.join(wanted)}."
        for key, value in given.items():
            kind = int if wanted[key] is _INTEGER else str
            if type(value) is not kind:
                return f"{name}: {key} must be {'an integer' if kind is int else 'a string'}."
        trees = {"candidate", "left", "right"} & given.keys()
        for key in trees:
            if given[key] != BASE and given[key] not in self._workspace.members:
                names = ", ".join(self._workspace.members)
                return f"There is no candidate {visible(given[key])!r}; there are {names}."
        try:
            return function(**given)
        except ValueError as error:
            return f"{name} cannot be done: {visible(str(error))}"

    def _data(self, text: str) -> str:
        if len(text) > self._limit:
            text = f"{text[: self._limit]}\n[cut: {len(text) - self._limit} more characters]"
        return self._fence(text) if text else "(nothing)"

    # ---- the tools

    def _read_file(self, candidate: str, path: str, first: int, last: int) -> str:
        text = self._workspace.tree(candidate).get(path)
        if text is None:
            return f"{candidate} has no such file; list_files has those there are."
        lines = text.split("\n")
        start = max(first, 1)
        return self._data("\n".join(f"{n}\t{line}" for n, line in enumerate(lines[start - 1 : last], start)))

    def _search(self, candidate: str, text: str) -> str:
        # Plain text: a regular expression of a model's choosing could hold the interpreter for minutes.
        if not text.strip():
            return "search needs a piece of text."
        found = [
            f"{path}:{number}: {line}"
            for path, content in sorted(self._workspace.tree(candidate).items())
            if "\0" not in content
            for number, line in enumerate(content.split("\n"), 1)
            if text in line
        ]
        more = f"\n[{len(found) - _MATCHES} more]" if len(found) > _MATCHES else ""
        return self._data("\n".join(found[:_MATCHES]) + more) if found else "(no match)"

    def _list_files(self, candidate: str) -> str:
        note = "" if self._workspace.whole else "\n(only files that some candidate touched are here)"
        return self._data("\n".join(sorted(self._workspace.tree(candidate)))) + note

    def _patch(self, candidate: str) -> str:
        return self._data("" if candidate == BASE else self._workspace.patch(candidate))

    def _diff(self, left: str, right: str) -> str:
        return self._data(self._workspace.diff(left, right))

    def _transcript(self, candidate: str, first: int, last: int) -> str:
        return (
            "base has no transcript."
            if candidate == BASE
            else self._data(self._workspace.steps(candidate, first, last))
        )

    def _run_command(self, candidate: str, command: str) -> str:
        assert self._run is not None
        if candidate == BASE:
            return "Commands run in a candidate's tree; to try base, compare with a candidate."
        if self._left_s <= 0:
            return "The time for commands is used up."
        tree = {
            path: text.encode("utf-8", "surrogateescape")
            for path, text in self._workspace.tree(candidate).items()
        }
        started = time.monotonic()
        output = self._run.run(tree, command, timeout_s=min(self._command_s, self._left_s))
        self._left_s -= time.monotonic() - started
        ran = self.commands.setdefault(self._workspace.members[candidate], {})
        ran[command] = (*ran.get(command, ()), output)
        return self._data(output)


def _declare(name: str, text: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
