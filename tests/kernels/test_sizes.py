"""Sizes of kernels: those chosen, and others instead."""

from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import (
    AttentionMetadata,
    MosaicPagedAttention,
    TritonPagedAttention,
)
from pallas_kernels.paged_attention.mosaic_sizes import CHIPS, MosaicSizes, chip_sizes
from pallas_kernels.paged_attention.sizes import choices_of
from pallas_kernels.paged_attention.triton_sizes import TritonSizes
from pallas_kernels.testing import MODEL_SHAPES

BFLOAT16 = jnp.dtype("bfloat16")
KERNELS = {
    "pallas-tpu": MosaicPagedAttention(num_kv_heads=2, group=4, head_dim=64),
    "triton": TritonPagedAttention(group=4, head_dim=64),
}
SIZES = MosaicSizes(fetch_bytes=2 << 20, chunk_tokens=256, prefill_queries=32)


def kernels_text(attention):
    """What is traced of a step with decodes and a prefill."""
    pool = attention.pool_shape(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=64)
    sizes = [(4, 256), (4,), (5,), ()]
    metadata = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]

    def step(query, pool, metadata):
        plan = attention.plan(
            AttentionMetadata(*metadata), num_tokens=64, block_size=16, decode_only=False
        )
        return attention.attend(query, pool, plan, scale=1.0)

    arrays = (jax.ShapeDtypeStruct(size, BFLOAT16) for size in [(64, 8, 64), pool])
    return str(jax.make_jaxpr(step)(*arrays, metadata))


@pytest.mark.parametrize("backend", KERNELS)
def test_every_size_changes_the_kernels(backend):
    """O-62: and those chosen are the same whether they are measured or not."""
    attention = KERNELS[backend]
    chosen = attention.sizes(BFLOAT16)
    text = kernels_text(attention)
    assert kernels_text(replace(attention, measured=chosen)) == text
    for name, choices in choices_of(chosen).items():
        sizes = replace(chosen, **{name: choices[0]})
        assert kernels_text(replace(attention, measured=sizes)) != text, name


def test_sizes_are_those_of_the_entry():
    tpu = replace(KERNELS["pallas-tpu"], measured=SIZES)
    text = kernels_text(tpu)
    assert "bf16[2,256,2,16,128]" in text, "two buffers of 256 blocks of 8 KiB"
    assert "f32[4,256]" in text and "f32[128,256]" in text
    gpu = TritonSizes(
        decode_tile=32,
        decode_warps=2,
        decode_stages=4,
        decode_programs=128,
        prefill_tile=16,
        prefill_rows=64,
        prefill_warps=1,
        prefill_stages=2,
    )
    text = kernels_text(replace(KERNELS["triton"], measured=gpu))
    assert "num_warps=2, num_stages=4" in text and "num_warps=1, num_stages=2" in text
    assert "grid=(4, 2, 16)" in text, "splits, so that 4 rows of 2 heads are 128 programs"
    assert "f32[16,32]" in text and "f32[64,16]" in text


@pytest.mark.parametrize("kind", CHIPS)
def test_a_chip_has_memory_for_what_is_chosen(kind):
    for shape in MODEL_SHAPES.values():
        attention = MosaicPagedAttention(
            num_kv_heads=shape.num_kv_heads,
            group=shape.group,
            head_dim=shape.head_dim,
            **asdict(chip_sizes(kind)),
        )
        for dtype, block_size in [("bfloat16", 16), ("bfloat16", 64), ("int8", 32)]:
            assert reason_against(attention, dtype, block_size) is None


def reason_against(attention, dtype, block_size):
    return attention.supports(
        block_size=block_size, dtype=jnp.dtype(dtype), platform="tpu", compute_capability=None
    )


@pytest.mark.parametrize(
    "kind,fetch_mib,is_possible",
    [
        ("TPU v4", 2, True),
        ("TPU v4", 4, False),
        ("TPU v6 lite", 8, True),
        ("TPU v6 lite", 16, False),
    ],
)
def test_sizes_that_a_chip_cannot_hold_are_refused(kind, fetch_mib, is_possible):
    attention = MosaicPagedAttention(
        num_kv_heads=8, group=4, head_dim=128, **asdict(chip_sizes(kind))
    )
    sizes = replace(attention.sizes(BFLOAT16), fetch_bytes=fetch_mib << 20)
    reason = reason_against(replace(attention, measured=sizes), "bfloat16", 16)
    if is_possible:
        assert reason is None
    else:
        assert f"vector memory with fetch_bytes {fetch_mib << 20}, chunk_tokens 512" in reason


def test_chips_that_are_not_known_get_what_all_can_do():
    assert chip_sizes("TPU v9") == chip_sizes("TPU v4")
    least = chip_sizes("TPU v4")
    assert all(each.fetch_bytes >= least.fetch_bytes for each in CHIPS.values())
