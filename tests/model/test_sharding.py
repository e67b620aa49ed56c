"""The one table: where things go, and what it refuses, with the numbers."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from gagar_jax.config import ModelConfig
from gagar_jax.model import sharding
from gagar_jax.model.transformer import abstract, create


def test_logical_axes_become_mesh_axes() -> None:
    assert sharding.partition_spec(("batch", "tokens")) == PartitionSpec("data", None)
    assert sharding.partition_spec(("vocab", "width")) == PartitionSpec("model", None)
    assert sharding.partition_spec((None, "mlp")) == PartitionSpec(None, "model")


def test_two_axes_on_one_mesh_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="used twice"):
        sharding.partition_spec(("heads", "mlp"))
    with pytest.raises(KeyError, match="hedas"):
        sharding.partition_spec(("hedas",))


@pytest.mark.parametrize(
    ("sizes", "shape"), [({}, (8, 1)), ({"model": 2}, (4, 2)), ({"data": 2, "model": -1}, (2, 4))]
)
def test_minus_one_takes_the_devices_that_are_left(sizes: dict[str, int], shape: tuple[int, int]) -> None:
    mesh = sharding.make_mesh(**sizes)
    assert (mesh.shape["data"], mesh.shape["model"]) == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3, "model": 2}, "mesh.data 3 x mesh.model 2 = 6, but there are 8 devices"),
        ({"data": -1, "model": 3}, "but there are 8 devices"),
        ({"data": -1, "model": -1}, "cannot both be -1"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(**sizes)


def test_a_dimension_that_does_not_divide_is_named() -> None:
    params = abstract(ModelConfig(mlp_width=100, heads=8, kv_heads=8, width=256))[1]
    with pytest.raises(ValueError, match=r"down.*mlp = 100 does not divide by mesh axis 'model' of size 8"):
        sharding.param_shardings(params, sharding.make_mesh(data=1, model=8))


def test_every_parameter_has_a_place_and_no_device_holds_more_than_its_share() -> None:
    config = ModelConfig(vocab_size=96, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
    mesh = sharding.make_mesh(data=4, model=2)
    params = create(config, jax.random.key(0))[1]
    placed = jax.device_put(params, sharding.param_shardings(params, mesh))
    expected = {
        "embedding": (48, 32), "final_norm": (32,), "attention_norm": (2, 32), "mlp_norm": (2, 32),
        "query": (2, 32, 16), "key": (2, 32, 8), "value": (2, 32, 8), "output": (2, 16, 32),
        "up": (2, 32, 24), "down": (2, 24, 32),
    }  # fmt: skip
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        found[names[-1]] = leaf.addressable_shards[0].data.shape
    assert found == expected


def test_shapes_are_known_without_allocating() -> None:
    huge = ModelConfig(vocab_size=150_000, width=8192, layers=64, heads=64, head_dim=128, mlp_width=32768)
    params = abstract(huge)[1]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 40e9
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
