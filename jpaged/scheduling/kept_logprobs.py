"""Log-probabilities of cached prompts, up to a limit. Host side only: imports no JAX."""

from collections import OrderedDict
from collections.abc import Sequence

from jpaged.outputs import TokenLogprobs

Score = TokenLogprobs | None  # None for a prompt's first token, which follows nothing
# Log-probabilities of all blocks together, of some hundred bytes each.
MAX_KEPT_LOGPROBS = 2**20


class KeptLogprobs:
    """Keeps the log-probabilities of the tokens of blocks; the oldest go when they are too many.

    A request that wants them computes its prompt again where they are gone.
    """

    def __init__(self, limit: int = MAX_KEPT_LOGPROBS) -> None:
        self._limit = limit
        self._by_block: OrderedDict[int, tuple[Score, ...]] = OrderedDict()
        self._num_logprobs = 0

    def keep(self, block: int, scores: Sequence[Score]) -> None:
        """Keep those of a block instead of what was kept of it before."""
        self.drop(block)
        self._by_block[block] = tuple(scores)
        self._num_logprobs += _count(scores)
        while self._num_logprobs > self._limit:
            self.drop(next(iter(self._by_block)))

    def drop(self, block: int) -> None:
        self._num_logprobs -= _count(self._by_block.pop(block, ()))

    def of(self, block: int) -> tuple[Score, ...]:
        """Those of a block that `has` them."""
        return self._by_block[block]

    def has(self, block: int, num_logprobs: int) -> bool:
        """Whether those of a block are kept, each with so many likely tokens."""
        scores = self._by_block.get(block)
        return scores is not None and all(
            score is None or len(score.top) >= num_logprobs for score in scores
        )


def _count(scores: Sequence[Score]) -> int:
    return sum(1 + len(score.top) for score in scores if score is not None)
