"""Which sequences beam search keeps. Host side only: imports no JAX.

Follows the beam search of Hugging Face transformers, step by step: of the candidates of all beams
the best (1 + number of ways to stop) * width are looked at; those of the best `width` that stop
become hypotheses, and the best `width` that do not stop go on. A hypothesis' score is its
cumulative log-probability / length ** length_penalty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jpaged.outputs import TokenLogprobs

IMPOSSIBLE = -1e9  # score of beams that do not exist yet


@dataclass(frozen=True)
class Candidate:
    """A beam of the step before (its index) and one more token."""

    beam: int
    token_id: int
    logprob: float
    cumulative_logprob: float


@dataclass(frozen=True)
class Step:
    """survivors: the beams of the next step, best first; none when the search is over. They are
    fewer than before only if stop strings ended nearly all candidates.
    hypotheses: candidates that ended in this step and may be answers, with their scores."""

    survivors: list[Candidate]
    hypotheses: list[tuple[Candidate, float]]


class BeamSearch:
    """Scores of the beams, and of the best hypotheses so far."""

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
        self.hypothesis_scores: list[float] = []
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

    def score(self, cumulative_logprob: float) -> float:
        """Of a sequence that has `num_tokens` tokens now."""
        return cumulative_logprob / self.num_tokens**self.length_penalty

    def _best_candidates(self, reports: Sequence[TokenLogprobs]) -> list[Candidate]:
        candidates = [
            Candidate(beam, token_id, logprob, self.cumulative_logprobs[beam] + logprob)
            for beam, report in enumerate(reports)
            for token_id, logprob in report.top
        ]
        candidates.sort(key=lambda each: (-each.cumulative_logprob, each.beam, each.token_id))
        return candidates[: self.num_candidates]

    def _keep_best(
        self, hypotheses: list[tuple[Candidate, float]]
    ) -> list[tuple[Candidate, float]]:
        """Add hypotheses that are among the best `width` of all; return those."""
        if self.early_stopping and len(self.hypothesis_scores) >= self.width:
            return []
        scores = self.hypothesis_scores + [score for _, score in hypotheses]
        self.hypothesis_scores = sorted(scores, reverse=True)[: self.width]
        worst = self.hypothesis_scores[-1] if self.hypothesis_scores else IMPOSSIBLE
        return [each for each in hypotheses if each[1] >= worst]

    def _can_improve(self) -> bool:
        """Whether the best beam, ended now, would be among the hypotheses."""
        if len(self.hypothesis_scores) < self.width:
            return True
        best = self.score(self.cumulative_logprobs[0])
        return not self.early_stopping and best > self.hypothesis_scores[-1]
