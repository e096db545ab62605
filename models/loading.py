"""A model ready to be traced: its structure, and its parameters as a flat tuple of arrays.

Traversing a module's variables on every step would cost more than a small model's step itself, so
modules are split once here and only merged while a program is traced.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jpaged.models.config import ModelConfig
from jpaged.models.formats.tensor_source import TensorSource
from jpaged.models.registry import model_class
from jpaged.models.sharding import partition_spec
from jpaged.models.weights import load_weights
from jpaged.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """graph: the module's structure, hashable. params: its arrays, in the order of `treedef`; those
    of an abstract model are `jax.ShapeDtypeStruct`s."""

    config: ModelConfig
    dtype: jnp.dtype
    graph: Any
    treedef: Any
    params: tuple[Any, ...]

    def merge(self, params: tuple[Any, ...]) -> Any:
        """The module over the given arrays; called while tracing."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, params))

    def with_kv_scales(self, kv_scales: Sequence[jax.Array]) -> Self:
        """The model that stores its K/V divided by these, one array a layer."""
        module = self.merge(self.params)
        module.set_kv_scales(kv_scales)
        graph, state = nnx.split(module)
        params, treedef = jax.tree.flatten(state)
        return replace(self, graph=graph, treedef=treedef, params=tuple(params))

    @property
    def num_bytes(self) -> int:
        return sum(
            math.prod(_shape_on_device(param)) * param.dtype.itemsize for param in self.params
        )


def abstract_model(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None = None) -> Model:
    """The architecture that the config names, its parameters as shapes: it takes no memory.

    mesh: over whose devices the parameters are split, as `split_config` has made the config for
        it; without one they are on one device.
    """
    architecture = model_class(config.architecture)
    graph, state = nnx.split(nnx.eval_shape(lambda: architecture(config, dtype)))
    params, treedef = jax.tree.flatten(state)
    if mesh is not None:
        axes = {spec.path: spec.axes for spec in architecture.weight_table(config)}
        shardings = [NamedSharding(mesh, partition_spec(axes[path])) for path in _paths(state)]
        params = [
            jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)
            for param, sharding in zip(params, shardings, strict=True)
        ]
    return Model(config, dtype, graph, treedef, tuple(params))


def load_model(model: Model, source: TensorSource, *, progress: Progress) -> Model:
    """Fill an abstract model from a checkpoint."""
    paths = _paths(jax.tree.unflatten(model.treedef, model.params))
    weights = load_weights(
        dict(zip(paths, model.params, strict=True)),
        model_class(model.config.architecture).weight_table(model.config),
        source,
        progress=progress,
    )
    return replace(model, params=tuple(weights[path] for path in paths))


def _shape_on_device(param: Any) -> tuple[int, ...]:
    return param.sharding.shard_shape(param.shape) if param.sharding else param.shape


def _paths(state: Any) -> list[str]:
    """Where each parameter is in the model, in the order of its leaves."""
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
