"""What `gagar bench NAME` can measure. A benchmark is a module here with `main(arguments) -> int`.

Nothing is imported until a benchmark runs; a new one is one entry in `BENCHES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Bench(NamedTuple):
    """One benchmark: a line for `--help`, and what runs it with the arguments after its name."""

    brief: str
    run: Callable[[Sequence[str]], int]


def _advantages(arguments: Sequence[str]) -> int:
    from gagar_jax.bench.advantages import main

    return main(arguments)


BENCHES: dict[str, Bench] = {
    "advantages": Bench("group advantages for arbitrary ids, against naive versions and peers", _advantages),
}
