"""The mesh of an engine's devices, and how arrays lie on it."""

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.models.sharding import DATA_AXIS, TENSOR_AXIS
from jpaged.target import Target


def device_mesh(target: Target) -> Mesh | None:
    """Return the mesh of several devices, or of one that is somewhere else. None for a single one
    that is here: arrays get there by themselves."""
    if target.num_devices == 1 and not (target.is_described and target.devices):
        return None
    devices = np.array(target.devices).reshape(target.mesh_shape)
    return Mesh(devices, (DATA_AXIS, TENSOR_AXIS))


def whole_on(mesh: Mesh | None) -> NamedSharding | None:
    """Return the sharding of an array of which every device has all; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
