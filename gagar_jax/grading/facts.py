"""The computed facts of one trajectory: what code can settle before anyone judges. No scores here.

Everything comes from the patch, the base text of the touched files and the transcript, and each finding
carries the line or the step that shows it, so that it can serve as evidence.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator, Mapping

from gagar_jax.grading import patch as patches
from gagar_jax.grading.comments import added_comments
from gagar_jax.grading.findings import Found
from gagar_jax.grading.syntax import Proof, Rewrite, compare
from gagar_jax.grading.transcript import is_test, process_findings, shown_before_written
from gagar_jax.types import Evidence, Trajectory


@dataclasses.dataclass(frozen=True)
class RewrittenFunction:
    """A function with changed lines: share of its old lines in [0, 1], lines added plus removed in it."""

    function: str  # "path::qualified.name"
    share: float
    lines: int
    evidence: Evidence


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one trajectory did. Counts are of text lines; functions are "path::qualified.name"."""

    files: tuple[str, ...]
    functions: tuple[str, ...]
    lines_added: int
    lines_removed: int
    turns: int
    generated_tokens: int
    syntax_valid: bool
    changes: tuple[RewrittenFunction, ...]
    found: dict[Found, tuple[Evidence, ...]]

    @property
    def patch_lines(self) -> int:
        """Lines added plus lines removed."""
        return self.lines_added + self.lines_removed

    def count(self, found: Found) -> int:
        return len(self.found.get(found, ()))


def trajectory_facts(trajectory: Trajectory, base_files: Mapping[str, str]) -> Facts:
    """Computes the facts of one trajectory.

    Args:
      trajectory: passed, failed or invalid; its patch as `git diff --binary` wrote it.
      base_files: path → text before any edit, for every file the patch changes (new and binary ones aside).

    Raises:
      ValueError: the patch is malformed, does not apply, or changes a file `base_files` lacks; the
        message names the trajectory and the file.
    """
    try:
        parts = tuple(patches.apply_all(trajectory.patch, base_files))
    except ValueError as error:
        ticket = trajectory.ticket
        raise ValueError(
            f"{ticket.instance_id} group {ticket.group} member {ticket.member}: {error}"
        ) from None
    found: dict[Found, list[Evidence]] = {}
    functions: list[str] = []
    changes: list[RewrittenFunction] = []
    for file, base, after in parts:
        result = _file_facts(file, base, after)
        functions += result.functions
        changes += result.changes
        for kind, evidence, literals in result.found:
            if kind is Found.LITERAL_BRANCH and shown_before_written(
                trajectory.turns, trajectory.prompt, literals
            ):
                kind = Found.SPECIAL_CASE
            found.setdefault(kind, []).append(evidence)
    files = tuple(file for file, _, _ in parts)
    if len(found.get(Found.LITERAL_BRANCH, ())) > 1:  # a table of answers needs no witness
        found.setdefault(Found.SPECIAL_CASE, []).extend(found.pop(Found.LITERAL_BRANCH))
    for kind, step in process_findings(trajectory.turns, files, functions):
        action = trajectory.turns[step - 1].action.strip().partition("\n")[0]
        found.setdefault(kind, []).append(Evidence("step", f"step {step}", action))
    return Facts(
        files=tuple(f.path for f in files),
        functions=tuple(functions),
        lines_added=sum(len(f.added) for f in files),
        lines_removed=sum(len(f.removed) for f in files),
        turns=len(trajectory.turns),
        generated_tokens=trajectory.generated_tokens,
        syntax_valid=Found.SYNTAX_ERROR not in found,
        changes=tuple(changes),
        found={kind: tuple(evidence) for kind, evidence in found.items()},
    )


_Item = tuple[Found, Evidence, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class _FileFacts:
    functions: tuple[str, ...]
    changes: tuple[RewrittenFunction, ...]
    found: tuple[_Item, ...]


@functools.lru_cache(
    maxsize=512
)  # members of a group often write the same patch, and verdicts are checked later
def _file_facts(file: patches.FilePatch, base: str, after: str) -> _FileFacts:
    found: list[_Item] = [(kind, evidence, ()) for kind, evidence in _whole_file(file)]
    if file.binary or not file.path.endswith(".py"):
        return _FileFacts((), (), tuple(found))
    lines = {"base": base.split("\n"), "after": after.split("\n")}

    def quote(side: str, line: int) -> Evidence:
        path = file.old_path if side == "base" else file.path
        while line > 1 and not lines[side][line - 1].strip():
            line -= 1  # a blank line (where a syntax error may be reported) shows nothing
        return Evidence("file", f"{path}:{line}", lines[side][line - 1].strip())

    removed, added = (tuple(x.number for x in side) for side in (file.removed, file.added))
    comparison = compare(base, after, removed, added)
    for proof in comparison.proofs:
        found += (
            (kind, quote(proof.side, proof.line), proof.literals) for kind in _kinds(proof, file.path, base)
        )
    for number, is_code in added_comments(file.added, file.removed, base):
        found.append((Found.COMMENTED_CODE if is_code else Found.COMMENT, quote("after", number), ()))
    changes = tuple(_change(file.path, r, quote("base", r.line)) for r in comparison.rewrites)
    return _FileFacts(tuple(f"{file.path}::{n}" for n in comparison.functions), changes, tuple(found))


def _change(path: str, rewrite: Rewrite, evidence: Evidence) -> RewrittenFunction:
    return RewrittenFunction(f"{path}::{rewrite.function}", rewrite.share, rewrite.lines, evidence)


def _whole_file(file: patches.FilePatch) -> Iterator[tuple[Found, Evidence]]:
    first = Evidence("file", file.path, "")
    for path, side in ((file.path, file.added), (file.old_path, file.removed)):
        if line := next((x for x in side if x.text.strip()), None):
            first = Evidence("patch", f"{path}:{line.number}", line.text.strip())
            break
    if file.new:
        yield Found.NEW_FILE, first
    elif is_test(file.old_path):
        yield Found.TEST_EDITED, first
    if file.binary:
        yield Found.BINARY, first


def _kinds(proof: Proof, path: str, base: str) -> Iterator[Found]:
    yield proof.found
    if proof.found is Found.IMPORT and not all(_is_known(m, path, base) for m in proof.literals):
        yield Found.DEPENDENCY


def _is_known(module: str, path: str, base: str) -> bool:
    """Relative, of the standard library, of the package itself, or imported by the file before."""
    return (
        not module
        or module in sys.stdlib_module_names
        or module in path.split("/")
        or re.search(rf"^\s*(import|from)\s+{re.escape(module)}\b", base, re.MULTILINE) is not None
    )
