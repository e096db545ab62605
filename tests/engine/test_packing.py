"""What the host packs for a step is what the device unpacks."""

import jax.numpy as jnp
import numpy as np

from jpaged.execution.packing import pack_forward, pack_sampling
from jpaged.execution.slot_tables import SlotTables
from jpaged.execution.step_inputs import ForwardShape, unpack_forward, unpack_sampling
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest

NUM_SLOTS = 4


def make_request(slot: int, first_token: int, num_tokens: int, seed: int, **params) -> Request:
    token_ids = list(range(first_token, first_token + num_tokens))
    params = SamplingParams(**{"temperature": 0.5, "max_tokens": 9, **params})
    request = Request("r", token_ids, params, max_tokens=9, seed=seed)
    request.slot = slot
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
    batch = mixed_batch()
    shape = ForwardShape(
        num_tokens=12, num_rows=4, num_table_blocks=3, num_outputs=10, decode_only=False
    )
    tables = np.arange(NUM_SLOTS * 3, dtype=np.int32).reshape(NUM_SLOTS, 3)
    last_token = jnp.array([100, 101, 102, 103], jnp.int32)
    unpacked = unpack_forward(jnp.array(pack_forward(batch, shape, tables)), last_token, shape)
    padding = [0] * 3
    assert unpacked.token_ids.tolist() == [103, *range(34, 39), 50, 51, 52, *padding]
    assert unpacked.rows.tolist() == [0, *[1] * 5, *[2] * 3, *[4] * 3]
    assert unpacked.positions.tolist() == [6, *range(4, 9), 0, 1, 2, *padding]
    # Two that are sampled, then the tokens before those that are scored.
    assert unpacked.output_tokens.tolist()[:7] == [0, 8, 1, 2, 3, 4, 5]
    attention = unpacked.attention
    assert attention.block_tables.tolist()[:3] == tables[[3, 0, 2]].tolist()
    assert attention.context_lens.tolist() == [7, 9, 3, 0]
    assert attention.query_starts.tolist() == [0, 1, 6, 9, 9]
    assert int(attention.num_decodes) == 1


def test_sampling_of_a_mixed_batch():
    """O-15, O-25"""
    ints, floats = pack_sampling(mixed_batch(), num_rows=8, padding_slot=NUM_SLOTS)
    sampling = unpack_sampling(jnp.array(ints), jnp.array(floats))
    assert sampling.slots.tolist() == [3, 2, *[NUM_SLOTS] * 6]
    assert sampling.positions.tolist()[:2] == [7, 3]
    assert sampling.seeds_low.tolist()[:2] == [1 - 2**31, 7]
    assert sampling.seeds_high.tolist()[:2] == [5, 0]
    assert sampling.top_k.tolist()[:2] == [0, 4]
    assert sampling.num_logprobs.tolist() == [-1, 1, *[2] * 5, -1]
    assert sampling.targets.tolist() == [-1, -1, *range(35, 40), -1]
    assert sampling.temperature.tolist() == [0.5, 0.5, *[0.0] * 6]


def test_a_slot_shows_the_blocks_of_its_request():
    """O-01: of a new request from the start, of one that goes on what is new, and of one that got
    a copy of its last block the whole table."""
    tables = SlotTables(NUM_SLOTS, 5)

    def shown(request: Request) -> list[int]:
        tables.update([ScheduledRequest(request, 0, 1, is_sampled=True)])
        return tables.array[request.running_slot].tolist()[: len(request.block_ids)]

    first, second = (make_request(1, 10, 3, seed=0) for _ in range(2))
    first.block_ids = [7, 8, 9]
    assert shown(first) == [7, 8, 9]
    first.block_ids.append(4)
    assert shown(first) == [7, 8, 9, 4]
    first.block_ids = [7, 8, 9, 5]
    assert shown(first) == [7, 8, 9, 5]
    second.block_ids = [2, 3, 6]
    assert shown(second) == [2, 3, 6]
