"""What the transcript of one trajectory shows about its process. Actions in, steps out; no patch judgement.

Environments write actions in their own ways, so an action's kind is the first word of its first line
that names one ("view a.py", "<edit path=…>" and '{"tool": "run_tests"}' are all read), and nothing more
is assumed of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from gagar_jax.grading.findings import Found
from gagar_jax.grading.patch import FilePatch
from gagar_jax.types import Turn

_KINDS = {
    "view": ("view", "cat", "open", "read", "show", "head", "tail", "less"),
    "search": ("search", "grep", "find", "rg", "ls", "list"),
    "edit": (
        "edit",
        "replace",
        "write",
        "create",
        "insert",
        "str_replace",
        "append",
        "delete",
        "undo",
        "apply",
    ),
    "test": ("test", "tests", "pytest", "run", "run_tests", "check"),
    "submit": ("submit", "finish", "done"),
}
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words}
_WORD = re.compile(r"[A-Za-z_]+")
_TARGET = re.compile(r"[\w./-]*[A-Za-z_][\w./-]*")
_TEST_FILE = re.compile(r"(^|/)(tests?/|test_[^/]*\.py$|conftest\.py$)|_test\.py$")


def is_test(path: str) -> bool:
    """Whether a path is a test file by the usual names."""
    return _TEST_FILE.search(path) is not None


def kind(action: str) -> str:
    """view, search, edit, test, submit, or other."""
    first = action.strip().partition("\n")[0]
    return next((_KIND_OF[w] for w in map(str.lower, _WORD.findall(first)) if w in _KIND_OF), "other")


def process_findings(
    turns: Sequence[Turn], files: Collection[FilePatch], functions: Collection[str]
) -> Iterator[tuple[Found, int]]:
    """(finding, 1-based step) of every malformed action, repeated call, needless view and lost edit.

    Args:
      turns: the transcript.
      files, functions: what the final patch changes; functions are "path::qualified.name".
    """
    touched = {path for f in files for path in (f.path, f.old_path)}
    names = [name.partition("::")[2] for name in functions]
    touched.update(names, *(name.split(".") for name in names))
    since_edit: set[str] = set()
    for step, turn in enumerate(turns, start=1):
        what = kind(turn.action)
        if turn.malformed:
            yield Found.MALFORMED, step
        elif what == "edit":
            since_edit.clear()
        elif turn.action.strip() in since_edit:
            yield Found.REPEATED_CALL, step
        else:
            since_edit.add(turn.action.strip())
            if what == "view" and _is_needless(turn.action, touched):
                yield Found.NEEDLESS_VIEW, step
    yield from ((Found.OVERWRITTEN_EDIT, step) for step in _overwritten(turns, files))


def _is_needless(action: str, touched: set[str]) -> bool:
    """Whether nothing that the action names is changed by the patch, or is a test."""
    words = [w.removeprefix("./") for w in _TARGET.findall(action.strip().partition("\n")[0])]
    targets = [w for w in words if w.lower() not in _KIND_OF]
    if not targets or not touched or any(is_test(t) or t.startswith("test") for t in targets):
        return False
    return not any(t == w or t.endswith("/" + w) or w.endswith("/" + t) for w in targets for t in touched)


def _overwritten(turns: Sequence[Turn], files: Collection[FilePatch]) -> list[int]:
    """Edits, but the last, whose action holds no line that the final patch adds.

    An edit that writes no lines below its first leaves none to look for, and is let off; so are as many
    others as the patch has hunks that shorten the file.
    """
    kept = {t for f in files for line in f.added if len(t := _plain(line.text)) >= 4}
    edits = [
        step
        for step, turn in enumerate(turns, start=1)
        if not turn.malformed and kind(turn.action) == "edit" and re.search(r"\n|\\n", turn.action.strip())
    ]
    if not kept or len(edits) < 2:
        return []
    actions = {i: _plain(turns[i - 1].action) for i in edits[:-1]}
    lost = [i for i, action in actions.items() if not any(line in action for line in kept)]
    deletions = sum(len(hunk.before) > len(hunk.after) for f in files for hunk in f.hunks)
    return lost[deletions:]


def _plain(text: str) -> str:
    return text.replace("\\", "").strip()  # an action may carry its text escaped, as in JSON


def shown_before_written(turns: Sequence[Turn], prompt: str, literals: Collection[str]) -> bool:
    """Whether the prompt or a reply showed one of the literals before any action of the agent held it.

    A literal that a tool showed first (a failing test's input) and a patch then answers is the mark of
    a special case; one that the agent brought itself is not.
    """
    for literal in literals:
        seen = literal in prompt
        for turn in turns:
            if literal in turn.action:
                break
            seen = seen or literal in turn.observation
        if seen:
            return True
    return False
