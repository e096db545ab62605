"""A model ready to be traced: its structure, and its parameters as a flat tuple of arrays.

Traversing a module's variables on every step would cost more than a small model's step itself, so
modules are split once here and only merged while a program is traced.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.config import ModelConfig
from jpaged.models.formats.tensor_source import TensorSource
from jpaged.models.registry import model_class
from jpaged.models.weights import load_weights
from jpaged.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """graph: the module's structure, hashable. params: its arrays, in the order of `treedef`."""

    config: ModelConfig
    dtype: jnp.dtype
    graph: Any
    treedef: Any
    params: tuple[jax.Array, ...]

    def merge(self, params: tuple[jax.Array, ...]) -> Any:
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
        return sum(param.nbytes for param in self.params)


def load_model(
    config: ModelConfig, source: TensorSource, dtype: jnp.dtype, progress: Progress
) -> Model:
    """Build the architecture that the config names and fill it from the checkpoint."""
    architecture = model_class(config.architecture)
    # Shapes only: no memory is spent before the weights arrive.
    graph, state = nnx.split(nnx.eval_shape(lambda: architecture(config, dtype)))
    keyed, treedef = jax.tree.flatten(state)
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    weights = load_weights(
        dict(zip(paths, keyed, strict=True)),
        architecture.weight_table(config),
        source,
        progress=progress,
    )
    return Model(config, dtype, graph, treedef, tuple(weights[path] for path in paths))
