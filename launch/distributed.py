"""Joins this process to a JAX run over several hosts, from environment variables. Nothing more.

Call `initialize()` before anything touches a device. On one host, with none of the variables set, it
does nothing, so the same program runs anywhere.

| variable | meaning |
|---|---|
| `GAGAR_COORDINATOR` | `host:port` of process 0, reachable from every process |
| `GAGAR_PROCESSES` | how many processes there are |
| `GAGAR_PROCESS` | which one this is, from 0 |
| `GAGAR_AUTODETECT` | `1`: let JAX read all three from the cluster (Cloud TPU, Slurm, Kubernetes) |
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gagar_jax.types import UserError

_NAMES = ("GAGAR_COORDINATOR", "GAGAR_PROCESSES", "GAGAR_PROCESS")


def initialize(environ: Mapping[str, str] = os.environ) -> bool:
    """Sets up `jax.distributed` if the environment asks for it.

    Args:
      environ: where the variables are looked up.

    Returns:
      Whether this process is now one of several.

    Raises:
      UserError: some of the variables are set and others are not, or a number is none.
    """
    if environ.get("GAGAR_AUTODETECT") == "1":
        import jax

        jax.distributed.initialize()
        return True
    missing = [name for name in _NAMES if name not in environ]
    if len(missing) == len(_NAMES):
        return False
    if missing:
        raise UserError(
            f"several hosts: {', '.join(missing)} not set; set all of {', '.join(_NAMES)} or none"
        )
    processes, process = (_count(environ, name) for name in _NAMES[1:])
    if not 0 <= process < processes:
        raise UserError(f"several hosts: GAGAR_PROCESS is {process}, but must be 0 … {processes - 1}")
    import jax

    jax.distributed.initialize(environ["GAGAR_COORDINATOR"], num_processes=processes, process_id=process)
    return True


def _count(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"several hosts: {name} must be a whole number, not {environ[name]!r}") from None
