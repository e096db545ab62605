"""The paged KV cache: its shape and its allocation."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jpaged.models.config import ModelConfig
from pallas_kernels.paged_attention import PagedAttention, ShardedPagedAttention


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the cache: a pool of blocks for every layer, block 0 of each being the sink.

    sharding: of a layer's pool over several devices; None on a single one.
    """

    num_layers: int
    num_blocks: int  # usable ones, without the sink
    block_size: int
    layer_shape: tuple[int, ...]
    dtype: jnp.dtype
    sharding: NamedSharding | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers on one device, with what a backend fills up."""
        shape = self.layer_shape
        if self.sharding is not None:
            shape = self.sharding.shard_shape(shape)
        return self.num_layers * math.prod(shape[1:]) * self.dtype.itemsize

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one block over all layers and devices, as host memory takes it."""
        return self.num_layers * math.prod(self.layer_shape[1:]) * self.dtype.itemsize

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        pool = jax.ShapeDtypeStruct(self.layer_shape, self.dtype, sharding=self.sharding)
        return (pool,) * self.num_layers

    def allocate(self) -> tuple[jax.Array, ...]:
        return tuple(
            jnp.zeros(self.layer_shape, self.dtype, device=self.sharding)
            for _ in range(self.num_layers)
        )


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
    is_split = isinstance(attention, ShardedPagedAttention)
    sharding = attention.pool_sharding if is_split else None
    return KVCacheSpec(model.num_layers, num_blocks, block_size, layer_shape, dtype, sharding)
