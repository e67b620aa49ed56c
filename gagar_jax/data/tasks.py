"""The order of prompts: an endless, seeded shuffle of task records (Grain), resumable at any point.

What a record holds is the environment's business; what is done with it is the collector's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain

from gagar_jax.types import UserError


def task_iterator(records: Sequence[dict[str, Any]], seed: int) -> grain.DatasetIterator:
    """Records one by one, for ever: every epoch visits each once, in an order of its own.

    The order depends on the records' order and the seed, and on nothing else. `get_state()` is JSON-ready;
    `set_state` on an iterator made from the same arguments goes on exactly there. No threads: a record is
    read when it is asked for, so no state is ahead of what was handed out.

    Args:
      records: tasks, at least one.
      seed: in [0, 2^32).

    Raises:
      UserError: there is no record.
    """
    if not records:
        raise UserError("There is no training task: `gagar tasks build` admitted none for this split.")
    dataset = grain.MapDataset.source(list(records)).seed(seed).shuffle().repeat()
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
