"""Prefix cache: finds the blocks that hold the K/V of a request's first tokens. Imports no JAX.

A full block is identified by a digest of its parent's digest and its own token ids, so that equal
digests mean equal prefixes. The first parent is a digest of all else that K/V depend on, such as
the cache salt: requests with different salts share nothing. Digests are 128 bits of BLAKE2b, for
which nobody can construct a collision, as they could for Python's `hash`.

Behind the last full block that matches, a block may match in part. It is copied, and the request
continues in the copy.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from os.path import commonprefix
from typing import NamedTuple

from jpaged.outputs import TokenLogprobs
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.kept_logprobs import KeptLogprobs, Score
from jpaged.scheduling.request import Request

DIGEST_BYTES = 16
# Candidates for a partial match that are compared, newest first.
MAX_COMPARED_BLOCKS = 16
# A partial match has at least block_size / MIN_COPIED_SHARE tokens: to copy a block costs about as
# much as to compute a few tokens.
MIN_COPIED_SHARE = 4


@dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix of a request.

    blocks: full blocks that the request shares, in order.
    partial_block: block whose first tokens come next, to be copied; None if there is none.
    num_tokens: tokens of the prefix.
    scores: log-probabilities of the prefix's tokens, for a request that wants them.
    """

    blocks: list[int] = field(default_factory=list)
    partial_block: int | None = None
    num_tokens: int = 0
    scores: list[Score] = field(default_factory=list)


class CachedBlock(NamedTuple):
    """Content of a registered block. parent: digest of the block before it."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]

    @property
    def family(self) -> tuple[bytes, int]:
        """Key of all blocks with the same parent and the same first token."""
        return self.parent, self.token_ids[0]


class PrefixCache:
    """Registers the full blocks of requests, and matches other requests against them."""

    def __init__(self, block_pool: BlockPool, *, block_size: int) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        # By block. An entry is stale once the pool has given the block another digest or none.
        self._entries: dict[int, CachedBlock] = {}
        self._families: dict[tuple[bytes, int], dict[int, None]] = {}
        self._logprobs = KeptLogprobs()

    def match(self, request: Request) -> PrefixMatch:
        """Return the longest cached prefix of a request.

        It never has the last token, which must be computed to get its logits.
        """
        size, most = self.block_size, len(request.token_ids) - 1
        self._extend_digests(request, most // size)
        blocks = []
        for digest in request.block_digests[: most // size]:
            block = self.block_pool.find(digest)
            if block is None or not self._is_usable(block, request):
                break
            blocks.append(block)
        num_tokens = len(blocks) * size
        parent = request.block_digests[len(blocks) - 1] if blocks else root_digest_of(request)
        rest = tuple(request.token_ids[num_tokens : min(num_tokens + size, most)])
        partial_block, num_copied = self._best_beginning(parent, rest, request)
        match = PrefixMatch(blocks, partial_block, num_tokens + num_copied)
        return self._with_scores(match, request) if request.needs_scores else match

    def register(self, request: Request) -> None:
        """Let other requests match the blocks that launched steps have filled for this one.

        Blocks with a token whose id is known on the device only are registered later.
        """
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        num_blocks = num_known // self.block_size
        if num_blocks > request.num_registered_blocks:
            self._extend_digests(request, num_blocks)
            for index in range(request.num_registered_blocks, num_blocks):
                self._register_block(request, index)
            request.num_registered_blocks = num_blocks

    def token_ids(self, block: int) -> tuple[int, ...]:
        """Return the token ids of a registered block."""
        return self._entries[block].token_ids

    def keep_scores(self, request: Request, positions: range) -> None:
        """Keep log-probabilities of the prompt with the blocks of their tokens.

        positions: those whose log-probabilities have become known.
        """
        assert request.num_prompt_logprobs is not None
        size = self.block_size
        num_blocks = positions.stop // size
        self._extend_digests(request, num_blocks)
        for index in range(positions.start // size, num_blocks):
            block = self.block_pool.find(request.block_digests[index])
            if block is not None and not self._logprobs.has(block, request.num_prompt_logprobs):
                scores = request.prompt_logprobs[index * size : (index + 1) * size]
                self._logprobs.keep(block, scores)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise if digests, families or the tokens of requests contradict an entry."""
        for block in self.block_pool.registered_blocks():
            entry = self._entries[block]
            assert entry.digest == self.block_pool.digest(block), f"{block=} has another digest"
            assert entry.digest == block_digest(entry.parent, entry.token_ids), f"{block=}"
            assert block in self._families[entry.family], f"{block=} is in no family"
        num_members = sum(map(len, self._families.values()))
        assert num_members == len(self._entries), f"{num_members=} {len(self._entries)=}"
        for request in requests:
            for index, block in enumerate(request.block_ids[: request.num_registered_blocks]):
                entry = self._current_entry(block)
                held = request.token_ids[index * self.block_size :][: self.block_size]
                assert entry is None or list(entry.token_ids) == held, (
                    f"request {request.request_id}: block {block} is known as {entry}, not {held}"
                )

    def _register_block(self, request: Request, index: int) -> None:
        block, digest = request.block_ids[index], request.block_digests[index]
        is_known = self.block_pool.find(digest) is not None
        if self.block_pool.register(block, digest) and not is_known:
            self._forget(block)
            parent = request.block_digests[index - 1] if index else root_digest_of(request)
            start = index * self.block_size
            token_ids = tuple(request.token_ids[start : start + self.block_size])
            entry = self._entries[block] = CachedBlock(digest, parent, token_ids)
            self._families.setdefault(entry.family, {})[block] = None

    def _is_usable(self, block: int, request: Request) -> bool:
        """Whether the block has the log-probabilities that the request wants besides K/V."""
        if not request.needs_scores:
            return True
        assert request.num_prompt_logprobs is not None
        return self._logprobs.has(block, request.num_prompt_logprobs)

    def _with_scores(self, match: PrefixMatch, request: Request) -> PrefixMatch:
        """Add log-probabilities to a match, and take away its last token.

        That token is computed again, as its logits score the first token behind the match.
        """
        blocks, partial_block = list(match.blocks), match.partial_block
        found = blocks if partial_block is None else [*blocks, partial_block]
        scores = [score for block in found for score in self._logprobs.of(block)][
            : match.num_tokens
        ]
        num_tokens = max(0, match.num_tokens - 1)
        if len(blocks) * self.block_size > num_tokens:
            partial_block = blocks.pop()
        if num_tokens % self.block_size == 0:
            partial_block = None
        number = request.num_prompt_logprobs
        return PrefixMatch(
            blocks,
            partial_block,
            num_tokens,
            [score and TokenLogprobs(score.logprob, score.top[:number]) for score in scores],
        )

    def _best_beginning(
        self, parent: bytes, wanted: tuple[int, ...], request: Request
    ) -> tuple[int | None, int]:
        """Return the child of `parent` that matches most tokens of `wanted`, and their number."""
        best, most = None, max(1, self.block_size // MIN_COPIED_SHARE) - 1
        family = self._families.get((parent, wanted[0])) if len(wanted) > most else None
        for block in list(islice(reversed(family), MAX_COMPARED_BLOCKS)) if family else ():
            entry = self._current_entry(block)
            if entry is None:
                self._forget(block)
                continue
            num_equal = len(commonprefix([entry.token_ids, wanted]))
            if num_equal > most and self._is_usable(block, request):
                best, most = block, num_equal
        return best, most if best is not None else 0

    def _current_entry(self, block: int) -> CachedBlock | None:
        entry = self._entries.get(block)
        is_current = entry is not None and self.block_pool.digest(block) == entry.digest
        return entry if is_current else None

    def _forget(self, block: int) -> None:
        """Drop a stale entry."""
        self._logprobs.drop(block)
        entry = self._entries.pop(block, None)
        if entry is not None:
            family = self._families[entry.family]
            del family[block]
            if not family:
                del self._families[entry.family]

    def _extend_digests(self, request: Request, num_blocks: int) -> None:
        """Compute the digests of the request's first blocks that it does not have yet."""
        digests, size = request.block_digests, self.block_size
        for index in range(len(digests), num_blocks):
            parent = digests[-1] if digests else root_digest_of(request)
            tokens = request.token_ids[index * size : (index + 1) * size]
            digests.append(block_digest(parent, tokens))


def root_digest_of(request: Request) -> bytes:
    """Return the parent digest of the request's first block, computed once."""
    if request.root_digest is None:
        request.root_digest = root_digest(request.cache_keys)
    return request.root_digest


def root_digest(cache_keys: Mapping[str, str]) -> bytes:
    """Return the digest that is the parent of first blocks.

    The length in front of each tag and value keeps different keys from giving the same bytes.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for tag, value in sorted(cache_keys.items()):
        for part in (tag.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of a full block with these tokens behind this parent."""
    content = parent + array("i", token_ids).tobytes()
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
