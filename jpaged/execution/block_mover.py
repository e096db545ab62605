"""Copies KV blocks from the device's pools to host memory and back.

Blocks are copied in chunks of a few sizes, each with programs of its own. The copies are launched
only: the device gathers or scatters a chunk between two steps, and transfers it while it computes
the next one.
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
    """K/V of consecutive blocks of a list, in host memory.

    first: position in the list of the first of them.
    values: [layers, blocks, ...].
    """

    first: int
    num_blocks: int
    values: jax.Array


class BlockMover:
    """Launches copies of blocks out of the pools and back into them."""

    def __init__(self, programs: Programs, *, num_pool_blocks: int) -> None:
        self._swap_out = programs.swap_out
        self._swap_in = programs.swap_in
        self._past_the_end = num_pool_blocks

    def fetch(self, pools: Pools, blocks: Sequence[int]) -> list[HostChunk]:
        """Copy blocks to host memory, as they are once all steps launched so far are done."""
        chunks = []
        for first, size in self._split(len(blocks)):
            indices = np.asarray(blocks[first : first + size], np.int32)
            chunks.append(HostChunk(first, size, _to_host(self._swap_out[size](pools, indices))))
        return chunks

    def put_back(
        self, pools: Pools, chunks: Sequence[HostChunk], targets: Sequence[int | None]
    ) -> Pools:
        """Write block i of the chunks to block targets[i] of the pools, or nowhere if that is None.

        Returns the pools to use from now on.
        """
        for chunk in chunks:
            wanted = targets[chunk.first : chunk.first + chunk.num_blocks]
            if any(target is not None for target in wanted):
                indices = [self._past_the_end if each is None else each for each in wanted]
                pools = self._swap_in[chunk.num_blocks](
                    pools, np.asarray(indices, np.int32), _to_device(chunk.values)
                )
        return pools

    def time_round_trip(self, pools: Pools) -> tuple[float, Pools]:
        """Measure the seconds that one block takes to host memory and back.

        Returns them, and the pools to use from now on. Copies the sink block, which nobody reads.
        """
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
        """Yield first block and size of chunks that have `num_blocks` blocks together."""
        first = 0
        for size in sorted(self._swap_out, reverse=True):
            while num_blocks - first >= size:
                yield first, size
                first += size


def _to_host(values: jax.Array) -> jax.Array:
    return jax.device_put(values, values.sharding.with_memory_kind(PINNED_HOST))


def _to_device(values: jax.Array) -> jax.Array:
    return jax.device_put(values, values.sharding.with_memory_kind(DEVICE))
