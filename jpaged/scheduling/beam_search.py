"""Chooses the sequences that a beam search keeps. Host side only: imports no JAX.

Follows the beam search of Hugging Face transformers, step by step: of the candidates of all beams
the best (1 + number of ways to stop) * width are looked at; those of the best `width` that stop
become hypotheses, and the best `width` that do not stop go on. A hypothesis' score is its
cumulative log-probability / length ** length_penalty.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal

from jpaged.outputs import TokenLogprobs

IMPOSSIBLE = -1e9  # cumulative log-probability of beams that do not exist yet
# 1300 ** 100 is beyond the range of floats; decimal numbers hold any accepted length and penalty.
_DECIMAL = Context(prec=28, Emin=-999_999, Emax=999_999, traps=[])


@dataclass(frozen=True)
class Candidate:
    """One more token for a beam, which is named by its index among the beams of this step."""

    beam: int
    token_id: int
    logprob: float
    cumulative_logprob: float


@dataclass(frozen=True)
class Step:
    """What a step of the search has chosen.

    survivors: the beams of the next step, best first; none when the search is over. They are
        fewer than before only if stop strings ended nearly all candidates.
    hypotheses: candidates that ended in this step and may be answers, with their scores.
    """

    survivors: list[Candidate]
    hypotheses: list[tuple[Candidate, Decimal]]


class BeamSearch:
    """Keeps the scores of the beams and of the best hypotheses so far."""

    def __init__(
        self,
        width: int,
        *,
        num_candidates: int,
        max_tokens: int,
        length_penalty: float,
        early_stopping: bool,
    ) -> None:
        self.width = width
        self.num_candidates = num_candidates
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.num_tokens = 0
        self.hypothesis_scores: list[Decimal] = []
        # All beams begin with the prompt: only one of them counts in the first step.
        self.cumulative_logprobs = [0.0] + [IMPOSSIBLE] * (width - 1)

    def advance(self, reports: Sequence[TokenLogprobs], stops: Callable[[Candidate], bool]) -> Step:
        """Take the most likely next tokens of every beam; `stops` tells if a candidate ends."""
        candidates = self._best_candidates(reports)
        self.num_tokens += 1
        is_last = self.num_tokens >= self.max_tokens
        ending = [is_last or stops(candidate) for candidate in candidates]
        hypotheses = [
            (candidate, self.score(candidate.cumulative_logprob))
            for candidate, ends in zip(candidates[: self.width], ending, strict=False)
            if ends
        ]
        hypotheses = self._keep_best(hypotheses)
        survivors = [
            candidate for candidate, ends in zip(candidates, ending, strict=True) if not ends
        ][: len(reports)]
        self.cumulative_logprobs = [survivor.cumulative_logprob for survivor in survivors]
        is_over = not survivors or not self._can_improve()
        return Step([] if is_over else survivors, hypotheses)

    def score(self, cumulative_logprob: float) -> Decimal:
        """Return the score of a sequence of the current length, `num_tokens`."""
        divisor = _DECIMAL.power(Decimal(self.num_tokens), Decimal(self.length_penalty))
        return _DECIMAL.divide(Decimal(cumulative_logprob), divisor)

    def _best_candidates(self, reports: Sequence[TokenLogprobs]) -> list[Candidate]:
        candidates = [
            Candidate(beam, token_id, logprob, self.cumulative_logprobs[beam] + logprob)
            for beam, report in enumerate(reports)
            for token_id, logprob in report.top
        ]
        candidates.sort(key=lambda each: (-each.cumulative_logprob, each.beam, each.token_id))
        return candidates[: self.num_candidates]

    def _keep_best(
        self, hypotheses: list[tuple[Candidate, Decimal]]
    ) -> list[tuple[Candidate, Decimal]]:
        """Add hypotheses that are among the best `width` of all; return those."""
        if self.early_stopping and len(self.hypothesis_scores) >= self.width:
            return []
        scores = self.hypothesis_scores + [score for _, score in hypotheses]
        self.hypothesis_scores = sorted(scores, reverse=True)[: self.width]
        return [each for each in hypotheses if each[1] >= self.hypothesis_scores[-1]]

    def _can_improve(self) -> bool:
        """Whether the best beam, ended now, would be among the hypotheses."""
        if len(self.hypothesis_scores) < self.width:
            return True
        best = self.score(self.cumulative_logprobs[0])
        return not self.early_stopping and best > self.hypothesis_scores[-1]


def reported_score(score: Decimal) -> float:
    """Return the nearest finite float, which is the largest one for scores beyond its range."""
    return max(float(score), -sys.float_info.max)
