"""What the compiled programs look like: no copy of the pool, additive counts, fixed shapes."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.stages import Lowered

from jpaged.execution.executor import Executor
from jpaged.execution.programs import (
    MAX_EARLY_WRITES,
    ProgramSpec,
    lower_copy,
    lower_forward,
    lower_sample,
    lower_swap_in,
    lower_write,
)
from jpaged.execution.runner import Runner
from jpaged.execution.sampler import Samples
from jpaged.execution.slot_state import SlotState
from jpaged.execution.step_inputs import Outputs
from jpaged.models.llama import Llama
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from jpaged.startup.memory_plan import measured_program_bytes
from pallas_kernels.paged_attention import NO_WINDOW
from tests.execution.large_models import num_donated
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
    if program in ("decode", "mixed"):
        check_state_stays_in_place(compiled, spec, num_others=spec.kv_cache.num_layers)


@pytest.mark.parametrize("program", ["sample", "write"])
def test_programs_change_the_state_in_place(spec, program):
    lower = {"sample": lambda: lower_sample(spec, 8), "write": lambda: lower_write(spec)}
    check_state_stays_in_place(lower[program]().compile(), spec, num_others=0)


def check_state_stays_in_place(compiled, spec, *, num_others: int) -> None:
    """num_others: arrays that are donated besides the state."""
    assert num_donated(compiled) == num_others + len(SlotState._fields)
    tables = f"{spec.num_slots},{spec.num_table_blocks}"
    assert not re.findall(rf"= s32\[{tables}\]\S* copy\(", compiled.as_text())


def test_counts_of_programs_add_up(spec):
    """O-61: tokens, rows and sampling rows are bucketed apart."""
    spec = replace(spec, bucket_growth=2)
    assert spec.row_buckets == (1, 2, 4, 8)
    assert spec.token_buckets == (16, 32, 64)
    assert len(spec.forward_shapes()) == len(spec.row_buckets) + len(spec.token_buckets)
    assert spec.copy_buckets == (4, 8)
    num_forward = len(spec.forward_shapes())
    num_others = len(spec.copy_buckets) + 1  # and one that writes to the state
    assert spec.num_programs == num_forward + len(spec.row_buckets) + num_others


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
    program = llm.engine.core._runner.executor.programs.sample[num_rows]
    hidden = np.zeros((num_rows, spec.model.config.hidden_size), np.float32)
    numbers = np.zeros(num_rows - 1, np.int32)
    outputs = Outputs(hidden, positions=numbers, slots=numbers, targets=numbers)
    with pytest.raises(TypeError):
        program(spec.model.params, outputs, SlotState.zeros(spec.slot_shape))


def test_sampling_does_not_copy_parameters(spec):
    compiled = lower_sample(spec, 4).compile()
    vocabulary = f"{spec.model.config.vocab_size},{spec.model.config.hidden_size}"
    assert not re.findall(rf"= f32\[{vocabulary}\]\S* copy\(", compiled.as_text())


class CountedPrograms:
    """Stands for the programs of a spec and counts the bytes that they take from the host."""

    def __init__(self, spec: ProgramSpec) -> None:
        self.num_bytes = self.num_arrays = 0
        self.forward = dict.fromkeys(spec.forward_shapes(), self._forward)
        self.sample = dict.fromkeys(spec.row_buckets, self._sample)

    def _count(self, *arguments) -> None:
        leaves = jax.tree.leaves(arguments)
        arrays = [leaf for leaf in leaves if not isinstance(leaf, jax.Array)]
        self.num_arrays += len(arrays)
        self.num_bytes += sum(array.nbytes for array in arrays)

    def _forward(self, params, pools, state, packed):
        self._count(params, pools, state, packed)
        return None, pools, state

    def _sample(self, params, outputs, state):
        self._count(params, outputs, state)
        numbers, table = jnp.zeros(256, jnp.int32), jnp.zeros((256, 1))
        return Samples(numbers, table[:, 0], numbers[:, None], table), state

    def write(self, state, writes):
        self._count(state, writes)
        return state


@pytest.mark.parametrize("is_first", [False, True])
def test_bytes_of_a_step_do_not_depend_on_the_longest_context(llm, spec, is_first):
    """A step of 256 decodes takes one array of some numbers a row, and those that start once."""
    sizes = []
    for num_table_blocks in (64, 8192):  # 1K and 128K tokens
        sized = replace(spec, num_slots=256, num_table_blocks=num_table_blocks)
        executor = Executor(sized, llm.engine.core._runner.executor.programs)
        runner = Runner(sized, executor)
        requests = [make_request(slot, sized.kv_cache.block_size) for slot in range(256)]
        for start in (99, 100):
            programs = executor.programs = CountedPrograms(sized)
            batch = ScheduledBatch()
            for request in requests:
                batch.add_decode(ScheduledRequest(request, start, 1, is_sampled=True))
                request.num_in_flight_tokens += 1
            runner.launch(runner.pack(batch))
            if is_first:
                break
        sizes.append((programs.num_arrays, programs.num_bytes))
    [(num_arrays, num_bytes)] = set(sizes)
    num_early = num_arrays - 1
    assert num_early == (1 if is_first else 0)
    assert num_bytes <= 40 * 256 + num_early * 8 * MAX_EARLY_WRITES


def make_request(slot: int, block_size: int) -> Request:
    """A request of 100 tokens."""
    request = Request("r", [1] * 100, SamplingParams(seed=slot), max_tokens=9, seed=slot)
    request.slot = slot
    request.block_ids = [1 + slot] * (100 // block_size + 1)
    return request


def test_temporary_memory_is_measured(spec):
    """What a device's pool is sized by: at least the logits of all rows."""
    logits = spec.num_slots * spec.model.config.vocab_size * 4
    assert measured_program_bytes(spec, Lowered.compile) >= logits


def test_pools_and_state_keep_their_place(llm):
    """Donated and updated in place: the first layer's buffer never moves, nor does the state's."""
    runner = llm.engine.core._runner

    def address():
        arrays = runner.executor.pools[0], *runner.executor.state
        return [array.addressable_data(0).unsafe_buffer_pointer() for array in arrays]

    before = address()
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=9), use_tqdm=False)
    assert address() == before
