"""Demonstrations as ids → batches of the supervised warm start: one static shape, any step by its index.

How a conversation becomes ids is the episode's business (rollout/episode.py); the loss is the train step's.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gagar_jax.data.packing import Bundle, Piece, Rows, pack_pieces, place
from gagar_jax.data.tokenizer import PAD

logger = logging.getLogger(__name__)


class Example(NamedTuple):
    """One demonstration: its ids, and 1 for each id to imitate (never the first)."""

    tokens: list[int]
    loss_mask: list[int]


class SupervisedBatches:
    """An endless, seeded sequence of batches; `batch(step)` depends on nothing but its arguments.

    An epoch visits every demonstration once. Those of one task are packed beside one copy of its prompt, so
    a token of prompt is computed once for all that share it. Rows are shuffled, every epoch anew; the last
    batch is filled up with the epoch's first rows.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        tokens_per_batch: int,
        prompt_weight: float,
        seed: int,
        row_length: int,
        row_multiple: int = 1,
    ) -> None:
        """Sizes the batches; rows are packed when their epoch begins.

        Args:
          examples: longer ones than a row are left out, counted in `too_long` and logged.
          tokens_per_batch: B · T of every batch is at most this, unless one row alone is longer.
          prompt_weight: weight of a prompt's token in the loss, where an action's is 1. Reading many faulty
            versions of a function teaches what it should say; a prompt that several share counts once.
          seed: of the order.
          row_length: T, tokens.
          row_multiple: B is a multiple of this (the mesh's data axis).

        Raises:
          ValueError: no example is left.
        """
        kept = [e for e in examples if len(e.tokens) <= row_length]
        self.too_long = len(examples) - len(kept)
        if self.too_long:
            logger.warning(
                "%d demonstrations of %d exceed %d tokens", self.too_long, len(examples), row_length
            )
        if not kept:
            raise ValueError(f"no demonstration of {len(examples)} fits {row_length} tokens")
        self._pieces = [Piece(n, *example) for n, example in enumerate(kept)]
        self._seed, self._row_length, self._prompt_weight = seed, row_length, prompt_weight
        self._rows = max(1, tokens_per_batch // row_length // row_multiple) * row_multiple
        self._epochs: list[list[list[Bundle]]] = []  # rows of the epochs reached so far, in order
        self._first: list[int] = [0]  # step at which each epoch begins

    def batch(self, step: int) -> Rows:
        """The batch of a step, counted from 0."""
        while self._first[-1] <= step:
            self._epochs.append(self._order(len(self._epochs)))
            self._first.append(self._first[-1] - (-len(self._epochs[-1]) // self._rows))
        epoch = bisect.bisect_right(self._first, step) - 1
        start = (step - self._first[epoch]) * self._rows
        chosen = [self._epochs[epoch][i % len(self._epochs[epoch])] for i in range(start, start + self._rows)]
        rows = Rows(*(np.zeros((self._rows, self._row_length), np.int32) for _ in Rows._fields))
        rows.tokens_BT[:] = PAD
        for b, bundles in enumerate(chosen):
            place(rows, b, bundles)
        prompt_BT = (
            (rows.segment_BT > 0) & (rows.prefix_BT == 0) & (rows.position_BT > 0) & (rows.loss_mask_BT == 0)
        )
        weight_BT = np.where(prompt_BT, self._prompt_weight, rows.loss_mask_BT)
        return rows._replace(loss_mask_BT=weight_BT.astype(np.float32))

    def _order(self, epoch: int) -> list[list[Bundle]]:
        rng = np.random.default_rng((self._seed, epoch))
        rows = pack_pieces([self._pieces[i] for i in rng.permutation(len(self._pieces))], self._row_length)
        return [rows[i] for i in rng.permutation(len(rows))]
