"""The prefix cache: what is found, what must not be, and answers that never change."""

from os.path import commonprefix

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import RequestError
from jpaged.outputs import TokenLogprobs
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.kept_logprobs import KeptLogprobs
from jpaged.scheduling.prefix_cache import PrefixCache, block_digest, root_digest
from jpaged.scheduling.request import Request
from tests.random_llama import save_random_llama

BLOCK_SIZE = 4


def make_request(token_ids, cache_keys=None) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request("r", list(token_ids), params, max_tokens=1, cache_keys=cache_keys)


def computed(cache: PrefixCache, token_ids, cache_keys=None) -> Request:
    """A request whose tokens are all computed, still holding its blocks."""
    request = make_request(token_ids, cache_keys)
    cached = cache.match(request).blocks
    cache.block_pool.retain(cached)
    num_blocks = -(-len(request.token_ids) // cache.block_size)
    request.block_ids = cached + cache.block_pool.allocate(num_blocks - len(cached))
    request.num_registered_blocks = len(cached)
    request.num_computed_tokens = len(request.token_ids)
    cache.register(request)
    return request


@settings(max_examples=300)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.sampled_from("ab")),
        min_size=1,
        max_size=12,
    )
)
def test_matches_are_the_longest_common_prefix(prompts):
    """O-08: the same block behind another one is another block; salts never meet."""
    cache = PrefixCache(BlockPool(200), block_size=BLOCK_SIZE)
    seen: list[tuple[list[int], str]] = []
    for tokens, salt in prompts:
        match = cache.match(make_request(tokens, {"cache_salt": salt}))
        best = 0
        for other, other_salt in seen:
            full = other[: len(other) // BLOCK_SIZE * BLOCK_SIZE]  # others' tails are not known
            if salt == other_salt:
                best = max(best, len(commonprefix([tokens[:-1], full])))
        assert match.num_tokens == best
        assert len(match.blocks) == best // BLOCK_SIZE
        assert (match.partial_block is not None) == (best % BLOCK_SIZE > 0)
        request = computed(cache, tokens, {"cache_salt": salt})
        for index, digest in enumerate(request.block_digests):
            start = index * BLOCK_SIZE
            parent = request.block_digests[index - 1] if index else None
            parent = parent or root_digest({"cache_salt": salt})
            assert digest == block_digest(parent, tokens[start : start + BLOCK_SIZE])
        seen.append((tokens, salt))
        cache.check_integrity([request])


def test_only_computed_and_known_tokens_are_registered():
    cache = PrefixCache(BlockPool(20), block_size=BLOCK_SIZE)
    request = make_request(range(8))
    request.block_ids = cache.block_pool.allocate(3)
    for num_computed, num_registered in [(3, 0), (4, 1), (7, 1), (8, 2)]:
        request.num_computed_tokens = num_computed
        cache.register(request)
        assert request.num_registered_blocks == num_registered
    # The next four are computed, but only the device knows what they are.
    request.num_computed_tokens, request.num_in_flight_tokens = 12, 4
    cache.register(request)
    assert request.num_registered_blocks == 2


def test_a_beginning_is_copied_if_it_is_long_enough():
    """Blocks of 16: sharing less than 4 tokens of one is not worth a copy; the best one wins."""
    cache = PrefixCache(BlockPool(40), block_size=16)
    first = computed(cache, range(40))
    other = computed(cache, [*range(16 + 6), *range(100, 130)])
    for num_equal, block, num_copied in [
        (3, None, 0),
        (4, other.block_ids[1], 4),  # both begin so: the newest one
        (7, first.block_ids[1], 7),
        (16, None, 0),  # a full block, found as such
    ]:
        match = cache.match(make_request([*range(16 + num_equal), 90, 91]))
        expected = first.block_ids[: 2 if num_equal == 16 else 1]
        assert (match.blocks, match.partial_block) == (expected, block)
        assert match.num_tokens == len(expected) * 16 + num_copied


def test_many_continuations_are_not_all_compared():
    """A popular prefix may have thousands: only the newest are looked at, and blocks that were
    handed out again are forgotten on the way."""
    pool = BlockPool(64)
    cache = PrefixCache(pool, block_size=16)
    for number in range(40):
        request = computed(cache, [*range(16), 1, 2, 3, 4, 5, 6, *range(number, number + 20)])
        pool.release(reversed(request.block_ids))
        cache.check_integrity([])
    probe = make_request([*range(16), 1, 2, 3, 4, 5, 6, 0, 1, 2, 3])
    assert cache.match(probe).num_tokens == 16 + 6  # the one from 0 on is too old
    pool.release(pool.allocate(64))
    assert cache.match(probe).num_tokens == 0
    cache.check_integrity([])


def test_digests_cannot_be_confused():
    assert root_digest({"a": "bc"}) != root_digest({"ab": "c"})
    assert root_digest({"a": "b", "c": "d"}) == root_digest({"c": "d", "a": "b"})
    assert root_digest({}) != root_digest({"cache_salt": ""})
    assert len(block_digest(root_digest({}), [1, 2])) * 8 >= 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


def tokens(length: int, first: int = 0) -> dict:
    return {"prompt_token_ids": [(first + 7 * index) % 200 for index in range(length)]}


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(llm, prompt, params=GREEDY):
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize("length,cached", [(31, 16), (32, 16), (33, 32)])
def test_repeating_a_prompt(folder, make_llm, length, cached):
    """O-05: whole blocks are counted as found, and the answer stays the same."""
    cold = make_llm(folder, enable_prefix_caching=False)
    expected, hits = answer(cold, tokens(length))
    assert hits == 0
    llm = make_llm(folder)
    salted = {**tokens(length), "cache_salt": f"repeat-{length}"}
    assert answer(llm, salted) == (expected, 0)
    for params in (GREEDY, GREEDY, GREEDY):
        assert answer(llm, salted, params) == (expected, cached)
    one = SamplingParams(temperature=0, max_tokens=1)
    assert answer(llm, salted, one) == (expected[:1], cached)


def test_evicted_blocks_are_not_found(folder, make_llm):
    """O-07: a pool of 8 blocks; B and C evict A."""
    llm = make_llm(folder, num_gpu_blocks_override=8)
    cold = make_llm(folder, enable_prefix_caching=False)
    prompts = {name: tokens(64, first) for name, first in [("a", 1), ("b", 2), ("c", 3)]}
    expected = {name: answer(cold, prompt)[0] for name, prompt in prompts.items()}
    for name in "abcabba":
        token_ids, num_cached = answer(llm, prompts[name])
        assert token_ids == expected[name]
        assert num_cached <= 48
        llm.engine.core.scheduler.check_integrity()


def test_salts_separate_tenants(folder, make_llm):
    """O-08"""
    llm = make_llm(folder)
    hits = []
    for salt in ("tenant-a", "tenant-b", None, "tenant-a", "tenant-b", None):
        prompt = tokens(64, first=50) | ({} if salt is None else {"cache_salt": salt})
        hits.append(answer(llm, prompt)[1])
    assert hits == [0, 0, 0, 48, 48, 48]
    for salt in (7, "", ["a"]):
        with pytest.raises(RequestError, match="cache_salt"):
            answer(llm, tokens(3) | {"cache_salt": salt})


def test_a_weak_digest_would_be_noticed(folder, make_llm, monkeypatch):
    """O-08: with 4-bit digests answers go wrong, so the comparison below can fail; with the real
    ones they do not."""
    cold = make_llm(folder, enable_prefix_caching=False)
    llm = make_llm(folder, check_invariants=False)  # they would notice, too
    random = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": random.integers(0, 200, 48).tolist()} for _ in range(30)]
    expected = [answer(cold, prompt)[0] for prompt in prompts]
    assert [answer(llm, prompt)[0] for prompt in prompts] == expected
    monkeypatch.setattr(
        "jpaged.scheduling.prefix_cache.block_digest",
        lambda parent, token_ids: bytes([block_digest(parent, token_ids)[0] % 16]),
    )
    salted = [prompt | {"cache_salt": "weak"} for prompt in prompts]
    assert [answer(llm, prompt)[0] for prompt in salted] != expected


def test_answers_in_a_batch_with_shared_prefixes(folder, make_llm):
    """Nothing scheduled in the step that writes a block may match it; later steps may."""
    cold = make_llm(folder, enable_prefix_caching=False)
    llm = make_llm(folder)
    shared = tokens(40, first=90)["prompt_token_ids"]
    prompts = [{"prompt_token_ids": [*shared, number, number]} for number in range(12)]
    expected = [answer(cold, prompt)[0] for prompt in prompts]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 0 and outputs[-1].num_cached_tokens == 32


def test_preempted_requests_are_no_hits(folder, make_llm):
    """Recomputation is not counted as a hit, though it finds its own blocks."""
    llm = make_llm(folder, num_gpu_blocks_override=12)
    cold = make_llm(folder, enable_prefix_caching=False)
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [tokens(64, first=10 * number) for number in range(4)]
    expected = [answer(cold, prompt, long)[0] for prompt in prompts]
    outputs = llm.generate(prompts, long, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0]


def test_kept_logprobs_are_limited():
    """The oldest go first; what is kept of a block is replaced, not added to."""
    kept = KeptLogprobs(limit=60)
    scores = [None, *(TokenLogprobs(-1.0, ((0, -1.0), (1, -2.0))) for _ in range(9))]  # 27
    for block in (1, 2, 2):
        kept.keep(block, scores)
    assert kept.has(1, 2) and kept.has(2, 2) and not kept.has(2, 3)
    kept.keep(3, scores)
    assert not kept.has(1, 0) and kept.has(2, 2) and kept.of(3) == tuple(scores)
    kept.drop(2)
    kept.keep(4, scores)
    assert kept.has(3, 2) and kept.has(4, 2)
