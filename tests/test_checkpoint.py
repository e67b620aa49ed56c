"""Save, restore, go on: bit for bit, onto another mesh, past a damaged file and a full disk."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from gagar_jax.checkpoint import Checkpoints
from gagar_jax.model import sharding
from gagar_jax.train.state import TrainState, abstract_state, make_optimizer
from gagar_jax.types import UserError
from tests.train.batches import Verdicts, compiled, one_device, pack_for, settings, state_for
from tests.trajectories import make_groups

CONFIG = settings()


def abstract(mesh: jax.sharding.Mesh, config=CONFIG) -> TrainState:
    return abstract_state(config.model, make_optimizer(config.train.optimizer, config.train.updates), mesh)


def assert_equal(a: TrainState, b: TrainState) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def train(state: TrainState, first: int, steps: int) -> TrainState:
    step, desk = compiled(CONFIG, one_device())
    desk.verdicts = Verdicts()
    for n in range(first, first + steps):
        state, _, _ = step(state, pack_for(CONFIG, make_groups("pfpf", "ppf", seed=n)))
    return state


def test_ten_steps_are_five_a_restart_and_five(tmp_path: Path) -> None:
    mesh = one_device()
    whole = train(state_for(CONFIG, mesh), 0, 10)
    half = train(state_for(CONFIG, mesh), 0, 5)
    extra = {"tasks": {"next_index": 40}, "unused": [{"group": 3, "logprob": -0.1}]}
    Checkpoints(tmp_path / "checkpoints", keep=2).save(5, half, extra)
    found = Checkpoints(tmp_path / "checkpoints", keep=2).restore(abstract(mesh))
    assert found is not None
    assert (found.step, found.extra) == (5, extra)
    assert_equal(found.state, half)
    assert_equal(train(found.state, 5, 5), whole)


def test_a_checkpoint_goes_onto_another_mesh(tmp_path: Path) -> None:
    saved = state_for(CONFIG, one_device())
    Checkpoints(tmp_path, keep=1).save(1, saved, {})
    found = Checkpoints(tmp_path, keep=1).restore(abstract(sharding.make_mesh(data=4, model=2)))
    assert found is not None
    up = found.state.params["blocks"]["up"].get_value()
    assert up.sharding.spec == PartitionSpec(None, None, "model")
    assert_equal(jax.device_get(found.state), jax.device_get(saved))


def test_the_last_few_are_kept_and_an_empty_folder_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", keep=2)
    assert checkpoints.restore(abstract(one_device())) is None
    assert not (tmp_path / "new").exists()
    state = state_for(CONFIG, one_device())
    for step in (1, 2, 10):
        checkpoints.save(step, state, {})
    checkpoints.save(10, state, {})
    assert checkpoints.steps() == [2, 10]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["10", "2"]


def damage_flip(checkpoint: Path) -> None:
    """One bit in the middle of the largest file: TensorStore alone does not notice."""
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def damage_cut(checkpoint: Path) -> None:
    for path in checkpoint.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)


def damage_state_gone(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "state")


def damage_empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


@pytest.mark.parametrize("damage", [damage_flip, damage_cut, damage_state_gone, damage_empty])
def test_a_damaged_checkpoint_is_said_counted_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage
) -> None:
    state = state_for(CONFIG, one_device())
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        checkpoints.save(step, state, {"at": step})
    damage(tmp_path / "2")
    with caplog.at_level(logging.ERROR, "gagar_jax"):
        found = checkpoints.restore(abstract(one_device()))
    assert found is not None
    assert (found.step, found.extra, checkpoints.damaged) == (1, {"at": 1}, 1)
    assert "Checkpoint 2" in caplog.text
    assert "is damaged" in caplog.text
    assert_equal(found.state, state)
    checkpoints.save(2, state, {"at": "again"})
    found = checkpoints.restore(abstract(one_device()))
    assert found is not None
    assert found.extra == {"at": "again"}
    assert (tmp_path / "damaged-2").is_dir()


def test_only_damaged_checkpoints_is_an_error_and_never_a_silent_restart(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).save(3, state_for(CONFIG, one_device()), {})
    damage_cut(tmp_path / "3")
    with pytest.raises(UserError, match="All 1 checkpoints"):
        Checkpoints(tmp_path, keep=1).restore(abstract(one_device()))


def test_other_settings_are_named_and_nothing_is_moved(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).save(3, state_for(CONFIG, one_device()), {})
    wider = settings(model={"mlp_width": 64})
    with pytest.raises(UserError, match=r"other settings: .*down.*\[2, 48, 32\].*\[2, 64, 32\]"):
        Checkpoints(tmp_path, keep=1).restore(abstract(one_device(), wider))
    assert Checkpoints(tmp_path, keep=1).steps() == [3]


def test_an_interrupted_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    """A process killed in the middle of saving: what it left is no checkpoint, and the next save works."""
    state = state_for(CONFIG, one_device())
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {})
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    (tmp_path / "2.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").unlink()
    assert checkpoints.steps() == [1]
    checkpoints.save(2, state, {})
    assert checkpoints.steps() == [1, 2]


def test_saving_a_million_parameters_takes_less_than_a_second(tmp_path: Path) -> None:
    config = settings(model={"vocab_size": 1024, "width": 128, "layers": 5, "head_dim": 32, "mlp_width": 512})
    state = state_for(config, one_device())
    assert sum(x.size for x in jax.tree.leaves(state.params)) > 900_000
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    start = time.process_time()
    checkpoints.save(2, state, {})
    assert time.process_time() - start < 1


FULL_DISK = """
import sys, pathlib
from jax.sharding import PartitionSpec

from gagar_jax.checkpoint import Checkpoints
from gagar_jax.files import DiskFull
from tests.train.batches import one_device, settings, state_for
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=99)
state = state_for(settings(model={"width": 128}), one_device())
try:
    for step in range(1, 99):
        checkpoints.save(step, state, {})
except DiskFull as error:
    print("DISK FULL:", error, "|", checkpoints.steps())
"""


def can_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return (
        shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs user and mount namespaces for a small file system")
def test_a_full_disk_is_said_in_words_and_costs_no_earlier_checkpoint(
    tmp_path: Path, repository: Path
) -> None:
    script = f'mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c "$PROGRAM" {tmp_path}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=os.environ | {"PROGRAM": FULL_DISK, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "DISK FULL: No space left" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "| [1" in done.stdout
