"""How full blocks are, by the engine's own meter, on lengths as of chat traffic (ShareGPT: 161
tokens in and 338 out on average). The meter must also read low where memory is wasted."""

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.block_tables import BlockTables
from jpaged.scheduling.prefix_cache import PrefixMatch
from jpaged.scheduling.request import Request
from jpaged.scheduling.request_group import RequestGroup
from jpaged.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
NUM_STEPS = 1500


class ReservingTables(BlockTables):
    """What engines without paging do: a request gets room for the longest text at once."""

    def num_new_blocks(self, request: Request, match: PrefixMatch) -> int:
        return self.num_blocks(MAX_MODEL_LEN)


def chat_lengths(count: int) -> list[tuple[int, int]]:
    random = np.random.default_rng(0)

    def lognormal(mean: float) -> np.ndarray:
        sigma = 0.9
        values = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(values, 4, 1000).astype(int)

    return list(zip(lognormal(161).tolist(), lognormal(338).tolist(), strict=True))


def mean_fill(scheduler: Scheduler) -> float:
    """Over time, with requests waiting all the while."""
    waiting = iter(chat_lengths(4000))
    readings = []
    for step in range(NUM_STEPS):
        while len(scheduler.waiting) < 8:
            num_input, num_output = next(waiting)
            params = SamplingParams(max_tokens=num_output)
            request = Request("r", [1] * num_input, params, max_tokens=num_output)
            scheduler.add(RequestGroup(0, [request]).requests[0])
        batch = scheduler.schedule()
        if step > NUM_STEPS // 4:
            readings.append(scheduler.block_fill)
        for request in batch.sampled:
            request.append_token(1)
            if request.is_finished:
                scheduler.retire(request)
    scheduler.check_integrity()
    return float(np.mean(readings))


def make() -> Scheduler:
    return Scheduler(
        BlockPool(2048), block_size=BLOCK_SIZE, max_num_seqs=64, max_num_batched_tokens=512
    )


def test_paged_blocks_are_full():
    assert mean_fill(make()) >= 0.96


def test_reserved_memory_is_mostly_empty():
    scheduler = make()
    scheduler.holdings.tables = ReservingTables(
        scheduler.block_pool, block_size=BLOCK_SIZE, enable_prefix_caching=False
    )
    assert 0.20 <= mean_fill(scheduler) <= 0.40


def test_shared_blocks_count_once():
    scheduler = make()
    requests = [
        Request("r", [1] * 24, SamplingParams(max_tokens=9), max_tokens=9) for _ in range(3)
    ]
    for request in RequestGroup(0, requests).requests:
        scheduler.add(request)
    assert scheduler.block_fill == 1.0
    scheduler.schedule()
    assert scheduler.block_fill == pytest.approx(24 / 32)
    for request in requests:
        request.append_token(1)
    scheduler.schedule()
    # One full block, shared, and a tail of nine tokens for each.
    assert scheduler.block_fill == pytest.approx((16 + 3 * 9) / 64)
