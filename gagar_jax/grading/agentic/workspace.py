"""What a grader may read of one group: trees, patches, transcripts and facts, under anonymous names.

Held in memory and never changed; only a command that the grader runs touches a disk, in a copy of one
candidate's tree that is confined and removed (`types.CommandRunner`).
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence

from gagar_jax.grading import patch as patches
from gagar_jax.grading.facts import trajectory_facts
from gagar_jax.types import Group, Trajectory

_log = logging.getLogger(__name__)

BASE = "base"


class Workspace:
    """One group as a grader sees it.

    Args:
      group: complete.
      order: every member once; the first is presented as c01.
      repository: path → bytes of the whole base tree; without it only touched files can be read.
    """

    def __init__(
        self, group: Group, order: Sequence[int], repository: Mapping[str, bytes] | None = None
    ) -> None:
        members = {t.ticket.member: t for t in group.trajectories}
        if sorted(order) != sorted(members):
            raise ValueError(f"order {list(order)} does not name each of the members {sorted(members)} once")
        self.group = group
        self.whole = repository is not None
        self.members = {f"c{place:02d}": member for place, member in enumerate(order, 1)}
        self.trajectories = {name: members[member] for name, member in self.members.items()}
        base = {path: data.decode("utf-8", "surrogateescape") for path, data in (repository or {}).items()}
        self._trees = {BASE: base | group.base_files}

    @property
    def passed(self) -> list[str]:
        """The candidates to be scored, in the order presented."""
        return [name for name, trajectory in self.trajectories.items() if trajectory.passed]

    def tree(self, name: str) -> Mapping[str, str]:
        """Path → text (surrogate escapes) of `base` or of a candidate's final state.

        Raises:
          KeyError: no such name.
          ValueError: the candidate's patch does not apply; only failed or invalid ones may have such a patch.
        """
        if name not in self._trees:
            trajectory = self.trajectories[name]
            tree = dict(self._trees[BASE])
            for file, _, after in patches.apply_all(trajectory.patch, self.group.base_files):
                tree.pop(file.old_path, None)
                if not file.deleted:
                    tree[file.path] = after
            self._trees[name] = tree
        return self._trees[name]

    def patch(self, name: str) -> str:
        return self.trajectories[name].patch.decode("utf-8", "surrogateescape")

    def diff(self, left: str, right: str) -> str:
        """Unified diff of two final states, file by file in order of path."""
        old, new = self.tree(left), self.tree(right)
        parts: list[str] = []
        for path in sorted(old.keys() | new.keys()):
            before, after = old.get(path, ""), new.get(path, "")
            if before != after:
                parts += difflib.unified_diff(
                    before.splitlines(), after.splitlines(), f"{left}/{path}", f"{right}/{path}", lineterm=""
                )
        return "\n".join(parts)

    def steps(self, name: str, first: int, last: int) -> str:
        """Steps of a transcript, counted from 1, both ends included."""
        turns = self.trajectories[name].turns
        return "\n".join(
            f"step {number}\naction: {turn.action}\nobservation: {turn.observation}"
            for number, turn in enumerate(turns[max(first, 1) - 1 : last], max(first, 1))
        )

    def summary(self, name: str) -> str:
        """Outcome, counts and computed findings of a candidate; text the candidate wrote is not in it."""
        trajectory = self.trajectories[name]
        lines = [
            f"{name}: {_outcome(trajectory)}",
            f"  steps {len(trajectory.turns)}, tokens written {trajectory.generated_tokens}",
        ]
        try:
            facts = trajectory_facts(trajectory, self.group.base_files)
        except Exception:  # as in `ledger`: it is one member's
            _log.warning("grading: no facts of %s", trajectory.ticket, exc_info=True)
            return "\n".join([*lines, "  its patch cannot be read"])
        lines.append(
            f"  patch: {facts.lines_added} lines added, {facts.lines_removed} removed, in {len(facts.files)} "
            f"files and {len(facts.functions)} functions"
        )
        lines += [
            f"  finding {kind.value}: {len(shown)}, at {', '.join(e.where for e in shown[:4])}"
            for kind, shown in facts.found.items()
        ]
        return "\n".join(lines)


def _outcome(trajectory: Trajectory) -> str:
    if trajectory.passed:
        return "PASSED every test, to be scored"
    return "failed, for contrast only" if trajectory.valid else "invalid, for contrast only"
