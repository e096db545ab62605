"""The paged KV cache: its shape and its allocation."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpaged.models.config import ModelConfig
from pallas_kernels.paged_attention import PagedAttention


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the cache: a pool of blocks for every layer, block 0 of each being the sink."""

    num_layers: int
    num_blocks: int  # usable ones, without the sink
    block_size: int
    layer_shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, with what a backend fills up."""
        return self.num_layers * math.prod(self.layer_shape[1:]) * self.dtype.itemsize

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(self.layer_shape, self.dtype),) * self.num_layers

    def allocate(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(self.layer_shape, self.dtype) for _ in range(self.num_layers))


def kv_cache_spec(
    model: ModelConfig,
    attention: PagedAttention,
    dtype: jnp.dtype,
    *,
    num_blocks: int,
    block_size: int,
) -> KVCacheSpec:
    layer_shape = attention.pool_shape(
        num_blocks=num_blocks + 1,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
    return KVCacheSpec(model.num_layers, num_blocks, block_size, layer_shape, dtype)
