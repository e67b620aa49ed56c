"""Gymnasium environments that gagar_jax can train on. Importing registers their ids and nothing else."""

from __future__ import annotations

import gymnasium

gymnasium.register(
    id="gagar/CodeRepair-v0",
    entry_point="envs.coding.env:CodeRepairEnv",
    disable_env_checker=True,  # it would check every step of every trajectory; the tests run it once
    nondeterministic=False,
)
