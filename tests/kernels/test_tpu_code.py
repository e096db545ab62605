"""The programs that the kernels become for TPUs, compiled without one.

Mosaic refuses what a chip cannot do, and what does not fit its vector memory.
"""

import math
from dataclasses import asdict
from itertools import product

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import AttentionMetadata, MosaicPagedAttention
from pallas_kernels.paged_attention.mosaic_sizes import MIB, chip_sizes
from pallas_kernels.testing import MODEL_SHAPES, AttentionShape
from tests.kernels.gpu_compiler import on
from tests.kernels.tpu_compiler import (
    TOPOLOGIES,
    check_pool_stays_in_place,
    compile_for,
    kernels_of,
    mesh_of,
    needs_libtpu,
    pool_makers,
    vector_memory_of,
)

pytestmark = needs_libtpu
POOL_BYTES = 512 << 20  # XLA moves small pools into vector memory


def compile_attention(
    chip,
    shape,
    *,
    num_tokens=512,
    num_rows=64,
    block_size=16,
    context=4096,
    dtype="bfloat16",
    pool_dtype=None,
    decode_only=False,
    writes=True,
):
    """A step of one layer, with the sizes that the chip gets, or attention alone."""
    mesh, int32, pool_dtype = mesh_of(chip), jnp.int32, jnp.dtype(pool_dtype or dtype)
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    attention = MosaicPagedAttention(
        num_kv_heads=kv_heads,
        group=shape.group,
        head_dim=head_dim,
        **asdict(chip_sizes(mesh.devices.item().device_kind)),
    )
    sizes = {"block_size": block_size, "num_kv_heads": kv_heads, "head_dim": head_dim}
    _, *block = attention.pool_shape(num_blocks=1, **sizes)
    block_bytes = block[0] * block[1] * block[2] * pool_dtype.itemsize
    pool_shape = attention.pool_shape(num_blocks=POOL_BYTES // block_bytes, **sizes)
    reason = attention.supports(
        block_size=block_size, dtype=pool_dtype, platform="tpu", compute_capability=None
    )
    assert reason is None, reason

    def layer(pool, query, key, value, slots, metadata, options):
        plan = attention.plan(
            AttentionMetadata(*metadata),
            num_tokens=num_tokens,
            block_size=block_size,
            decode_only=decode_only,
        )
        scale, softcap = shape.score_scale, shape.softcap
        if not writes:
            return attention.attend(query, pool, plan, scale=scale, softcap=softcap, **options)
        inputs = query, key, value, pool, slots, plan
        return attention.write_and_attend(*inputs, scale=scale, softcap=softcap, **options)

    options = {}
    if shape.has_window:
        options["window"] = on(mesh, (), int32)
    if shape.has_sinks:
        options["sinks"] = on(mesh, (heads,), dtype)
    if pool_dtype.itemsize == 1:
        options["kv_scales"] = on(mesh, (2 * kv_heads,), jnp.float32)
    table = (num_rows, context // block_size)
    metadata = [on(mesh, each, int32) for each in (table, (num_rows,), (num_rows + 1,), ())]
    query, key = (on(mesh, (num_tokens, n, head_dim), dtype) for n in (heads, kv_heads))
    arrays = on(mesh, pool_shape, pool_dtype), query, key, key, on(mesh, (num_tokens,), int32)
    donated = 0 if writes else ()
    compiled = compile_for(mesh, layer, *arrays, metadata, options, donate_argnums=donated)
    if writes:
        check_pool_stays_in_place(compiled, pool_shape, pool_dtype)
    estimated = attention.vmem_bytes(block_size, pool_dtype)
    assert max(vector_memory_of(compiled).values()) <= estimated + MIB, (
        "sizes would be allowed that do not fit"
    )
    return compiled


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_a_step_on_each_chip(chip):
    compiled = compile_attention(chip, MODEL_SHAPES["llama-3-8b"])
    assert kernels_of(compiled) == {"paged_decode", "paged_prefill"}


@pytest.mark.smoke
def test_attention_alone():
    """As the benchmark of kernels runs it."""
    compiled = compile_attention("v6e", MODEL_SHAPES["llama-3-8b"], writes=False)
    assert kernels_of(compiled) == {"paged_decode", "paged_prefill"}


@pytest.mark.parametrize("chip,fetch_bytes", [("v4", 2), ("v5e", 4), ("v5p", 8), ("v6e", 8)])
def test_each_chip_gets_its_sizes(chip, fetch_bytes):
    """Two buffers, and little more in a decode. The rest of the memory is for weights."""
    shape = MODEL_SHAPES["llama-3-8b"]
    memory = vector_memory_of(compile_attention(chip, shape, decode_only=True))
    assert 2 * fetch_bytes * MIB <= memory["paged_decode"] <= (2 * fetch_bytes + 1) * MIB


@pytest.mark.parametrize("name", ["gemma-2-9b", "gpt-oss-20b"])
def test_options(name):
    compile_attention("v5e", MODEL_SHAPES[name])


def test_decodes_of_one_kv_head():
    shape = AttentionShape(num_heads=8, num_kv_heads=1, head_dim=128)
    compiled = compile_attention("v5e", shape, num_rows=128, num_tokens=128, decode_only=True)
    assert kernels_of(compiled) == {"paged_decode"}


def test_long_contexts():
    """Block numbers of 64 rows of 128K tokens are twice what scalar memory holds."""
    compile_attention("v6e", MODEL_SHAPES["llama-3-8b"], context=128 << 10)


@pytest.mark.parametrize(
    "chip",
    [
        pytest.param(chip, marks=() if chip in ("v4", "v5e") else pytest.mark.long)
        for chip in TOPOLOGIES
    ],
)
@pytest.mark.parametrize("method", ["copy_blocks", "scatter_blocks", "gather_blocks"])
def test_blocks_move_in_place(chip, method):
    """Only as much memory as the moved blocks take; sources are read before targets are written."""
    mesh, num_moved, block_size, kv_heads = mesh_of(chip), 64, 16, 8
    attention = MosaicPagedAttention(num_kv_heads=kv_heads, group=4, head_dim=128)
    sizes = {"block_size": block_size, "num_kv_heads": kv_heads, "head_dim": 128}
    pool_shape = attention.pool_shape(num_blocks=8192, **sizes)
    numbers = on(mesh, (num_moved,), jnp.int32)
    moved = on(mesh, (num_moved, *pool_shape[1:]), jnp.bfloat16)
    others = {"copy_blocks": [numbers], "scatter_blocks": [moved], "gather_blocks": []}[method]
    compiled = compile_for(
        mesh,
        getattr(attention, method),
        on(mesh, pool_shape, jnp.bfloat16),
        numbers,
        *others,
        donate_argnums=() if method == "gather_blocks" else 0,
    )
    if method == "gather_blocks":
        assert pool_makers(compiled, pool_shape) == {"parameter"}
    else:
        check_pool_stays_in_place(compiled, pool_shape, "bfloat16")
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * math.prod(moved.shape)


def two_chips_each(*values):
    """Each combination of values with two of the chips, all chips in turn."""
    chips = list(TOPOLOGIES)
    for number, combination in enumerate(product(*values)):
        for chip in (chips[number % 4], chips[(number + 2) % 4]):
            yield chip, *combination


@pytest.mark.long
@pytest.mark.parametrize(
    "chip,pool_dtype,name",
    list(two_chips_each(["int8", "float8_e5m2", "float8_e4m3fn"], ["llama-3-8b", "phi-2"])),
)
def test_pools_of_one_byte(chip, pool_dtype, name):
    compile_attention(chip, MODEL_SHAPES[name], pool_dtype=pool_dtype, block_size=32)


@pytest.mark.long
@pytest.mark.parametrize("chip,name", list(two_chips_each(MODEL_SHAPES)))
def test_real_models(chip, name):
    compile_attention(chip, MODEL_SHAPES[name])


@pytest.mark.long
@pytest.mark.parametrize(
    "chip,dtype,block_size",
    [
        ("v4", "float32", 8),
        ("v5e", "bfloat16", 64),
        ("v5p", "bfloat16", 256),
        ("v6e", "float32", 128),
        ("v4", "bfloat16", 256),
        ("v5e", "float32", 8),
    ],
)
def test_block_sizes(chip, dtype, block_size):
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, has_window=True)
    compile_attention(chip, shape, dtype=dtype, block_size=block_size)
