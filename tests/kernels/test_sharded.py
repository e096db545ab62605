"""Attention whose KV heads are split over devices."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels.paged_attention import ShardedPagedAttention
from pallas_kernels.testing import AttentionShape
from tests.kernels import checks
from tests.kernels.checks import MIXED, check, make_backend

SHAPE = AttentionShape(num_heads=8, num_kv_heads=4, head_dim=64, softcap=30.0, has_sinks=True)
BACKENDS = ["xla", "triton", "pallas-tpu"]


def sharded(name: str, num_devices: int = 2) -> ShardedPagedAttention:
    shard = AttentionShape(
        num_heads=SHAPE.num_heads // num_devices,
        num_kv_heads=SHAPE.num_kv_heads // num_devices,
        head_dim=SHAPE.head_dim,
    )
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(1, -1), ("dp", "tp"))
    return ShardedPagedAttention(make_backend(name, shard), mesh, "tp")


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `check` make backends whose heads are split."""
    monkeypatch.setattr(checks, "make_backend", lambda name, shape: sharded(name))
    yield


@pytest.mark.usefixtures("on_devices")
@pytest.mark.parametrize(
    ("name", "pool_dtype"), [("xla", "int8"), ("triton", None), ("pallas-tpu", "int8")]
)
def test_answers_and_pools_are_those_of_one_device(name: str, pool_dtype: str | None) -> None:
    """Softcap, sinks, a traced window, and scales for each head of the pool."""
    check(name, MIXED[:6], SHAPE, block_size=32, window=100, pool_dtype=pool_dtype)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_device_holds_its_heads_of_every_block(name: str) -> None:
    attention = sharded(name, num_devices=4)
    whole = make_backend(name, SHAPE)
    sizes = {"num_blocks": 6, "block_size": 32, "num_kv_heads": 4, "head_dim": SHAPE.head_dim}
    shape = attention.pool_shape(**sizes)
    assert shape == whole.pool_shape(**sizes)
    random = np.random.default_rng(0)
    values = random.normal(size=shape).astype(np.float32)
    pool = jax.device_put(values, attention.pool_sharding)
    one_head = whole.pool_shape(**{**sizes, "num_kv_heads": 1})
    assert {shard.data.shape for shard in pool.addressable_shards} == {one_head}

    sources, targets = jnp.array([1, 2, 3]), jnp.array([4, 1, 6])  # the last one is no copy
    copied = jax.jit(attention.copy_blocks)(pool, sources, targets)
    expected = values.copy()
    expected[[4, 1]] = values[[1, 2]]
    np.testing.assert_array_equal(copied, expected)
    fetched = jax.jit(attention.gather_blocks)(copied, jnp.array([5, 4]))
    np.testing.assert_array_equal(fetched, expected[[5, 4]])
    back = jax.jit(attention.scatter_blocks)(copied, jnp.array([2, 3]), fetched)
    expected[[2, 3]] = expected[[5, 4]]
    np.testing.assert_array_equal(back, expected)
    assert {each.sharding.spec for each in (copied, back)} == {attention.pool_sharding.spec}


def test_the_largest_pool_is_that_of_a_device() -> None:
    """Triton's limits are of the array that a kernel gets."""
    attention, whole = sharded("triton", num_devices=4), make_backend("triton", SHAPE)
    block = {"block_shape": (32, 8, 64), "itemsize": 1}
    limit = whole.largest_pool(num_blocks=200_000, **block)
    assert limit < 200_000
    assert attention.largest_pool(num_blocks=200_000, **block) == 200_000
    assert attention.largest_pool(num_blocks=4 * limit, **block) == 4 * limit
