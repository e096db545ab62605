"""What the host packs for a step is what the device unpacks, and no more than what has changed."""

import jax.numpy as jnp
import numpy as np

from jpaged.execution.packing import PackedArrays, pack_step
from jpaged.execution.slot_mirror import SlotMirror
from jpaged.execution.slot_state import SlotColumn, SlotShape, SlotState
from jpaged.execution.step_inputs import (
    ForwardInput,
    ForwardShape,
    Outputs,
    sampling_input,
    unpack_forward,
)
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest

NUM_SLOTS = 4
BLOCK_SIZE = 4
SLOTS = SlotShape(NUM_SLOTS, num_table_blocks=5)
SHAPE = ForwardShape(num_tokens=12, num_rows=4, num_outputs=10, decode_only=False)
NUM_EARLY_WRITES = 8


class Device:
    """The slots' part of a device, and the mirror that the host has of it."""

    def __init__(self) -> None:
        self.mirror = SlotMirror(SLOTS, block_size=BLOCK_SIZE)
        self.state = SlotState.zeros(SLOTS)

    def pack(self, batch: ScheduledBatch) -> PackedArrays:
        return pack_step(
            batch, batch.sampled, SHAPE, self.mirror, num_early_writes=NUM_EARLY_WRITES
        )

    def step(self, batch: ScheduledBatch) -> ForwardInput:
        arrays = self.pack(batch)
        for writes in arrays.early_writes:
            self.state = self.state.write(jnp.array(writes))
        inputs, self.state = unpack_forward(jnp.array(arrays.forward), self.state, SHAPE)
        return inputs

    def outputs(self, batch: ScheduledBatch) -> Outputs:
        return self.step(batch).outputs(jnp.zeros((SHAPE.num_tokens, 1)))

    def shown_table(self, request: Request, start: int) -> list[int]:
        """The blocks that a decode at position `start` reads."""
        batch = ScheduledBatch()
        batch.add_decode(ScheduledRequest(request, start, 1, is_sampled=True))
        tables = self.step(batch).attention.block_tables
        return tables[0].tolist()[: start // BLOCK_SIZE + 1]


def make_request(slot: int, first_token: int, num_tokens: int, seed: int = 0, **params) -> Request:
    token_ids = list(range(first_token, first_token + num_tokens))
    params = SamplingParams(**{"temperature": 0.5, "max_tokens": 9, **params})
    request = Request("r", token_ids, params, max_tokens=9, seed=seed)
    request.slot = slot
    request.block_ids = [10 * slot + number for number in range(1, num_tokens // BLOCK_SIZE + 2)]
    return request


def mixed_batch() -> ScheduledBatch:
    """A decode whose token only the device knows; tokens 4..8 of a prompt, to be scored; and a
    whole prompt."""
    batch = ScheduledBatch()
    decode = make_request(3, 10, 6, seed=(5 << 32) + 2**31 + 1)
    chunk = make_request(0, 30, 12, seed=7, prompt_logprobs=2)
    whole = make_request(2, 50, 3, seed=7, top_k=4, logprobs=1)
    batch.add_decode(ScheduledRequest(decode, 6, 1, is_sampled=True))
    batch.add_prefill(ScheduledRequest(chunk, 4, 5, is_sampled=False, scored=range(5, 10)))
    batch.add_prefill(ScheduledRequest(whole, 0, 3, is_sampled=True))
    return batch


def test_a_mixed_batch():
    """O-01, O-13, O-15: tokens, positions and blocks of each row, and its own seed."""
    device = Device()
    last_tokens = jnp.array([100, 101, 102, 103], jnp.int32)
    device.state = device.state.with_column(
        SlotColumn.LAST_TOKEN, jnp.arange(NUM_SLOTS), last_tokens
    )
    unpacked = device.step(mixed_batch())
    padding = [0] * 3
    assert unpacked.token_ids.tolist() == [103, *range(34, 39), 50, 51, 52, *padding]
    assert unpacked.rows.tolist() == [0, *[1] * 5, *[2] * 3, *[4] * 3]
    assert unpacked.positions.tolist() == [6, *range(4, 9), 0, 1, 2, *padding]
    # Two that are sampled, then the tokens before those that are scored.
    assert unpacked.output_tokens.tolist()[:7] == [0, 8, 1, 2, 3, 4, 5]
    attention = unpacked.attention
    tables = attention.block_tables
    assert tables[0, :2].tolist() == [31, 32]
    assert tables[1, :3].tolist() == [1, 2, 3]
    assert tables[2, :1].tolist() == [21]
    assert tables[3].tolist() == [0] * SLOTS.num_table_blocks
    assert attention.context_lens.tolist() == [7, 9, 3, 0]
    assert attention.query_starts.tolist() == [0, 1, 6, 9, 9]
    assert int(attention.num_decodes) == 1


def test_sampling_of_a_mixed_batch():
    """O-15, O-25"""
    device = Device()
    outputs = device.outputs(mixed_batch()).first(8)
    sampling = sampling_input(outputs, device.state)
    assert sampling.slots.tolist() == [3, 2, *[NUM_SLOTS] * 6]
    assert sampling.positions.tolist()[:2] == [7, 3]
    assert sampling.seeds_low.tolist()[:2] == [1 - 2**31, 7]
    assert sampling.seeds_high.tolist()[:2] == [5, 0]
    assert sampling.top_k.tolist() == [0, 4, *[0] * 6]
    assert sampling.top_p.tolist() == [1.0] * 8
    assert sampling.num_logprobs.tolist() == [-1, 1, *[2] * 5, -1]
    assert sampling.targets.tolist() == [-1, -1, *range(35, 40), -1]
    assert sampling.temperature.tolist() == [0.5, 0.5, *[0.0] * 6]


def test_a_fork_samples_in_a_slot_of_its_own():
    """From the logits of its parent, with its own seed."""
    device = Device()
    parent, fork = make_request(1, 10, 3, seed=8), make_request(0, 10, 3, seed=9)
    batch = ScheduledBatch()
    batch.add_prefill(ScheduledRequest(parent, 0, 3, is_sampled=True, forks=[fork]))
    sampling = sampling_input(device.outputs(batch), device.state)
    assert sampling.slots.tolist()[:2] == [1, 0]
    assert sampling.positions.tolist()[:2] == [3, 3]
    assert sampling.seeds_low.tolist()[:2] == [8, 9]
    # It starts to be computed where the parent was, in whose step it was not counted.
    fork.num_in_flight_tokens = 1
    batch = ScheduledBatch()
    batch.add_decode(ScheduledRequest(fork, 3, 1, is_sampled=True))
    assert device.step(batch).attention.context_lens.tolist()[0] == 4


def test_a_slot_shows_the_blocks_of_its_request():
    """O-01: of a new request from the start, of one that goes on what is new, and of one that got
    a copy of a block the whole table."""
    device = Device()
    first, second = make_request(1, 10, 16), make_request(1, 10, 9)
    first.block_ids = [7, 8, 9]
    assert device.shown_table(first, 11) == [7, 8, 9]
    first.block_ids.append(4)
    assert device.shown_table(first, 12) == [7, 8, 9, 4]
    first.block_ids = [7, 8, 9, 5]
    assert device.shown_table(first, 13) == [7, 8, 9, 5]
    second.block_ids = [2, 3, 6]
    assert device.shown_table(second, 8) == [2, 3, 6]


def test_a_slot_has_the_parameters_of_its_request():
    """Even if they were those of another one before, in a step that is still on its way."""
    device = Device()
    shown = []
    for params in ({"top_p": 0.5, "seed": 3}, {"temperature": 0.0, "logprobs": 2, "top_k": 7}):
        batch = ScheduledBatch()
        request = make_request(2, 10, 3, **params)
        batch.add_prefill(ScheduledRequest(request, 0, 3, is_sampled=True))
        sampling = sampling_input(device.outputs(batch), device.state)
        columns = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.num_logprobs)
        shown.append([values.tolist()[0] for values in columns])
    assert shown == [[0.5, 0.5, 0, -1], [0.0, 1.0, 7, 2]]


def writes_of(forward: np.ndarray) -> int:
    addresses, _ = SHAPE.split(forward)["writes"]
    return int((addresses < SLOTS.num_addresses).sum())


def test_only_changes_are_sent():
    """A decode sends a new block, and nothing else of its slot."""
    device, request = Device(), make_request(1, 10, 7)
    device.shown_table(request, 6)
    counts = []
    for start in (7, 8, 9):
        request.token_ids.append(1)
        if start == 8:
            request.block_ids.append(5)
        batch = ScheduledBatch()
        batch.add_decode(ScheduledRequest(request, start, 1, is_sampled=True))
        counts.append(writes_of(device.pack(batch).forward))
    assert counts == [0, 1, 0]


def test_beams_that_swap_their_tables_send_what_differs():
    device = Device()
    beams = [make_request(slot, 10, 16) for slot in (0, 1)]
    for beam, tail in zip(beams, (4, 5), strict=True):
        beam.block_ids = [1, 2, 3, tail]
        device.shown_table(beam, 14)
    batch = ScheduledBatch()
    for beam, tail in zip(beams, (5, 4), strict=True):
        beam.block_ids = [1, 2, 3, tail]
        batch.add_decode(ScheduledRequest(beam, 15, 1, is_sampled=True))
    assert writes_of(device.pack(batch).forward) == 2


def test_changes_that_do_not_fit_go_ahead_of_the_step():
    device = Device()
    requests = [make_request(slot, 10, 19, seed=slot << 33) for slot in range(NUM_SLOTS)]
    batch = ScheduledBatch()
    for request in requests:
        batch.add_decode(ScheduledRequest(request, 18, 1, is_sampled=True))
    arrays = device.pack(batch)
    assert {each.shape for each in arrays.early_writes} == {(2, NUM_EARLY_WRITES)}
    device = Device()
    inputs = device.step(batch)
    assert inputs.attention.block_tables.tolist() == [request.block_ids for request in requests]
    assert inputs.attention.context_lens.tolist() == [19] * NUM_SLOTS
    num_early = -(-(writes_of(arrays.forward)) // NUM_EARLY_WRITES)
    assert len(arrays.early_writes) >= num_early
