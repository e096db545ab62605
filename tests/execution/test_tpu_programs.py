"""Whole steps of large models, compiled for TPUs that are not there."""

import pytest

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
from tests.kernels.tpu_compiler import check_pool_stays_in_place, needs_libtpu, whole_mesh

pytestmark = needs_libtpu


@pytest.mark.parametrize(
    "topology,chips,config,batch,lower",
    [
        pytest.param(
            "v5e:2x4", "v5e-8", LLAMA_3_8B, 128, lower_decode, id="8b-v5e", marks=pytest.mark.slow
        ),
        pytest.param(
            "v6e:2x2", "v6e-4", LLAMA_3_8B, 128, lower_decode, id="8b-v6e", marks=pytest.mark.long
        ),
        pytest.param(
            "v5e:2x4", "v5e-8", LLAMA_3_8B, 128, lower_mixed, id="8b-mixed", marks=pytest.mark.long
        ),
        pytest.param(
            "v5e:4x4", "v5e-16", LLAMA_3_70B, 32, lower_decode, id="70b-v5e", marks=pytest.mark.long
        ),
        pytest.param(
            "v6e:2x4", "v6e-8", LLAMA_3_70B, 64, lower_decode, id="70b-v6e", marks=pytest.mark.long
        ),
    ],
)
def test_step_of_a_large_model(topology, chips, config, batch, lower):
    """The pool in place, all of it within the chips' memory, and no collective but the sums."""
    options = {"max_num_seqs": batch, "num_gpu_blocks_override": batch * 4096 // 128}
    options["block_size"] = 128
    spec = plan_on(chips, whole_mesh(topology).devices.flat, config, **options).spec
    compiled = lower(spec).compile()
    check_pool_stays_in_place(compiled, pool_shape_on_device(spec), "bfloat16", config.num_layers)
    assert num_donated(compiled) == config.num_layers + len(SlotState._fields)
    check_collectives(compiled, config)
    assert total_bytes(compiled) <= spec.target.memory_bytes
