"""How many bytes the TPU kernels move, counted as they start their copies."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import MosaicPagedAttention, mosaic_kernel, mosaic_write
from pallas_kernels.testing import AttentionShape, ragged_batch
from tests.kernels.checks import write_and_attend


class Counting:
    """pltpu, but a copy that is started adds its bytes to a list."""

    def __init__(self):
        self.sizes = []

    def __getattr__(self, name):
        return getattr(pltpu, name)

    def make_async_copy(self, source, target, semaphore):
        copy = pltpu.make_async_copy(source, target, semaphore)
        num_bytes = math.prod(target.shape) * jnp.dtype(target.dtype).itemsize

        def start():
            jax.debug.callback(lambda: self.sizes.append(num_bytes))
            copy.start()

        return SimpleNamespace(start=start, wait=copy.wait)


@pytest.fixture
def moved(monkeypatch):
    """reads and writes of K/V."""
    reads, writes = Counting(), Counting()
    monkeypatch.setattr(mosaic_kernel, "pltpu", reads)
    monkeypatch.setattr(mosaic_write, "pltpu", writes)
    return SimpleNamespace(reads=reads.sizes, writes=writes.sizes)


@pytest.mark.parametrize("num_kv_heads,window", [(1, None), (8, None), (8, 128)])
def test_decodes_move_little_more_than_the_live_kv(num_kv_heads, window, moved):
    """At most a block of each row more than it sees, and the rows of a register for the new one."""
    shape = AttentionShape(num_heads=8, num_kv_heads=num_kv_heads, head_dim=128)
    attention = MosaicPagedAttention(
        num_kv_heads=num_kv_heads, group=shape.group, head_dim=128, interpret=True
    )
    contexts = np.random.default_rng(0).integers(300, 1000, 8)
    batch = ragged_batch(
        np.random.default_rng(0),
        [(1, int(length)) for length in contexts],
        shape,
        block_size=16,
        dtype="bfloat16",
        window=window,
        pad_tokens=2,
    )
    write_and_attend(attention, batch, decode_only=True, scale=0.1, window=window)
    jax.effects_barrier()
    token_bytes = num_kv_heads * 2 * 128 * 2
    seen = np.minimum(contexts, window or contexts)
    firsts = contexts - seen
    blocks = -(-contexts // 16) - firsts // 16
    assert sum(moved.reads) == blocks.sum() * 16 * token_bytes
    assert sum(moved.writes) == len(contexts) * 16 * token_bytes
    rounding = len(contexts) * 16 * token_bytes * (2 if window else 1)
    live = int(seen.sum()) * token_bytes
    assert sum(moved.reads + moved.writes) - rounding <= 1.05 * live


def test_prefills_write_every_band_once_a_tile(moved):
    """A prompt of 200 tokens after 20 of its past, in query tiles of 64: bands that two tiles have
    in common go twice."""
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128)
    attention = MosaicPagedAttention(num_kv_heads=2, group=4, head_dim=128, interpret=True)
    assert attention.tile_tokens == 64
    rows = [(200, 220)]
    batch = ragged_batch(np.random.default_rng(0), rows, shape, block_size=16, dtype="bfloat16")
    write_and_attend(attention, batch, decode_only=False, scale=0.1)
    jax.effects_barrier()
    # In:  tokens 20..84, 84..148, 148..212 and 212..220 in bands of 16.
    bands = 5 + 5 + 5 + 1
    assert moved.writes == [2 * 16 * 2 * 128 * 2] * bands
