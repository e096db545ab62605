"""What the compiled programs look like: no copy of the pool, additive counts, fixed shapes."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.stages import Lowered

from jpaged.execution.programs import lower_copy, lower_forward, lower_sample, lower_swap_in
from jpaged.execution.step_inputs import NUM_SAMPLING_FLOATS, NUM_SAMPLING_INTS
from jpaged.models.llama import Llama
from jpaged.startup.memory_plan import measured_program_bytes
from pallas_kernels.paged_attention import NO_WINDOW
from tests.random_llama import save_random_llama

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def llm(tmp_path_factory, make_llm):
    return make_llm(save_random_llama(tmp_path_factory.mktemp("random")))


@pytest.fixture(scope="module")
def spec(llm):
    return llm.engine.core._runner.spec


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(None, None), (5, None), (5, 7)])
def test_layers_are_lowered_once(spec, windows):
    """Whatever their windows are; a model that has none hands none over."""
    config, dtype = replace(spec.model.config, windows=windows), spec.model.dtype
    graph, _ = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype)))
    spec = replace(spec, model=replace(spec.model, config=config, graph=graph))
    text = lower_forward(spec, spec.forward_shape(8, decode_only=True)).as_text()
    assert len(re.findall(r"func private @_run_layer", text)) == 1
    constants = {int(number) for number in re.findall(r"dense<(\d+)> : tensor<i32>", text)}
    expected = {NO_WINDOW if window is None else window for window in windows}
    assert constants & {5, 7, NO_WINDOW} == (expected if any(windows) else set())


@pytest.mark.parametrize("program", ["decode", "mixed", "copy", "swap in"])
def test_programs_do_not_copy_the_pool(spec, program):
    compiled = {
        "decode": lambda: lower_forward(spec, spec.forward_shape(8, decode_only=True)),
        "mixed": lambda: lower_forward(spec, spec.forward_shape(8, decode_only=False)),
        "copy": lambda: lower_copy(spec, 4),
        "swap in": lambda: lower_swap_in(spec, 4),
    }[program]().compile()
    pool_shape = ",".join(map(str, spec.kv_cache.layer_shape))
    pool_ops = re.findall(rf"= f32\[{pool_shape}\]\S* (\w[\w-]*)\(", compiled.as_text())
    # The pool comes in as a parameter, is scattered into in place, and goes out again.
    assert pool_ops, "the pattern must match the pool"
    assert not {"copy", "copy-start", "transpose", "select", "broadcast"} & set(pool_ops), pool_ops
    pool_bytes = int(np.prod(spec.kv_cache.layer_shape)) * 4
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool_bytes * spec.kv_cache.num_layers
    assert analysis.temp_size_in_bytes < pool_bytes


def test_counts_of_programs_add_up(spec):
    """O-61: tokens, rows and sampling rows are bucketed apart."""
    spec = replace(spec, bucket_growth=2)
    assert spec.row_buckets == (1, 2, 4, 8)
    assert spec.token_buckets == (16, 32, 64)
    assert len(spec.forward_shapes()) == len(spec.row_buckets) + len(spec.token_buckets)
    assert spec.copy_buckets == (4, 8)
    num_forward = len(spec.forward_shapes())
    assert spec.num_programs == num_forward + len(spec.row_buckets) + len(spec.copy_buckets)


@pytest.mark.parametrize(
    "growth,rows,tokens",
    [(2, (1, 2, 4, 8, 12), (16, 32, 64, 100)), (5, (1, 5, 12), (16, 80, 100))],
)
def test_bucket_growth_decides_how_many_programs_there_are(spec, growth, rows, tokens):
    spec = replace(spec, num_slots=12, max_num_tokens=100, bucket_growth=growth)
    assert (spec.row_buckets, spec.token_buckets) == (rows, tokens)
    assert {shape.num_tokens for shape in spec.forward_shapes()} == {*rows, *tokens}


def test_compiled_programs_refuse_other_shapes(llm, spec):
    num_rows = spec.num_slots
    program = llm.engine.core._runner._programs.sample[num_rows]
    hidden = np.zeros((num_rows, spec.model.config.hidden_size), np.float32)
    last_token = np.zeros(num_rows, np.int32)
    ints = np.zeros((NUM_SAMPLING_INTS, num_rows - 1), np.int32)
    floats = np.zeros((NUM_SAMPLING_FLOATS, num_rows - 1), np.float32)
    with pytest.raises(TypeError):
        program(spec.model.params, hidden, last_token, ints, floats)


def test_sampling_does_not_copy_parameters(spec):
    compiled = lower_sample(spec, 4).compile()
    vocabulary = f"{spec.model.config.vocab_size},{spec.model.config.hidden_size}"
    assert not re.findall(rf"= f32\[{vocabulary}\]\S* copy\(", compiled.as_text())


def test_temporary_memory_is_measured(spec):
    """What a device's pool is sized by: at least the logits of all rows."""
    logits = spec.num_slots * spec.model.config.vocab_size * 4
    assert measured_program_bytes(spec, Lowered.compile) >= logits


def test_pools_keep_their_place(llm):
    """Donated and updated in place: the buffers of the first layer never move."""
    from jpaged.sampling_params import SamplingParams

    runner = llm.engine.core._runner

    def address():
        return runner._pools[0].addressable_data(0).unsafe_buffer_pointer()

    before = address()
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=9), use_tqdm=False)
    assert address() == before
    assert isinstance(runner._pools[0], jax.Array)
