"""Blocks whose content is known, found again by requests that begin alike. Imports no JAX.

A full block is named by a digest over the digest of the block before it and its own tokens, so
equal digests mean equal prefixes. The chain starts from what else the K/V depend on, such as the
request's cache salt: requests that differ in it never meet. Digests are 128 bits of BLAKE2b,
whose collisions cannot be made; Python's `hash` could be guessed and repeats on purpose.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from jpaged.block_pool import BlockPool
from jpaged.request import Request

DIGEST_BYTES = 16


class PrefixCache:
    """Registers the full blocks of requests and matches new requests against them."""

    def __init__(self, block_pool: BlockPool, *, block_size: int) -> None:
        self.block_pool = block_pool
        self.block_size = block_size

    def match(self, request: Request) -> list[int]:
        """Blocks, in order, that hold the first tokens of the request; at most all tokens but
        one, as the last one must be computed to get its logits. The caller retains them."""
        blocks = []
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        self._extend_digests(request, num_blocks)
        for digest in request.block_digests[:num_blocks]:
            block = self.block_pool.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, request: Request) -> None:
        """Note the content of the request's blocks that launched steps have filled.

        Tokens that only the device knows are left for later.
        """
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        num_blocks = num_known // self.block_size
        if num_blocks > request.num_registered_blocks:
            self._extend_digests(request, num_blocks)
            for index in range(request.num_registered_blocks, num_blocks):
                self.block_pool.register(request.block_ids[index], request.block_digests[index])
            request.num_registered_blocks = num_blocks

    def _extend_digests(self, request: Request, num_blocks: int) -> None:
        digests, size = request.block_digests, self.block_size
        for index in range(len(digests), num_blocks):
            parent = digests[-1] if digests else root_digest(request.cache_keys)
            tokens = request.token_ids[index * size : (index + 1) * size]
            digests.append(block_digest(parent, tokens))


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
