"""The code that the kernels become for NVIDIA cards, read without one."""

import math
import re

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import AttentionMetadata, TritonPagedAttention
from pallas_kernels.testing import MODEL_SHAPES, AttentionShape
from tests.kernels.gpu_compiler import (
    CARDS,
    compile_lowered,
    lower_for,
    mesh_of,
    needs_cuda_plugin,
    on,
)

pytestmark = needs_cuda_plugin
BLOCK_SIZE, NUM_BLOCKS, NUM_TABLE_BLOCKS = 16, 16384, 256
H100_MODELS = ("llama-3-8b", "gemma-2-9b", "gpt-oss-20b")


def compile_attention(
    card,
    shape,
    folder,
    *,
    num_rows,
    num_tokens=None,
    dtype="bfloat16",
    pool_dtype=None,
    num_blocks=NUM_BLOCKS,
):
    """A step of one layer; of decodes only if `num_tokens` is None."""
    mesh, int32 = mesh_of(card), jnp.int32
    attention = TritonPagedAttention(group=shape.group, head_dim=shape.head_dim)
    pool_shape = attention.pool_shape(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    decode_only = num_tokens is None
    num_tokens = num_tokens or num_rows
    kv_shape = (num_tokens, shape.num_kv_heads, shape.head_dim)
    query_shape = (num_tokens, shape.num_heads, shape.head_dim)

    def layer(pool, query, key, value, slots, metadata, options):
        metadata = AttentionMetadata(*metadata)
        plan = attention.plan(
            metadata, num_tokens=num_tokens, block_size=BLOCK_SIZE, decode_only=decode_only
        )
        inputs, scale = (query, key, value, pool, slots, plan), shape.score_scale
        return attention.write_and_attend(*inputs, scale=scale, softcap=shape.softcap, **options)

    options = {}
    if shape.has_window:
        options["window"] = on(mesh, (), int32)
    if shape.has_sinks:
        options["sinks"] = on(mesh, (shape.num_heads,), dtype)
    sizes = [(num_rows, NUM_TABLE_BLOCKS), (num_rows,), (num_rows + 1,), ()]
    metadata = [on(mesh, each, int32) for each in sizes]
    if pool_dtype:
        options["kv_scales"] = on(mesh, (2 * shape.num_kv_heads,), jnp.float32)
    arrays = [on(mesh, each, dtype) for each in (query_shape, kv_shape, kv_shape)]
    pool = on(mesh, pool_shape, pool_dtype or dtype)
    slots = on(mesh, (num_tokens,), int32)
    lowered = lower_for(mesh, layer, pool, *arrays, slots, metadata, options, donate_argnums=0)
    return compile_lowered(lowered, folder)


def check_code(program, kernel):
    """Loads that run ahead, block numbers (4 bytes each) included, and tensor cores."""
    code = program.kernels[kernel]
    for num_bytes in ("0x10", "0x4"):
        assert re.search(rf"cp\.async\.\w+\.shared\.global .*, {num_bytes},", code), kernel
    assert re.search(r"(mma\.sync|wgmma\.mma_async)\S*\.f32\.bf16\.bf16", code), kernel


# H100 compiles what A100 does, and its own matmuls.
@pytest.mark.parametrize(
    "card,name",
    [
        pytest.param(
            card,
            name,
            marks=() if card == "A100" or name in H100_MODELS else pytest.mark.long,
        )
        for card in CARDS
        for name in MODEL_SHAPES
    ],
)
def test_kernels_of_real_models(card, name, tmp_path):
    """A kernel whose registers spill would not compile."""
    shape = MODEL_SHAPES[name]
    program = compile_attention(card, shape, tmp_path, num_rows=64, num_tokens=2048)
    check_code(program, "paged_decode")
    check_code(program, "paged_prefill")
    program.check_is_one_command_buffer()
    pool_shape = (NUM_BLOCKS, BLOCK_SIZE, 2 * shape.num_kv_heads, shape.head_dim)
    program.check_pool_stays_in_place(pool_shape, num_pools=1)


@pytest.mark.smoke
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("num_rows,is_split", [(1, True), (64, True), (256, False)])
def test_many_rows_are_not_split(card, num_rows, is_split, tmp_path):
    shape = MODEL_SHAPES["llama-3-8b"]
    program = compile_attention(card, shape, tmp_path, num_rows=num_rows)
    check_code(program, "paged_decode")
    assert ("paged_decode_reduce" in program.kernels) == is_split


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_other_types_do_not_spill(dtype, head_dim, tmp_path):
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=head_dim)
    compile_attention("A100", shape, tmp_path, num_rows=64, num_tokens=512, dtype=dtype)


BYTE_POOLS = [
    ("A100", "int8"),
    ("A100", "float8_e5m2"),
    ("H100", "int8"),
    ("H100", "float8_e4m3fn"),
]
BYTE_POOL_MODELS = ["llama-3-8b", "gemma-2-9b", "gpt-oss-20b", "phi-2"]


# In `make test` each of both once.
@pytest.mark.parametrize(
    "card,pool_dtype,name",
    [
        pytest.param(*pool, name, marks=() if first == second else pytest.mark.long)
        for first, pool in enumerate(BYTE_POOLS)
        for second, name in enumerate(BYTE_POOL_MODELS)
    ],
)
def test_pools_of_one_byte(card, pool_dtype, name, tmp_path):
    shape = MODEL_SHAPES[name]
    program = compile_attention(
        card, shape, tmp_path, num_rows=64, num_tokens=2048, pool_dtype=pool_dtype
    )
    check_code(program, "paged_decode")
    check_code(program, "paged_prefill")


def test_large_pools_do_not_spill(tmp_path):
    """Beyond 4 GiB a layer, offsets take two registers each."""
    shape = MODEL_SHAPES["llama-3-8b"]
    program = compile_attention(
        "A100", shape, tmp_path, num_rows=64, num_tokens=512, num_blocks=100_000
    )
    assert program.compiled.memory_analysis().alias_size_in_bytes > 4 << 30
    check_code(program, "paged_decode")


@pytest.mark.parametrize("method", ["copy_blocks", "scatter_blocks"])
def test_blocks_move_in_place(method, tmp_path):
    """Only as much memory as the moved blocks take; sources are read before targets are written."""
    mesh, num_moved = mesh_of("A100"), 64
    attention = TritonPagedAttention(group=4, head_dim=128)
    pool_shape = attention.pool_shape(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=8, head_dim=128
    )
    numbers = on(mesh, (num_moved,), jnp.int32)
    moved = on(mesh, (num_moved, *pool_shape[1:]), jnp.bfloat16)
    lowered = lower_for(
        mesh,
        getattr(attention, method),
        on(mesh, pool_shape, jnp.bfloat16),
        numbers,
        numbers if method == "copy_blocks" else moved,
        donate_argnums=0,
    )
    program = compile_lowered(lowered, tmp_path)
    program.check_pool_stays_in_place(pool_shape, num_pools=1)
    moved_bytes = 2 * math.prod(moved.shape)
    assert program.compiled.memory_analysis().temp_size_in_bytes <= moved_bytes
