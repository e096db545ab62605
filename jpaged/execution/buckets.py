"""Sizes that programs are compiled for. A batch runs in the smallest bucket that holds it."""

from bisect import bisect_left
from collections.abc import Sequence

SMALLEST_TOKEN_BUCKET = 16


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of decode and sampling programs: powers of two up to the limit."""
    return _doubling(1, max_num_seqs)


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Tokens of mixed programs: powers of two from 16 up to the limit."""
    return _doubling(min(SMALLEST_TOKEN_BUCKET, max_num_batched_tokens), max_num_batched_tokens)


def smallest_bucket(buckets: Sequence[int], size: int) -> int:
    index = bisect_left(buckets, size)
    assert index < len(buckets), f"{size=} exceeds the largest bucket, {buckets[-1]}"
    return buckets[index]


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)
