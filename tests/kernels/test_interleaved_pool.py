"""Writing, copying and moving blocks of a pool."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.interleaved_pool import InterleavedPool

POOL = InterleavedPool()
NUM_BLOCKS, BLOCK_SIZE = 4, 8


@pytest.fixture
def pool():
    return np.random.default_rng(0).normal(size=(NUM_BLOCKS, BLOCK_SIZE, 4, 16)).astype(np.float32)


def test_write_changes_only_its_slots(pool):
    key, value = np.random.default_rng(1).normal(size=(2, 3, 2, 16)).astype(np.float32)
    slots = np.array([9, 31, 0], np.int32)
    written = POOL.write(jnp.array(pool), jnp.array(key), jnp.array(value), jnp.array(slots))
    expected = pool.reshape(32, 4, 16).copy()
    expected[slots, 0::2], expected[slots, 1::2] = key, value
    np.testing.assert_array_equal(np.asarray(written).reshape(32, 4, 16), expected)


def test_copies_happen_at_the_same_time(pool):
    sources, targets = jnp.array([0, 1, 2]), jnp.array([1, 0, NUM_BLOCKS])
    copied = POOL.copy_blocks(jnp.array(pool), sources, targets)
    np.testing.assert_array_equal(copied, pool[[1, 0, 2, 3]])


def test_blocks_come_back_elsewhere(pool):
    """What is moved out and in again is the same; a number past the end writes nothing."""
    values = POOL.gather_blocks(jnp.array(pool), jnp.array([3, 1]))
    np.testing.assert_array_equal(values, pool[[3, 1]])
    moved = POOL.scatter_blocks(jnp.array(pool), jnp.array([0, NUM_BLOCKS]), values)
    np.testing.assert_array_equal(moved, pool[[3, 1, 2, 3]])


@pytest.mark.parametrize("dtype,most", [("int8", 127), ("float8_e5m2", 57344)])
def test_one_byte_holds_what_is_nearest(dtype, most):
    """Out of range: the largest number, and no NaN or wrap."""
    pool = jnp.zeros((1, BLOCK_SIZE, 2, 4), dtype)
    key = jnp.array([[[1.0, -2.6, 1e6, -1e6]]])
    scales = jnp.array([0.5, 2.0])
    written = POOL.write(pool, key, key, jnp.array([3]), kv_scales=scales)[0, 3].astype(np.float32)
    np.testing.assert_array_equal(written[0], [2, -5, most, -most])
    np.testing.assert_allclose(written[1], [0.5, -1.3, most, -most], atol=0.51)
