"""Sharding is one table: from the logical axes that weights and activations name to mesh axes.

A weight declares logical axes (`transformer.weight`); this file alone decides where they go. Two
logical axes of one array that land on the same mesh axis are an error, never a silent replication.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "model")

RULES: Mapping[str, str | None] = {
    "batch": "data",  # rows of a batch, sampler lanes and slots, trajectories
    "vocab": "model",
    "width": None,
    "heads": "model",
    "kv_heads": "model",
    "head_dim": None,
    "mlp": "model",
    "layers": None,
    "tokens": None,
}


def partition_spec(logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry these logical axes (None: replicated).

    Raises:
      KeyError: an axis is not in the table.
      ValueError: two axes land on the same mesh axis.
    """
    spec = tuple(None if axis is None else RULES[axis] for axis in logical_axes)
    used = [axis for axis in spec if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(
            f"logical axes {logical_axes} map to {spec}: one mesh axis is used twice; change RULES"
        )
    return PartitionSpec(*spec)


def make_mesh(*, data: int = -1, model: int = 1, devices: list[Any] | None = None) -> Mesh:
    """A (data, model) mesh over all devices; −1 takes the devices that are left.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    if data == -1 and model == -1:
        raise ValueError("mesh.data and mesh.model cannot both be -1")
    if data == -1:
        data = count // model
    if model == -1:
        model = count // data
    if data * model != count:
        raise ValueError(
            f"mesh.data {data} x mesh.model {model} = {data * model}, but there are {count} devices"
        )
    return Mesh(
        np.asarray(devices).reshape(data, model), MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto)
    )


def named(mesh: Mesh, *logical_axes: str | None) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(logical_axes))


def param_shardings(params: nnx.State, mesh: Mesh) -> Any:
    """A NamedSharding for every parameter, from the logical axes it was declared with.

    Raises:
      ValueError: a dimension does not divide by its mesh axis; the message has the name and both numbers.
    """

    def one(path: Any, variable: nnx.Variable) -> Any:
        axes = variable.get_metadata()["logical_axes"]
        shape = variable.get_value().shape
        sharding = named(mesh, *axes)
        for size, axis, mesh_axis in zip(shape, axes, sharding.spec, strict=False):
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: {axis} = {size} does not divide by mesh axis "
                    f"{mesh_axis!r} of size {mesh.shape[mesh_axis]}"
                )
        return variable.replace(sharding)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
