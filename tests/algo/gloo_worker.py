"""One of several processes that compute advantages of one batch together. Run by test_sharding.py.

Arguments: coordinator address, number of processes, this process's index. Prints the largest difference to
what a single device computes from the whole batch.
"""

from __future__ import annotations

import functools
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gagar_jax.algo.advantage import group_advantages
from tests.algo.batches import random_batch

GROUPS = 50


def main(address: str, processes: int, index: int) -> None:
    jax.distributed.initialize(address, processes, index)
    batch = random_batch(np.random.default_rng(0), rows=1024, groups=GROUPS, binary=False)
    function = jax.jit(functools.partial(group_advantages, num_groups=GROUPS))
    alone = function(*jax.device_put(tuple(batch), jax.local_devices()[0]))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def share(whole: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(whole.shape, sharding, lambda where: whole[where])

    together = function(*(share(x, rows) for x in batch[:-1]), share(batch.graded, everywhere))
    difference = 0.0
    for a, b in zip(together, alone, strict=True):
        a = multihost_utils.process_allgather(a, tiled=True)
        difference = max(difference, float(np.abs(a.astype(np.float64) - np.asarray(b, np.float64)).max()))
    print(f"largest difference {difference:.3g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
