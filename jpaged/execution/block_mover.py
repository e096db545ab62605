"""Moves KV blocks to host memory and back, in chunks of a few fixed sizes.

Nothing here waits: chunks are gathered by the device between two steps, travel while it computes,
and come back the same way.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jpaged.execution.programs import Programs
from jpaged.scheduling.block_pool import SINK_BLOCK

Pools = tuple[jax.Array, ...]
DEVICE, PINNED_HOST = "device", "pinned_host"  # kinds of memory; a CPU has both in one
NUM_TIMED_TRIPS = 3


@dataclass(frozen=True)
class HostChunk:
    """Content of neighbouring blocks of a list. values: [layers, blocks, ...], in host memory."""

    first: int
    num_blocks: int
    values: jax.Array


class BlockMover:
    def __init__(self, programs: Programs, *, num_pool_blocks: int) -> None:
        self._swap_out = programs.swap_out
        self._swap_in = programs.swap_in
        self._past_the_end = num_pool_blocks

    def fetch(self, pools: Pools, blocks: Sequence[int]) -> list[HostChunk]:
        """Copies of the blocks as they are once all steps launched so far are done."""
        chunks = []
        for first, size in self._split(len(blocks)):
            indices = np.asarray(blocks[first : first + size], np.int32)
            chunks.append(HostChunk(first, size, _to_host(self._swap_out[size](pools, indices))))
        return chunks

    def put_back(
        self, pools: Pools, chunks: Sequence[HostChunk], targets: Sequence[int | None]
    ) -> Pools:
        """The pools with the content of block i in block targets[i]; None leaves it out."""
        for chunk in chunks:
            wanted = targets[chunk.first : chunk.first + chunk.num_blocks]
            if any(target is not None for target in wanted):
                indices = [self._past_the_end if each is None else each for each in wanted]
                pools = self._swap_in[chunk.num_blocks](
                    pools, np.asarray(indices, np.int32), _to_device(chunk.values)
                )
        return pools

    def time_round_trip(self, pools: Pools) -> tuple[float, Pools]:
        """Seconds a block, out and in, and the pools. Moves the sink block, which nobody reads."""
        num_blocks = max(self._swap_out)
        nowhere = np.full(num_blocks, SINK_BLOCK, np.int32)
        seconds = []
        for _ in range(NUM_TIMED_TRIPS):
            started = time.perf_counter()
            [chunk] = self.fetch(pools, nowhere.tolist())
            jax.block_until_ready(chunk.values)
            values = _to_device(chunk.values)
            pools = self._swap_in[num_blocks](pools, nowhere, values)
            jax.block_until_ready(pools)
            seconds.append(time.perf_counter() - started)
        # The first trip may have paid for things that happen once.
        return min(seconds) / num_blocks, pools

    def _split(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """First block and size of chunks that hold exactly so many blocks together."""
        first = 0
        for size in sorted(self._swap_out, reverse=True):
            while num_blocks - first >= size:
                yield first, size
                first += size


def _to_host(values: jax.Array) -> jax.Array:
    return jax.device_put(values, values.sharding.with_memory_kind(PINNED_HOST))


def _to_device(values: jax.Array) -> jax.Array:
    return jax.device_put(values, values.sharding.with_memory_kind(DEVICE))
