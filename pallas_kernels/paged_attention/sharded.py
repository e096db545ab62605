"""Paged attention whose KV heads are split over the devices of a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import AttentionMetadata, PagedAttention

# Options of `attend` that have a value for each head.
BY_HEAD = frozenset({"sinks", "kv_scales"})


@dataclass(frozen=True)
class ShardedPagedAttention:
    """Runs a backend on each device along an axis of a mesh, for the device's heads alone.

    A device has as many KV heads as every other one, in order, and the query heads that belong to
    them. Nothing is exchanged. A layer's pool is one array that is split along its heads, so each
    device holds its part of every block, and one block table serves all devices.

    shard: the backend of one device, made for its number of heads.
    """

    shard: PagedAttention
    mesh: Mesh
    axis: str

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def num_shards(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def heads_axis(self) -> int:
        return self.shard.heads_axis

    @property
    def pool_sharding(self) -> NamedSharding:
        """How a layer's pool is split."""
        return NamedSharding(self.mesh, P(*[None] * self.heads_axis, self.axis))

    def default_block_size(self, *, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
        return self.shard.default_block_size(
            num_kv_heads=num_kv_heads // self.num_shards, head_dim=head_dim, dtype=dtype
        )

    def pool_shape(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        shape = self.shard.pool_shape(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads // self.num_shards,
            head_dim=head_dim,
        )
        sizes = list(shape)
        sizes[self.heads_axis] *= self.num_shards
        return tuple(sizes)

    def largest_pool(self, *, num_blocks: int, block_shape: tuple[int, ...], itemsize: int) -> int:
        sizes = list(block_shape)
        sizes[self.heads_axis - 1] //= self.num_shards
        return self.shard.largest_pool(
            num_blocks=num_blocks, block_shape=tuple(sizes), itemsize=itemsize
        )

    def supports(self, **options: Any) -> str | None:
        return self.shard.supports(**options)

    def plan(self, metadata: AttentionMetadata, **options: Any) -> Any:
        return self.shard.plan(metadata, **options)

    def write(
        self,
        pool: Num[Array, "N ..."],
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        slots: Int[Array, "T"],
        *,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Num[Array, "N ..."]:
        return self._run(
            self.shard.write,
            (pool, key, value, slots),
            (self._pool_spec, self._by_head, self._by_head, P()),
            self._pool_spec,
            {"kv_scales": kv_scales},
        )

    def copy_blocks(
        self, pool: Num[Array, "N ..."], sources: Int[Array, "P"], targets: Int[Array, "P"]
    ) -> Num[Array, "N ..."]:
        arguments = (pool, sources, targets)
        specs = (self._pool_spec, P(), P())
        return self._run(self.shard.copy_blocks, arguments, specs, self._pool_spec)

    def gather_blocks(
        self, pool: Num[Array, "N ..."], blocks: Int[Array, "P"]
    ) -> Num[Array, "P ..."]:
        specs = (self._pool_spec, P())
        return self._run(self.shard.gather_blocks, (pool, blocks), specs, self._pool_spec)

    def scatter_blocks(
        self, pool: Num[Array, "N ..."], blocks: Int[Array, "P"], values: Num[Array, "P ..."]
    ) -> Num[Array, "N ..."]:
        arguments = (pool, blocks, values)
        specs = (self._pool_spec, P(), self._pool_spec)
        return self._run(self.shard.scatter_blocks, arguments, specs, self._pool_spec)

    def attend(
        self, query: Float[Array, "T H D"], pool: Num[Array, "N ..."], plan: Any, **options: Any
    ) -> Float[Array, "T H D"]:
        specs = (self._by_head, self._pool_spec, P())
        return self._run(self.shard.attend, (query, pool, plan), specs, self._by_head, options)

    def write_and_attend(
        self,
        query: Float[Array, "T H D"],
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        pool: Num[Array, "N ..."],
        slots: Int[Array, "T"],
        plan: Any,
        **options: Any,
    ) -> tuple[Float[Array, "T H D"], Num[Array, "N ..."]]:
        return self._run(
            self.shard.write_and_attend,
            (query, key, value, pool, slots, plan),
            (self._by_head, self._by_head, self._by_head, self._pool_spec, P(), P()),
            (self._by_head, self._pool_spec),
            options,
        )

    @property
    def _by_head(self) -> P:
        """Of [T, heads, D]."""
        return P(None, self.axis, None)

    @property
    def _pool_spec(self) -> P:
        return self.pool_sharding.spec

    def _run(
        self,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        specs: tuple[P, ...],
        out_specs: Any,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Call the method of the shard's backend on each device.

        Options that are no arrays are the same on all devices, and so are arrays without heads.
        """
        options = options or {}
        arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
        constants = {name: value for name, value in options.items() if name not in arrays}
        array_specs = {name: P(self.axis) if name in BY_HEAD else P() for name in arrays}

        def on_device(arguments: tuple[Any, ...], arrays: dict[str, Array]) -> Any:
            return method(*arguments, **constants, **arrays)

        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(specs, array_specs),
            out_specs=out_specs,
            check_vma=False,  # kernels do not say which axes their results vary along
        )(arguments, arrays)
