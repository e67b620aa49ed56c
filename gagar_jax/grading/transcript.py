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
_PATH = re.compile(r"[\w./-]+\.\w+")
_TEST_FILE = re.compile(r"(^|/)(tests?/|test_[^/]*\.py$|conftest\.py$)|_test\.py$")


def is_test(path: str) -> bool:
    """Whether a path is a test file by the usual names."""
    return _TEST_FILE.search(path) is not None


def kind(action: str) -> str:
    """view, search, edit, test, submit, or other."""
    first = action.strip().partition("\n")[0]
    return next((_KIND_OF[w] for w in map(str.lower, _WORD.findall(first)) if w in _KIND_OF), "other")


def process_findings(turns: Sequence[Turn], files: Collection[FilePatch]) -> Iterator[tuple[Found, int]]:
    """(finding, 1-based step) of every malformed action, repeated call, needless view and lost edit."""
    touched = {path for f in files for path in (f.path, f.old_path)}
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
    paths = [p.removeprefix("./") for p in _PATH.findall(action.strip().partition("\n")[0])]
    if not paths or not touched or any(map(is_test, paths)):
        return False
    return not any(t == p or t.endswith("/" + p) or p.endswith("/" + t) for p in paths for t in touched)


def _overwritten(turns: Sequence[Turn], files: Collection[FilePatch]) -> list[int]:
    """Edits, but the last, whose action holds no line that the final patch adds.

    Hunks that only delete leave no line to look for; as many such edits are let off.
    """
    kept = {t for f in files for line in f.added if len(t := _plain(line.text)) >= 4}
    edits = [i for i, t in enumerate(turns, start=1) if not t.malformed and kind(t.action) == "edit"]
    if not kept or len(edits) < 2:
        return []
    lost = [i for i in edits[:-1] if not any(k in (text := _plain(turns[i - 1].action)) for k in kept)]
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
