"""Whole groups out of the rollout: every finished trajectory is on disk before anyone counts on it.

A collection has a journal, one JSON line a trajectory. Interrupted, the same collection goes on with the
members that are missing; since a trajectory depends only on the weights and its ticket, the result is
the same as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gagar_jax.config import RolloutConfig
from gagar_jax.data.tokenizer import Tokenizer
from gagar_jax.files import write_atomic, writing
from gagar_jax.rollout.exchange import EnvPool, Exchange, Finished, Prompt, collect
from gagar_jax.rollout.sampler import Sampler
from gagar_jax.types import Group, UserError, to_json, trajectory_from_json

log = logging.getLogger(__name__)


class Journal:
    """Finished trajectories of one collection, appended as they end.

    A file's text before edits is written with the first trajectory of its group that touched it. A torn
    last line (the machine went down while it was written) is dropped and logged; any other damage is an
    error that names the line.

    Args:
      path: the file.
      weights: of what is appended, the policy that sampled it; see `train.state.fingerprint`.
    """

    def __init__(self, path: Path, weights: str) -> None:
        self.path, self.weights = path, weights
        self._written: set[tuple[int, str]] = set()

    def read(self, tasks: Mapping[int, str]) -> list[Finished]:
        """What is there of these weights; what is of others, or of another task, leaves the file, logged.

        Args:
          tasks: group number → instance_id; groups beside these are left as they are.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:
            log.warning("%s: dropped a torn last line", self.path)
            self.path.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))
        found: list[Finished] = []
        kept: list[bytes] = []
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
                finished = Finished(trajectory_from_json(record), record["base_files"])
                ticket = finished.trajectory.ticket
                if (
                    record["weights"] == self.weights
                    and tasks.get(ticket.group, ticket.instance_id) == ticket.instance_id
                ):
                    found.append(finished)
                    kept.append(line)
            except (ValueError, KeyError) as error:
                raise UserError(
                    f"{self.path}, line {number}: not a trajectory ({error!r}); move the file away"
                ) from None
        if len(kept) < len(lines) - 1:
            others = len(lines) - 1 - len(kept)
            log.warning("%s: %d trajectories of other weights or tasks were taken out", self.path, others)
            write_atomic(self.path, b"".join(line + b"\n" for line in kept))
        self._written = {(f.trajectory.ticket.group, path) for f in found for path in f.base_files}
        return found

    def append(self, finished: Finished) -> None:
        group = finished.trajectory.ticket.group
        new = {path: text for path, text in finished.base_files.items() if (group, path) not in self._written}
        record = to_json(finished.trajectory) | {"base_files": new, "weights": self.weights}
        self._written.update((group, path) for path in new)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@dataclasses.dataclass
class Collected:
    """Groups in ticket order, and what collecting them cost."""

    groups: list[Group]
    counts: dict[str, int]
    wait_s: float  # the device idle for the environments


class Collector:
    """Samples groups of one policy. Holds what collections share: program, environments, tokenizer."""

    def __init__(
        self, sampler: Sampler, pool: EnvPool, tokenizer: Tokenizer, config: RolloutConfig, *, key: jax.Array
    ) -> None:
        self._sampler, self._pool, self._tokenizer, self._config = sampler, pool, tokenizer, config
        self._key = key

    @property
    def programs_compiled(self) -> int:
        return self._sampler.programs_compiled

    def collect(
        self,
        params: Any,
        tasks: Sequence[dict[str, Any]],
        *,
        first_group: int,
        members: int,
        version: int,
        stage: int,
        journal: Journal,
        on_group: Callable[[Group], None] = lambda group: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Collected:
        """Runs `members` episodes of each task, but those the journal has.

        Args:
          params: the policy's parameters.
          tasks: records with `instance_id`; group numbers count up from `first_group` in this order.
          first_group: number of the first group.
          members: trajectories a group.
          version: train steps behind `params`.
          stage: folded into the sampling key, so that evaluations and training draw differently.
          journal: where finished trajectories go at once.
          on_group: called as soon as a group is complete.
          progress: called with (finished, all) trajectories.

        Raises:
          KeyboardInterrupt: stopped by the user; the journal has what finished.
        """
        by_number = dict(enumerate(tasks, first_group))
        parts: dict[int, dict[int, Finished]] = {number: {} for number in by_number}
        total = len(tasks) * members
        done = reused = 0

        def add(finished: Finished) -> None:
            nonlocal done
            ticket = finished.trajectory.ticket
            parts[ticket.group][ticket.member] = finished
            done += 1
            if len(parts[ticket.group]) == members:
                on_group(_group(ticket.group, by_number[ticket.group], parts[ticket.group]))
            progress(done, total)

        for old in journal.read({number: task["instance_id"] for number, task in by_number.items()}):
            ticket = old.trajectory.ticket
            if ticket.group in by_number and ticket.member < members:
                add(old)
                reused += 1

        if reused:
            log.info("%s: %d of %d trajectories were already there", journal.path, reused, total)

        def keep(finished: Finished) -> None:
            journal.append(finished)
            add(finished)

        missing = [
            Prompt(number, task["instance_id"], tuple(m for m in range(members) if m not in parts[number]))
            for number, task in by_number.items()
        ]
        exchange = Exchange(
            self._config, self._tokenizer, self._pool, [p for p in missing if p.members],
            version=version, on_finished=keep,
        )  # fmt: skip
        if done < total:
            collect(self._sampler, params, jax.random.fold_in(self._key, stage), exchange)
        groups = [_group(number, by_number[number], parts[number]) for number in by_number]
        return Collected(groups, dict(exchange.counts), exchange.wait_s)


def _group(number: int, task: dict[str, Any], parts: dict[int, Finished]) -> Group:
    base_files: dict[str, str] = {}
    for member in sorted(parts):
        base_files |= parts[member].base_files
    return Group(number, task, [parts[member].trajectory for member in sorted(parts)], base_files)
