"""Demonstrations as ids → batches of the supervised warm start: a few static shapes, any step by its index.

How a conversation becomes ids is the episode's business (rollout/episode.py); the loss is the train step's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gagar_jax.data.packing import Rows
from gagar_jax.data.tokenizer import PAD

logger = logging.getLogger(__name__)


class Example(NamedTuple):
    """One demonstration: its ids, and 1 for each id to imitate (never the first)."""

    tokens: list[int]
    loss_mask: list[int]


class _Bucket(NamedTuple):
    length: int  # T
    rows: int  # B
    members: np.ndarray  # indices of the examples


def bucket_lengths(lengths: Sequence[int], *, buckets: int, multiple: int = 16) -> list[int]:
    """At most `buckets` row lengths that cover all lengths with the least padding.

    Exact, by dynamic programming over the lengths rounded up to `multiple`.

    >>> bucket_lengths([10, 11, 12, 90, 95], buckets=2)
    [16, 96]
    """
    rounded, counts = np.unique(-(-np.asarray(lengths) // multiple) * multiple, return_counts=True)
    size = len(rounded)
    before = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: least tokens that hold the first j distinct lengths in the buckets so far.
    cost, cuts = np.where(np.arange(size + 1) == 0, 0.0, np.inf), []
    for _ in range(min(buckets, size)):
        total = [cost[:j] + (before[j] - before[:j]) * rounded[j - 1] for j in range(1, size + 1)]
        cuts.append([0, *(int(np.argmin(t)) for t in total)])
        cost = np.array([0.0, *(t.min() for t in total)])
    chosen, j = [], size
    for cut in reversed(cuts):
        if j:
            chosen.append(int(rounded[j - 1]))
            j = cut[j]
    return sorted(chosen)


class SupervisedBatches:
    """An endless, seeded sequence of batches; `batch(step)` depends on nothing but its arguments.

    An epoch visits every example once, in batches of one row length, shuffled; the last batch of each
    length is filled up from the beginning of that length's order. One example a row: rows of one length
    need less padding than this saves in attention.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        tokens_per_batch: int,
        seed: int,
        max_length: int,
        buckets: int = 4,
        row_multiple: int = 1,
    ) -> None:
        """Sorts examples into buckets.

        Args:
          examples: longer ones than `max_length` are left out, counted in `too_long` and logged.
          tokens_per_batch: B · T of every batch is at most this, unless one row alone is longer.
          seed: of the order.
          max_length: tokens.
          buckets: how many shapes, at most.
          row_multiple: B is a multiple of this (the mesh's data axis).

        Raises:
          ValueError: no example is left.
        """
        kept = [e for e in examples if len(e.tokens) <= max_length]
        self.too_long = len(examples) - len(kept)
        if self.too_long:
            logger.warning(
                "%d demonstrations of %d are longer than %d tokens", self.too_long, len(examples), max_length
            )
        if not kept:
            raise ValueError(f"no demonstration of {len(examples)} fits {max_length} tokens")
        self._examples, self._seed = kept, seed
        lengths = np.array([len(e.tokens) for e in kept])
        tops = bucket_lengths(lengths.tolist(), buckets=buckets)
        which = np.searchsorted(tops, lengths)
        self._buckets = []
        for i, top in enumerate(tops):
            rows = max(1, tokens_per_batch // top // row_multiple) * row_multiple
            self._buckets.append(_Bucket(top, rows, np.flatnonzero(which == i)))
        self._epoch_order: tuple[int, list[tuple[_Bucket, np.ndarray]]] | None = None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(B, T) of every kind of batch."""
        return [(b.rows, b.length) for b in self._buckets]

    @property
    def steps_per_epoch(self) -> int:
        return sum(-(-len(b.members) // b.rows) for b in self._buckets)

    def batch(self, step: int) -> Rows:
        """The batch of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, self._order(epoch))
        bucket, members = self._epoch_order[1][place]
        rows = Rows(*(np.zeros((bucket.rows, bucket.length), np.int32) for _ in Rows._fields))
        rows.tokens_BT[:] = PAD
        for b, member in enumerate(members):
            tokens, loss_mask = self._examples[member]
            rows.tokens_BT[b, : len(tokens)] = tokens
            rows.position_BT[b, : len(tokens)] = np.arange(len(tokens))
            rows.segment_BT[b, : len(tokens)] = 1
            rows.loss_mask_BT[b, : len(tokens)] = loss_mask
        return rows

    def _order(self, epoch: int) -> list[tuple[_Bucket, np.ndarray]]:
        rng = np.random.default_rng((self._seed, epoch))
        batches = []
        for bucket in self._buckets:
            order = rng.permutation(bucket.members)
            count = -(-len(order) // bucket.rows)
            filled = np.take(order, np.arange(count * bucket.rows), mode="wrap")
            batches += [(bucket, part) for part in filled.reshape(count, bucket.rows)]
        return [batches[i] for i in rng.permutation(len(batches))]
