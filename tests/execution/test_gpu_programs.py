"""Whole steps of large models, compiled for cards that are not there."""

import pytest

from jpaged.execution.compiler_options import compiler_options
from jpaged.execution.slot_state import SlotState
from tests.execution.large_models import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    check_collectives,
    lower_decode,
    lower_mixed,
    num_donated,
    plan_on,
    pool_shape_on_device,
    total_bytes,
)
from tests.kernels.gpu_compiler import compile_lowered, mesh_of, needs_cuda_plugin

pytestmark = [needs_cuda_plugin, pytest.mark.slow]


@pytest.mark.parametrize(
    "num_cards,config,tokens,lower",
    [
        pytest.param(1, LLAMA_3_8B, 64 * 4096, lower_decode, id="1-decode"),
        pytest.param(2, LLAMA_3_8B, 64 * 8192, lower_mixed, id="2-mixed"),
        pytest.param(1, LLAMA_3_8B, 64 * 4096, lower_mixed, id="1-mixed", marks=pytest.mark.long),
        pytest.param(8, LLAMA_3_8B, 64 * 8192, lower_decode, id="8-decode", marks=pytest.mark.long),
        pytest.param(2, LLAMA_3_70B, 16384, lower_decode, id="70b-decode", marks=pytest.mark.long),
    ],
)
def test_step_of_a_large_model(num_cards, config, tokens, lower, tmp_path):
    """One launch for the host, the pool in place, and little memory beside it."""
    devices = mesh_of("A100", num_cards).devices.flat
    options = {"max_num_seqs": 64, "num_gpu_blocks_override": tokens // 16}
    spec = plan_on(f"a100-80gb x{num_cards}", devices, config, **options).spec
    program = compile_lowered(lower(spec), tmp_path, **compiler_options(spec.target))
    program.check_is_one_command_buffer()
    program.check_pool_stays_in_place(pool_shape_on_device(spec), num_pools=config.num_layers)
    assert num_donated(program.compiled) == config.num_layers + len(SlotState._fields)
    assert program.compiled.memory_analysis().temp_size_in_bytes <= 0.5e9
    assert total_bytes(program.compiled) <= spec.target.memory_bytes
    if num_cards > 1:
        check_collectives(program.compiled, config)
