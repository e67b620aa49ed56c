"""Groups whose right order is known: one clean patch, the same with one flaw each, and a failed contrast.

The flawed members are marked passed. Their outcome is asserted, not measured: no test was run on them.
All members get a transcript of the same make, so that nothing but the patch tells them apart.
"""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections.abc import Mapping, Sequence

from gagar_jax.grading import patch as patches
from gagar_jax.grading.audit import flaws
from gagar_jax.grading.audit.flaws import CLEAN, FLAWS, Site
from gagar_jax.grading.facts import trajectory_facts
from gagar_jax.types import Group, Outcome, Status, StopReason, Ticket, Trajectory, Turn


@dataclasses.dataclass(frozen=True)
class Planted:
    """A planted group.

    site: of the clean change; texts: file path → final text, of every passed member; flaw: of every passed
    member, `CLEAN` among them.
    """

    group: Group
    site: Site
    texts: Mapping[int, Mapping[str, str]]
    flaw: Mapping[int, str]

    @property
    def severity(self) -> dict[int, int]:
        """0 for the clean member, more for worse ones."""
        return {m: 0 if name == CLEAN else FLAWS[name][1] for m, name in self.flaw.items()}


def plant(group: Group, *, seed: int) -> Planted | None:
    """A planted group made from a stored one; None where no passed patch can serve as the clean one.

    The clean patch is the smallest passed one, of those in which the computed facts find nothing; it must
    change one function of one existing Python file. Members are put in an order drawn from `seed`.
    """
    found = _clean(group)
    if found is None:
        return None
    spoilt = {name: text for name, (flaw, _) in FLAWS.items() if (text := flaw(found)) is not None}
    versions = [
        (CLEAN, found.after),
        *((n, t) for n, t in spoilt.items() if t not in (found.base, found.after)),
    ]
    order: list[tuple[str, str] | None] = [*versions, None]
    random.Random(f"{seed} {group.group}").shuffle(order)
    texts = {m: {found.path: entry[1]} for m, entry in enumerate(order) if entry}
    trajectories = [
        member(
            group, found, number, texts.get(number, {found.path: _failing(group, found)}), passed=bool(entry)
        )
        for number, entry in enumerate(order)
    ]
    return Planted(
        dataclasses.replace(group, trajectories=trajectories, base_files={found.path: found.base}),
        found,
        texts,
        {m: entry[0] for m, entry in enumerate(order) if entry},
    )


def _clean(group: Group) -> Site | None:
    candidates: list[tuple[int, int, Site]] = []
    for trajectory in group.trajectories:
        if not trajectory.passed:
            continue
        try:
            facts = trajectory_facts(trajectory, group.base_files)
            parts = list(patches.apply_all(trajectory.patch, group.base_files))
        except ValueError:
            continue  # its base text is missing: another member may serve
        if facts.found or len(parts) != 1 or parts[0][0].new or parts[0][0].binary:
            continue
        file, base, after = parts[0]
        if file.path == file.old_path and (found := flaws.site(file.path, base, after)):
            candidates.append((facts.patch_lines, trajectory.ticket.member, found))
    return min(candidates, key=lambda c: c[:2])[2] if candidates else None


def _failing(group: Group, found: Site) -> str:
    """The final text of a member that failed; the untouched base where none changed that file alone."""
    for trajectory in group.trajectories:
        if trajectory.valid and not trajectory.passed:
            try:
                parts = list(patches.apply_all(trajectory.patch, group.base_files))
            except ValueError:
                continue
            if [f.path for f, _, _ in parts] == [found.path] and not parts[0][0].binary:
                return parts[0][2]
    return found.base


def member(
    group: Group,
    found: Site,
    number: int,
    texts: Mapping[str, str],
    *,
    passed: bool = True,
    edit: str = "",
    reply: str = "",
) -> Trajectory:
    """A trajectory that ends in these texts, with the transcript that every planted member has.

    Args:
      group: the stored group whose prompt and instance it takes.
      found: the site of the clean change.
      number: its member number.
      texts: final text of each file it touches; one that `found` does not know is new.
      passed: the asserted outcome.
      edit, reply: text to add to the edit's action and to what came back.
    """
    patch = b"".join(
        git_diff(path, found.base if path == found.path else None, text) for path, text in texts.items()
    )
    added = "\n".join(line.text for file in patches.parse(patch) for line in file.added)
    name = found.function.name
    turns = [
        Turn(f"view {found.path} {name}", _shown(found)),
        Turn("test", f"1 failed: assert {name}({flaws.LITERAL}) == {flaws.LITERAL + 1}"),
        Turn(
            f"edit {found.path} {name}\n{added}" + (f"\n{edit}" if edit else ""),
            "ok" + (f"\n{reply}" if reply else ""),
        ),
        Turn("submit", ""),
    ]
    written = sum(len(turn.action) for turn in turns) // 4  # tokens, about
    outcome = Outcome(
        Status.PASSED if passed else Status.FAILED, StopReason.SUBMITTED, "" if passed else "a test fails"
    )
    first = group.trajectories[0]
    return Trajectory(
        Ticket(group.group, number, first.ticket.instance_id),
        version=first.version,
        tokens=[0] * written,
        loss_mask=[1] * written,
        logprobs=[0.0] * written,
        prompt=first.prompt,
        turns=turns,
        outcome=outcome,
        patch=patch,
    )


def permuted(group: Group, order: Sequence[int]) -> Group:
    """The group with its trajectories in another order and numbered by it.

    Args:
      order: `order[i]` is the place, in the old group, of what is now at place and number i.
    """
    old = group.trajectories
    moved = [
        dataclasses.replace(old[i], ticket=dataclasses.replace(old[i].ticket, member=number))
        for number, i in enumerate(order)
    ]
    return dataclasses.replace(group, trajectories=moved)


def _shown(found: Site) -> str:
    """What a view of the function gave, before any edit."""
    there = flaws.same_function(found, found.base) or found
    return "\n".join(there.lines[there.function.lineno - 1 : there.function.end_lineno])


def git_diff(path: str, base: str | None, after: str) -> bytes:
    """What `git diff` writes of one text file (without its index line); base None is a new file."""
    if base == after:
        return b""
    old, new = (_quoted(f"{side}/{path}") for side in "ab")
    tab = "\t" if " " in path and not old.startswith('"') else ""
    before = "/dev/null" if base is None else old + tab
    head = [f"diff --git {old} {new}", *(["new file mode 100644"] if base is None else [])]
    lines = [f"--- {before}", f"+++ {new}{tab}"]
    left, right = _marked(base or ""), _marked(after)
    body = list(difflib.unified_diff(left, right, lineterm=""))[2:]
    hunks = "\n".join(line.replace("\0", "\n\\ No newline at end of file") for line in body)
    return "\n".join([*head, *lines, hunks, ""]).encode("utf-8", "surrogateescape")


def _marked(text: str) -> list[str]:
    """The lines of a text, a last one without newline marked by NUL (git writes a note under it)."""
    lines = patches.lines_of(text)
    if text and not text.endswith("\n"):
        lines[-1] += "\0"
    return lines


def _quoted(name: str) -> str:
    raw = name.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return name
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in raw
    )
    return f'"{escaped}"'
