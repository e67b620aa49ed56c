"""Grading beside the rollouts: groups in as they complete, coefficients out when the train step asks.

The trainer's side is NumPy only and never raises: whatever goes wrong with a group makes it ungraded
(binary GRPO), counted by cause and logged. Judging is the grader's, arithmetic `rubric`'s.

Threads are daemons of our own: a thread pool of the standard library is joined when the interpreter
exits, and a grader that hangs would keep a finished run from ending.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from gagar_jax.config import GradingConfig
from gagar_jax.grading import ledger, rubric
from gagar_jax.grading.breaker import Breaker
from gagar_jax.grading.ledger import DONE, RUNNING, Job, eligibility
from gagar_jax.grading.verdict import VoidVerdict, validate
from gagar_jax.types import Group, GroupVerdict, Ungraded

_log = logging.getLogger(__name__)


class Grader(Protocol):
    """Anything that judges a whole group. It is called from several threads at once.

    One whose attribute `audits_external` is true is also shown groups with one passed member: nothing is
    ranked there, and of its verdict only `external` counts.
    """

    def grade(self, group: Group) -> GroupVerdict: ...


class GradingService:
    """Grades complete groups in the background and hands out what is ready by a deadline.

    With a deterministic grader and a deadline that is never reached, results do not depend on timing.

    Args:
      grader: judges one group a call.
      config: `concurrency` groups are judged at once (a call that its batch no longer waits for gives its
        place up; until then a hanging call keeps one of the places); `redeem` waits `deadline_s` seconds,
        once for a whole batch; tiers as in `rubric.coefficients`, breaker as in `Breaker`.
      mode: the run's redistribution mode; with "none" nothing is graded.
    """

    def __init__(
        self,
        grader: Grader,
        config: GradingConfig,
        *,
        mode: Literal["none", "downweight", "sum_preserving"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grader = grader
        self._deadline_s = config.deadline_s
        self._mode = mode
        self._tiers = config.tiers()
        self._breaker = Breaker(
            window=config.breaker_window,
            threshold=config.breaker_threshold,
            cooldown_s=config.breaker_cooldown_s,
            clock=clock,
        )
        self._jobs: dict[int, Job] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._workers, self._hurried = 0, False
        for _ in range(config.concurrency):
            self._start_worker()

    # ---- the rollout's side --------------------------------------------------------------------------------

    def submit(self, group: Group) -> None:
        """Takes a complete group; returns at once. Submitting one again (after a resume) grades it again."""
        cause = Ungraded.DISABLED if self._mode == "none" else eligibility(group)
        # Nothing to rank, but one answer that may have been copied from outside.
        audit = cause is Ungraded.ONE_PASSED and getattr(self._grader, "audits_external", False)
        job = Job(group, audit=audit)
        with self._changed:
            self._jobs[group.group] = job
            if cause is not None and not audit:
                self._settle(job, cause)
        if cause is None or audit:
            self._queue.put(job)

    def forget(self, groups: Iterable[int]) -> None:
        """Drops what is held of these groups; unknown ones are ignored. A call under way is abandoned."""
        with self._changed:
            for group in groups:
                job = self._jobs.pop(group, None)
                if job is not None and not job.settled:
                    self._give_up(job, "forgotten before its verdict came")

    def close(self) -> None:
        """Lets idle workers end, and closes a grader that can be. Calls under way are not waited for.

        The log gets the counts.
        """
        told = ", ".join(f"{count} {name}" for name, count in self.counts().items() if count)
        _log.info("grading: %s", told or "nothing to tell")
        with self._changed:
            for _ in range(self._workers):
                self._queue.put(None)
        if close := getattr(self._grader, "close", None):
            close()

    # ---- the workers ---------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self._workers += 1
        threading.Thread(target=self._work, name="grading", daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._changed:
                if job.settled:
                    continue  # its batch went on without it
                if not self._breaker.allow():
                    self._settle(job, Ungraded.CIRCUIT_OPEN)
                    continue
                job.stage = RUNNING
            self._grade(job)
            with self._changed:
                if job.abandoned:
                    return  # this worker's place was given to another while the call hung
        with self._changed:
            self._workers -= 1

    def _grade(self, job: Job) -> None:
        start = time.monotonic()
        cause, detail, dropped = None, "", 0
        verdict, grades = None, {}
        try:
            verdict, dropped = validate(self._grader.grade(job.group), job.group)
            entries = {
                c.member: (c.scores, c.flags) for c in verdict.candidates if c.member not in verdict.external
            }
            if job.audit:
                cause = Ungraded.ONE_PASSED
            else:
                grades = rubric.coefficients(entries, **self._tiers)
        except VoidVerdict as void:
            cause, detail = Ungraded.VOID, void.reason
            _log.warning("grading: the verdict on %s is void: %s", job, void.reason)
        except (Exception, SystemExit) as error:
            # Whatever a grader raises costs its group the grade, not the run.
            cause, detail = Ungraded.ERROR, f"{type(error).__name__}: {error}"
            _log.exception("grading: the grader failed on %s", job)
        with self._changed:
            job.grade_s = time.monotonic() - start
            job.verdict = verdict
            self._counts["dropped_claims"] += dropped
            if job.abandoned:
                self._counts["late_arrivals"] += 1
                job.detail = f"arrived after {job.grade_s:.1f} s{', ' + detail if detail else ''}"
                job.stage = DONE
                _log.warning("grading: the verdict on %s came too late to be used (%.1f s)", job, job.grade_s)
                return
            job.grades = grades
            self._breaker.result(failed=cause in (Ungraded.VOID, Ungraded.ERROR))
            self._settle(job, cause, detail)

    def _settle(self, job: Job, cause: Ungraded | None, detail: str = "") -> None:
        """Ends a job; the lock is held."""
        job.cause, job.detail = cause, detail
        job.stage = DONE
        self._counts[cause.value if cause else "graded"] += 1
        self._changed.notify_all()

    def _give_up(self, job: Job, detail: str) -> None:
        """Marks an unsettled job late and frees its worker's place; the lock is held."""
        job.abandoned = job.stage == RUNNING
        job.redeemed, job.cause, job.detail = True, Ungraded.LATE, detail
        self._counts[Ungraded.LATE.value] += 1
        _log.warning("grading: no verdict on %s: %s", job, detail)
        if job.abandoned:
            self._breaker.result(failed=True)
            self._workers -= 1
            self._start_worker()

    # ---- the train step's side -----------------------------------------------------------------------------

    def redeem(
        self, group_ticket_N: np.ndarray, member_N: np.ndarray, group_ticket_G: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the verdicts make of one batch, waiting at most `deadline_s` for all of it. Never raises.

        Asking again for the same groups gives the same answer at once. Rows and groups of id −1 are padding.

        Args:
          group_ticket_N, member_N: [N] int, each trajectory's ticket.
          group_ticket_G: [G] int, the batch's groups.

        Returns:
          (quality_N float32 in (0, 1], 1 where there is no grade; external_N int32 0/1; graded_G int32
          0/1).
        """
        quality_N = np.ones(np.shape(group_ticket_N), np.float32)
        external_N = np.zeros(np.shape(group_ticket_N), np.int32)
        graded_G = np.zeros(np.shape(group_ticket_G), np.int32)
        try:
            jobs = self._collect({int(g) for g in np.asarray(group_ticket_G) if g >= 0})
            quality, external = quality_N.copy(), external_N.copy()
            for i, (group, member) in enumerate(
                zip(np.asarray(group_ticket_N), np.asarray(member_N), strict=True)
            ):
                job = jobs.get(int(group))
                if job is not None and job.verdict is not None:
                    external[i] = int(member) in job.verdict.external
                    if int(member) in job.grades:
                        quality[i] = job.grades[int(member)].quality
            graded_ids = {group for group, job in jobs.items() if job.graded}
            graded = np.asarray([int(g) in graded_ids for g in np.asarray(group_ticket_G)], np.int32)
        except Exception:  # raising here would end the compiled step, and the run with it
            _log.exception("grading: redeeming a batch failed; it is trained ungraded")
            with self._changed:
                self._counts["redeem_failures"] += 1
            return quality_N, external_N, graded_G
        return quality, external, graded.reshape(graded_G.shape)

    def hurry(self) -> None:
        """Ends a wait for verdicts under way, and every later one: what is not there is late."""
        with self._changed:
            self._deadline_s, self._hurried = 0.0, True
            self._changed.notify_all()

    def _collect(self, groups: set[int]) -> dict[int, Job]:
        """The jobs among `groups` whose verdicts count, after waiting for those under way."""
        start = time.monotonic()
        with self._changed:
            for group in sorted(groups - self._jobs.keys()):
                _log.error("grading: group %d is to be redeemed but was never submitted", group)
                self._counts["unsubmitted"] += 1
            jobs = {g: self._jobs[g] for g in sorted(groups & self._jobs.keys())}
            fresh = [j for j in jobs.values() if not j.redeemed]
            self._changed.wait_for(
                lambda: self._hurried or all(j.settled for j in fresh), timeout=self._deadline_s
            )
            waited = time.monotonic() - start
            for job in fresh:
                job.wait_s = waited
                if not job.settled:
                    self._give_up(job, f"not there after waiting {waited:.2f} s")
                job.redeemed = True
            return {g: j for g, j in jobs.items() if j.usable}

    # ---- what the run folder and the metrics show ----------------------------------------------------------

    def record(self, group_id: int) -> dict[str, Any] | None:
        """`ledger.record` of a group; None for one that was never submitted or is forgotten."""
        with self._changed:
            job = self._jobs.get(group_id)
            snapshot = dataclasses.replace(job) if job else None
        return ledger.record(snapshot) if snapshot else None

    def counts(self) -> dict[str, int]:
        """Since the start: graded, each cause of `Ungraded`, late_arrivals, dropped_claims, and faults.

        `unkept` are records that the grader could not write down; `reused`, verdicts given again.
        """
        names = ("graded", *Ungraded, "late_arrivals", "dropped_claims", "unsubmitted", "redeem_failures")
        with self._changed:
            counts = {str(name): self._counts[str(name)] for name in names}
        return counts | {name: int(getattr(self._grader, name, 0)) for name in ("unkept", "reused")}

    def metrics(self, group_tickets: Sequence[int]) -> dict[str, float]:
        """`ledger.metrics` of one step's groups; ids that are not held (padding, say) are left out."""
        with self._changed:
            return ledger.metrics([self._jobs[int(g)] for g in group_tickets if int(g) in self._jobs])
