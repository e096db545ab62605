"""Sizes that programs are compiled for. A batch runs in the smallest bucket that holds it."""

from bisect import bisect_left
from collections.abc import Sequence

SMALLEST_TOKEN_BUCKET = 16


def row_buckets(max_num_seqs: int, growth: int) -> tuple[int, ...]:
    """Rows of decode and sampling programs: powers of `growth` up to the limit."""
    return _growing(1, max_num_seqs, growth)


def token_buckets(max_num_batched_tokens: int, growth: int) -> tuple[int, ...]:
    """Tokens of mixed programs: from 16 up to the limit, each `growth` times the one before."""
    smallest = min(SMALLEST_TOKEN_BUCKET, max_num_batched_tokens)
    return _growing(smallest, max_num_batched_tokens, growth)


def smallest_bucket(buckets: Sequence[int], size: int) -> int:
    index = bisect_left(buckets, size)
    assert index < len(buckets), f"{size=} exceeds the largest bucket, {buckets[-1]}"
    return buckets[index]


def _growing(first: int, last: int, growth: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= growth
    return (*sizes, last)
