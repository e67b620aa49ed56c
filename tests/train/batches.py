"""A tiny policy, its settings and one packed batch, shared by the tests of the train step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gagar_jax.config import Config, parse
from gagar_jax.data.packing import TrainBatch, pack
from gagar_jax.model import sharding, transformer
from gagar_jax.train.state import TrainState, init_state, make_optimizer
from gagar_jax.train.step import Credit, Metrics, make_train_step
from gagar_jax.types import Group

MODEL = {
    "vocab_size": 96, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_width": 48,
}  # fmt: skip
TRAIN = {"row_length": 64, "row_bucket": 8, "microbatch_rows": 8, "vocab_chunk_tokens": 64, "steps": 20}


def settings(**train: Any) -> Config:
    """`train` overrides keys of that section. Nothing is clipped, so Adam's first moment is the gradient."""
    optimizer = {"grad_clip": 1e9, "warmup_steps": 0, "lr": 1e-3} | train.pop("optimizer", {})
    return parse(
        {
            "model": MODEL | train.pop("model", {}),
            "rollout": {"temperature": 0.8},
            "train": TRAIN | train | {"optimizer": optimizer},
            "sft": {"steps": 20, "optimizer": {"grad_clip": 1e9, "warmup_steps": 0, "lr": 3e-3}},
        }
    )


def one_device() -> Mesh:
    return sharding.make_mesh(devices=jax.devices()[:1])


@functools.cache
def _initial(config: Config, mesh: Mesh, seed: int) -> TrainState:
    optimizer = make_optimizer(config.train.optimizer, config.train.updates)
    return init_state(config.model, optimizer, jax.random.key(seed), mesh)


def state_for(config: Config, mesh: Mesh, seed: int = 0) -> TrainState:
    """A fresh state, equal for equal arguments, and the caller's to donate."""
    return jax.tree.map(jnp.copy, _initial(config, mesh, seed))


class Verdicts:
    """A redeem function: every group graded, f by member, nothing external. Remembers what it was asked."""

    def __init__(self, quality: tuple[float, ...] = (1.0, 0.85, 0.4, 0.2), *, graded: bool = True) -> None:
        self.quality, self.graded = np.float32(quality), graded
        self.external: set[tuple[int, int]] = set()
        self.asked: list[tuple[np.ndarray, ...]] = []

    def __call__(
        self, ticket_N: np.ndarray, member_N: np.ndarray, ticket_G: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.asked.append((ticket_N.copy(), member_N.copy(), ticket_G.copy()))
        quality_N = self.quality[member_N % len(self.quality)]
        external_N = [
            (t, m) in self.external for t, m in zip(ticket_N.tolist(), member_N.tolist(), strict=True)
        ]
        graded_G = (ticket_G >= 0) & self.graded
        return quality_N, np.asarray(external_N, np.int32), graded_G.astype(np.int32)


def pack_for(
    config: Config, groups: list[Group], *, num_trajectories: int = 24, num_groups: int = 4
) -> TrainBatch:
    return pack(
        groups,
        num_trajectories=num_trajectories,
        num_groups=num_groups,
        row_length=config.train.row_length,
        row_bucket=config.train.row_bucket,
    )


class Desk:
    """Where the compiled step asks for verdicts; tests put theirs here, so that a program serves many."""

    verdicts: Verdicts

    def redeem(self, *tickets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.verdicts(*tickets)


@functools.cache
def compiled(config: Config, mesh: Mesh) -> tuple[Any, Desk]:
    """The step of these settings, compiled once in a test run, and its desk."""
    desk = Desk()
    return make_train_step(config, transformer.abstract(config.model)[0], mesh, desk.redeem), desk


def run(
    config: Config,
    batch: TrainBatch,
    verdicts: Verdicts,
    mesh: Mesh | None = None,
    state: TrainState | None = None,
) -> tuple[TrainState, dict[str, float], Credit]:
    """One step from a fresh (or the given) state, everything brought back to the host."""
    mesh = mesh or one_device()
    step, desk = compiled(config, mesh)
    desk.verdicts = verdicts
    state, metrics, credit = step(state or state_for(config, mesh), batch)
    return jax.device_get(state), floats(metrics), jax.device_get(credit)


def floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def gradient(state: TrainState) -> dict[str, np.ndarray]:
    """The gradient of the first step, by parameter: Adam's first moment is (1 − b1) of it."""
    return by_name(jax.tree.map(lambda m: np.asarray(m) / np.float32(0.1), state.opt_state[1].mu))


def by_name(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], *, tolerance: float) -> None:
    """Largest difference relative to the largest entry of each array."""
    assert a.keys() == b.keys()
    for name in a:
        scale = np.abs(b[name]).max()
        assert scale > 0, name
        assert np.abs(a[name] - b[name]).max() <= tolerance * scale, name
