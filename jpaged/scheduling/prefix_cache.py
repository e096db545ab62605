"""Blocks whose content is known, found again by requests that begin alike. Imports no JAX.

A full block is named by a digest over the digest of the block before it and its own tokens, so
equal digests mean equal prefixes. The chain starts from what else the K/V depend on, such as the
request's cache salt: requests that differ in it never meet. Digests are 128 bits of BLAKE2b,
whose collisions cannot be made; Python's `hash` could be guessed and repeats on purpose.

Behind the last full block that matches, the beginning of another one may match as well: it is
copied, and the request goes on in the copy.
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
# Blocks that are compared in search of the one whose beginning matches best, newest first.
MAX_COMPARED_BLOCKS = 16
# A copy costs about as much as computing a few tokens more: shorter beginnings are not worth it.
MIN_COPIED_SHARE = 4  # of block_size


@dataclass(frozen=True)
class PrefixMatch:
    """What the pool has of a request's tokens.

    blocks: full blocks, in order, to be shared. partial_block: one whose beginning comes next and
    is to be copied, if there is one. num_tokens: tokens of all these together.
    scores: log-probabilities of the first tokens, for a request that wants them.
    """

    blocks: list[int] = field(default_factory=list)
    partial_block: int | None = None
    num_tokens: int = 0
    scores: list[Score] = field(default_factory=list)


class CachedBlock(NamedTuple):
    """What is in a registered block; `digest` is that of `parent` and `token_ids`."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]

    @property
    def family(self) -> tuple[bytes, int]:
        """Blocks of the same have at least one token more in common than their parent."""
        return self.parent, self.token_ids[0]


class PrefixCache:
    """Registers the full blocks of requests and matches new requests against them."""

    def __init__(self, block_pool: BlockPool, *, block_size: int) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        # By block. An entry is out of date once the pool finds its digest elsewhere or nowhere.
        self._entries: dict[int, CachedBlock] = {}
        self._families: dict[tuple[bytes, int], dict[int, None]] = {}
        self._logprobs = KeptLogprobs()

    def match(self, request: Request) -> PrefixMatch:
        """At most all tokens but one, as the last one must be computed to get its logits."""
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
        """Note the content of the request's blocks that launched steps have filled.

        Tokens that only the device knows are left for later.
        """
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        num_blocks = num_known // self.block_size
        if num_blocks > request.num_registered_blocks:
            self._extend_digests(request, num_blocks)
            for index in range(request.num_registered_blocks, num_blocks):
                self._register_block(request, index)
            request.num_registered_blocks = num_blocks

    def token_ids(self, block: int) -> tuple[int, ...]:
        """What a registered block holds."""
        return self._entries[block].token_ids

    def keep_scores(self, request: Request, positions: range) -> None:
        """Keep log-probabilities of the prompt that have become known, block by block, for
        requests that find the blocks and want them."""
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
        """Raise if a block is not what it is known as, to itself or to those who hold it."""
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
        """A request that wants log-probabilities of its prompt cannot do with K/V alone."""
        if not request.needs_scores:
            return True
        assert request.num_prompt_logprobs is not None
        return self._logprobs.has(block, request.num_prompt_logprobs)

    def _with_scores(self, match: PrefixMatch, request: Request) -> PrefixMatch:
        """One token less, as its logits make the log-probability of the token behind the match."""
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
        """The block behind the parent that begins most like `wanted`, and the number of tokens."""
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
        """Drop an entry that is out of date."""
        self._logprobs.drop(block)
        entry = self._entries.pop(block, None)
        if entry is not None:
            family = self._families[entry.family]
            del family[block]
            if not family:
                del self._families[entry.family]

    def _extend_digests(self, request: Request, num_blocks: int) -> None:
        digests, size = request.block_digests, self.block_size
        for index in range(len(digests), num_blocks):
            parent = digests[-1] if digests else root_digest_of(request)
            tokens = request.token_ids[index * size : (index + 1) * size]
            digests.append(block_digest(parent, tokens))


def root_digest_of(request: Request) -> bytes:
    """The parent of the request's first block, computed once."""
    if request.root_digest is None:
        request.root_digest = root_digest(request.cache_keys)
    return request.root_digest


def root_digest(cache_keys: Mapping[str, str]) -> bytes:
    """The parent of every first block: a digest of tagged values, unambiguous by their lengths."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for tag, value in sorted(cache_keys.items()):
        for part in (tag.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    content = parent + array("i", token_ids).tobytes()
    return blake2b(content, digest_size=DIGEST_BYTES).digest()
