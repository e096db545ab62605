"""Whole steps of a large model, compiled for cards that are not there."""

import pytest

from jpaged.execution.slot_state import SlotState
from pallas_kernels.paged_attention import TritonPagedAttention
from pallas_kernels.paged_attention.interleaved_pool import DEFAULT_BLOCK_SIZE
from tests.execution.large_models import DONATED, LLAMA_3_8B, Step, check_collectives, num_donated
from tests.kernels.gpu_compiler import compile_lowered, lower_for, mesh_of, needs_cuda_plugin

pytestmark = [needs_cuda_plugin, pytest.mark.slow]

BATCH = 64


@pytest.mark.parametrize(
    "num_cards,context,num_tokens",
    [
        pytest.param(1, 4096, BATCH, id="1-decode"),
        pytest.param(2, 8192, 2048, id="2-mixed"),
        pytest.param(1, 4096, 2048, id="1-mixed", marks=pytest.mark.long),
        pytest.param(2, 8192, BATCH, id="2-decode", marks=pytest.mark.long),
    ],
)
def test_step_of_a_large_model(num_cards, context, num_tokens, tmp_path):
    """One launch for the host, the pool in place, and little memory beside it."""
    step = Step(
        config=LLAMA_3_8B,
        attention=TritonPagedAttention(group=4, head_dim=128),
        pool_axis=2,
        batch=BATCH,
        context=context,
        num_tokens=num_tokens,
    )
    mesh = mesh_of("A100", num_cards)
    forward, arguments = step.on(mesh)
    program = compile_lowered(
        lower_for(mesh, forward, *arguments, donate_argnums=DONATED), tmp_path
    )
    program.check_is_one_command_buffer()
    num_blocks = BATCH * context // DEFAULT_BLOCK_SIZE + 1
    kv_heads = 2 * 8 // num_cards
    pool_shape = (num_blocks, DEFAULT_BLOCK_SIZE, kv_heads, 128)
    program.check_pool_stays_in_place(pool_shape, num_pools=32)
    assert num_donated(program.compiled) == 32 + len(SlotState._fields)
    assert program.compiled.memory_analysis().temp_size_in_bytes <= 0.5e9
    if num_cards > 1:
        check_collectives(program.compiled, LLAMA_3_8B)
