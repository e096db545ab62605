"""Blocks that a request can share with siblings that run. Host side only: imports no JAX.

Siblings begin alike: with the prompt, and with part of the answer if one was forked from the
other or if both are beams of one search. So a request that starts late, or comes back after a
preemption, shares the full blocks of that beginning, whether the prefix cache is on or off.
"""

from collections.abc import Iterator

from jpaged.scheduling.request import Request, RequestStatus


def shared_blocks(request: Request, block_size: int) -> list[int]:
    """Return the blocks of the running sibling that has most of the request's beginning.

    Only full blocks that launched steps have written, and not the block of the request's last
    token, which is computed again to get its logits.
    """
    best: list[int] = []
    for sibling, num_shareable in _shareable_blocks(request, block_size):
        num_blocks = min(num_shareable, sibling.num_computed_tokens // block_size)
        if num_blocks > len(best):
            best = sibling.block_ids[:num_blocks]
    return best


def is_sharing_soon(request: Request, block_size: int) -> bool:
    """Whether a running sibling is still computing what the request can share afterwards.

    A request of which nothing was computed yet even shares the logits of the prompt's end.
    """
    return any(
        sibling.num_computed_tokens // block_size < num_shareable
        or (request.is_fresh and sibling.num_computed_tokens < sibling.num_prompt_tokens)
        for sibling, num_shareable in _shareable_blocks(request, block_size)
    )


def _shareable_blocks(request: Request, block_size: int) -> Iterator[tuple[Request, int]]:
    """Yield running siblings, and the full blocks that each has in common with the request."""
    for sibling in request.siblings if len(request.siblings) > 1 else ():
        if sibling is not request and sibling.status is RequestStatus.RUNNING:
            num_common = min(_num_common_tokens(request, sibling), len(request.token_ids) - 1)
            yield sibling, num_common // block_size


def _num_common_tokens(request: Request, sibling: Request) -> int:
    """Return the length of the common beginning of two siblings, which have the same prompt."""
    count = request.num_prompt_tokens
    most = min(len(request.token_ids), len(sibling.token_ids))
    while count < most and request.token_ids[count] == sibling.token_ids[count]:
        count += 1
    return count
