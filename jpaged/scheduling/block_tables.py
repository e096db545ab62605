"""The blocks of requests: how they get them, share them, grow and give them back.

Host side only: imports no JAX. Who gets blocks, and when, is up to the scheduler.
"""

from collections.abc import Iterable, Sequence

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefix_cache import PrefixCache, PrefixMatch
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledRequest

Copies = list[tuple[int, int]]


class BlockTables:
    """Keeps `Request.block_ids` and what goes with it in step with the pool."""

    def __init__(
        self, block_pool: BlockPool, *, block_size: int, enable_prefix_caching: bool
    ) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        self.prefix_cache = (
            PrefixCache(block_pool, block_size=block_size) if enable_prefix_caching else None
        )

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_reported(self, num_cached_tokens: int) -> int:
        """Return how many of the tokens found in the prefix cache clients and metrics learn of.

        Only whole blocks count: exact numbers would tell a client whether its guess of one more
        token of another client's prompt is right, so it could read the prompt token by token.
        """
        return num_cached_tokens // self.block_size * self.block_size

    def register(self, request: Request) -> None:
        """Let others find what launched steps have written for the request."""
        if self.prefix_cache is not None:
            self.prefix_cache.register(request)

    def keep_scores(self, request: Request, positions: range) -> None:
        """Let others find log-probabilities of the prompt that have become known."""
        if self.prefix_cache is not None:
            self.prefix_cache.keep_scores(request, positions)

    def match(self, request: Request) -> PrefixMatch:
        """What the request need not compute, as it is in the pool."""
        return PrefixMatch() if self.prefix_cache is None else self.prefix_cache.match(request)

    def num_new_blocks(self, request: Request, match: PrefixMatch) -> int:
        """Blocks to allocate for the request's tokens so far."""
        return self.num_blocks(request.num_tokens) - len(match.blocks)

    def num_free_besides(self, match: PrefixMatch) -> int:
        """Blocks that are free for others once those of the match are held."""
        return self.block_pool.num_free - sum(map(self.block_pool.is_free, match.blocks))

    def start(self, request: Request, match: PrefixMatch, copies: Copies) -> None:
        """Give the request room for all its tokens, its beginning computed already."""
        num_new_blocks = self.num_new_blocks(request, match)
        self.block_pool.retain(match.blocks)
        new_blocks = self.block_pool.allocate(num_new_blocks)
        request.block_ids = match.blocks + new_blocks
        request.num_computed_tokens = match.num_tokens
        request.num_registered_blocks = len(match.blocks)
        request.append_scores(0, match.scores)
        # Even if it was just handed out anew, nobody writes to the block before the copy is made.
        if match.partial_block is not None:
            copies.append((match.partial_block, new_blocks[0]))
            self.block_pool.touch(match.partial_block)

    def restore(
        self,
        request: Request,
        positions: Sequence[int],
        targets: list[int | None],
        known: Sequence[int],
    ) -> None:
        """Give a swapped request blocks for what it had computed, and for its tokens so far.

        positions: its table, as positions in what was swapped out together. targets: the block
        that each position's content is to go to, filled in here; requests share it as before.
        known: blocks of the pool that have its beginning already, which it shares.
        """
        self.block_pool.retain(known)
        request.block_ids = list(known)
        for position in positions[len(known) :]:
            target = targets[position]
            if target is None:
                [target] = self.block_pool.allocate(1)
                targets[position] = target
            else:
                self.block_pool.retain([target])
            request.block_ids.append(target)
        num_missing = self.num_blocks(request.num_tokens) - len(request.block_ids)
        request.block_ids += self.block_pool.allocate(num_missing)
        request.num_registered_blocks = len(known)

    def share(self, request: Request, parent: Request) -> None:
        """Let the request have all blocks of another one. Who writes first gets a copy."""
        self.block_pool.retain(parent.block_ids)
        request.block_ids = list(parent.block_ids)
        request.num_registered_blocks = 0

    def num_blocks_to_grow(self, request: Request) -> int:
        """0 or 1: whether the slot of the request's next token to compute is still to be had."""
        tail = request.num_computed_tokens // self.block_size
        return int(tail == len(request.block_ids) or self._is_shared(request.block_ids[tail]))

    def grow(self, request: Request, copies: Copies) -> None:
        """Give the request a slot of its own for its next token: in a new block, or in a copy of
        one that it shares. The caller has seen to it that a block is free."""
        tail = request.num_computed_tokens // self.block_size
        if tail == len(request.block_ids):
            request.block_ids.extend(self.block_pool.allocate(1))
        elif self._is_shared(request.block_ids[tail]):
            # A new list, as the table changes before its end.
            [copy] = self.block_pool.allocate(1)
            shared = request.block_ids[tail]
            copies.append((shared, copy))
            request.block_ids = [*request.block_ids[:tail], copy, *request.block_ids[tail + 1 :]]
            self.block_pool.release([shared])

    def reorder(self, beams: Sequence[Request], parents: Sequence[int]) -> None:
        """Beam i goes on as beam parents[i]: it shares that one's blocks from now on.

        Beams beyond the parents hold nothing any more.
        """
        states = [
            (list(beam.block_ids), list(beam.block_digests), beam.num_registered_blocks)
            for beam in (beams[parent] for parent in parents)
        ]
        for beam in beams:
            self.register(beam)
        for block_ids, _, _ in states:
            self.block_pool.retain(block_ids)
        for beam in beams:
            self.block_pool.release(reversed(beam.block_ids))
            beam.block_ids = []
        for beam, state in zip(beams, states, strict=False):
            beam.block_ids, beam.block_digests, beam.num_registered_blocks = state

    def written(self, request: Request, copies: Copies) -> list[int]:
        """The blocks that hold what launched steps have computed for the request."""
        # A copy of the step that is being planned is not made yet: the original has it all.
        originals = {copy: source for source, copy in copies}
        num_blocks = self.num_blocks(request.num_computed_tokens)
        return [originals.get(block, block) for block in request.block_ids[:num_blocks]]

    def release(self, request: Request) -> None:
        """Give everything back. The content stays known until the blocks are handed out again."""
        self.register(request)
        # Tails first, to be evicted first: a head is of use without its tail, not the reverse.
        self.block_pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_registered_blocks = 0

    def fill(self, requests: Sequence[Request]) -> float:
        """Share of the slots of held blocks that hold tokens, 0 to 1; 1 when none are held.

        A block that several requests hold counts once.
        """
        num_empty: dict[int, int] = {}
        for request in requests:
            num_computed = request.num_computed_tokens
            for index in range(num_computed // self.block_size, len(request.block_ids)):
                filled = max(0, num_computed - index * self.block_size)
                block = request.block_ids[index]
                empty = min(num_empty.get(block, self.block_size), self.block_size - filled)
                num_empty[block] = empty
        num_slots = self.block_pool.num_used * self.block_size
        return 1 - sum(num_empty.values()) / num_slots if num_slots else 1.0

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise if a block is lost, doubled, held by nobody, or not what it is known as."""
        self.block_pool.check_integrity(request.block_ids for request in requests)
        for request in requests:
            next_block = request.num_computed_tokens // self.block_size
            assert self.num_blocks(request.num_computed_tokens) <= len(request.block_ids), (
                f"{request.request_id}: computed tokens without a block"
            )
            assert request.num_registered_blocks <= next_block, request.request_id
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(requests)

    def check_writes(self, rows: Iterable[ScheduledRequest]) -> None:
        """Raise if a row of a step would write to a block that somebody else reads."""
        for row in rows:
            first, last = row.start, row.start + row.num_tokens - 1
            # Forks read what the row writes, from the next step on.
            num_holders = 1 + len(row.forks)
            for index in range(first // self.block_size, last // self.block_size + 1):
                block = row.request.block_ids[index]
                count = self.block_pool.reference_count(block)
                assert count == num_holders, (
                    f"{row.request.request_id} writes to block {block}, which has {count} holders"
                )

    def is_held(self, block: int) -> bool:
        return self.block_pool.reference_count(block) > 0

    def _is_shared(self, block: int) -> bool:
        return self.block_pool.reference_count(block) > 1
