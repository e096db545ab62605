"""Writing, copying and moving blocks of a pool."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.head_major_pool import HeadMajorPool
from pallas_kernels.paged_attention.interleaved_pool import InterleavedPool

pytestmark = pytest.mark.smoke

LAYOUTS = [InterleavedPool(), HeadMajorPool()]
HEAD_DIM = 16
NUM_BLOCKS, BLOCK_SIZE = 4, 8


@pytest.fixture(params=LAYOUTS, ids=["interleaved", "head-major"])
def layout(request):
    return request.param


@pytest.fixture
def pool(layout):
    size = layout.pool_shape(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=HEAD_DIM
    )
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def read(layout, pool):
    """Of each slot: its keys and values, [slots, 2K, D]."""
    pool = np.asarray(pool)
    if isinstance(layout, HeadMajorPool):
        pairs = pool.swapaxes(1, 2).reshape(NUM_BLOCKS, BLOCK_SIZE, 4, -1)
        pool = pairs[:, :, :, :HEAD_DIM]
    return pool.reshape(NUM_BLOCKS * BLOCK_SIZE, 4, HEAD_DIM).copy()


def test_write_changes_only_its_slots(layout, pool):
    key, value = np.random.default_rng(1).normal(size=(2, 3, 2, HEAD_DIM)).astype(np.float32)
    slots = np.array([9, 31, 0], np.int32)
    written = layout.write(jnp.array(pool), jnp.array(key), jnp.array(value), jnp.array(slots))
    expected = read(layout, pool)
    expected[slots, 0::2], expected[slots, 1::2] = key, value
    np.testing.assert_array_equal(read(layout, written), expected)


def test_slots_past_the_end_are_no_writes(layout, pool):
    key = jnp.ones((1, 2, HEAD_DIM))
    written = layout.write(jnp.array(pool), key, key, jnp.array([NUM_BLOCKS * BLOCK_SIZE]))
    np.testing.assert_array_equal(written, pool)


def test_lanes_that_fill_up_are_zeros():
    """Queries are zero there as well, which is no help against a NaN."""
    layout, num_dims = HeadMajorPool(), 80
    size = layout.pool_shape(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=num_dims)
    assert size == (2, 1, 8, 256)
    key = jnp.ones((1, 1, num_dims))
    pool = jnp.full(size, jnp.nan)
    [pair] = np.asarray(layout.write(pool, key, key, jnp.array([9])))[1, :, 1]
    np.testing.assert_array_equal(pair, ([1] * 80 + [0] * 48) * 2)


def test_copies_happen_at_the_same_time(layout, pool):
    sources, targets = jnp.array([0, 1, 2]), jnp.array([1, 0, NUM_BLOCKS])
    copied = layout.copy_blocks(jnp.array(pool), sources, targets)
    np.testing.assert_array_equal(copied, pool[[1, 0, 2, 3]])


def test_blocks_come_back_elsewhere(layout, pool):
    """What is moved out and in again is the same; a number past the end writes nothing."""
    values = layout.gather_blocks(jnp.array(pool), jnp.array([3, 1]))
    np.testing.assert_array_equal(values, pool[[3, 1]])
    moved = layout.scatter_blocks(jnp.array(pool), jnp.array([0, NUM_BLOCKS]), values)
    np.testing.assert_array_equal(moved, pool[[3, 1, 2, 3]])


@pytest.mark.parametrize("dtype,most", [("int8", 127), ("float8_e5m2", 57344)])
def test_one_byte_holds_what_is_nearest(dtype, most):
    """Out of range: the largest number, and no NaN or wrap."""
    layout = InterleavedPool()
    pool = jnp.zeros((1, BLOCK_SIZE, 2, 4), dtype)
    key = jnp.array([[[1.0, -2.6, 1e6, -1e6]]])
    scales = jnp.array([0.5, 2.0])
    written = layout.write(pool, key, key, jnp.array([3]), kv_scales=scales)[0, 3].astype(
        np.float32
    )
    np.testing.assert_array_equal(written[0], [2, -5, most, -most])
    np.testing.assert_allclose(written[1], [0.5, -1.3, most, -most], atol=0.51)
