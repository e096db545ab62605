"""A request answered by beam search. Host side only: imports no JAX."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import NamedTuple, Protocol, Self

from jpaged.beam_search_params import BeamSearchParams
from jpaged.outputs import FinishReason, TokenLogprobs
from jpaged.scheduling.beam_search import BeamSearch, Candidate, Step, reported_score
from jpaged.scheduling.request import Request
from jpaged.scheduling.request_group import RequestGroup, most_serious
from jpaged.updates import Hypothesis, RequestUpdate, SequenceUpdate


class StopChecker(Protocol):
    """Finds stop strings in the text of one sequence."""

    def append(self, token_id: int, *, is_stop_token: bool) -> str | None:
        """Take the next token; return the stop string that it completed, if any."""
        ...

    def fork(self) -> Self:
        """An independent copy, for a sequence that goes on in another way."""
        ...


class _Ranked(NamedTuple):
    score: Decimal
    hypothesis: Hypothesis


class BeamGroup(RequestGroup):
    """One `Request` a beam. The beams run a step, report their most likely next tokens, and go on
    as the survivors among the candidates; a beam waits until all others have reported.

    stop_checker: of the prompt's text. None when the search has no stop strings.
    """

    def __init__(
        self,
        number: int,
        params: BeamSearchParams,
        beams: list[Request],
        num_candidates: int,
        stop_checker: StopChecker | None = None,
    ) -> None:
        super().__init__(number, beams)
        self.beam_params = params
        self.search = BeamSearch(
            params.beam_width,
            num_candidates=num_candidates,
            max_tokens=beams[0].max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self.beams = beams
        self._stop_checkers = None if stop_checker is None else [stop_checker] * len(beams)
        self._reports: dict[Request, TokenLogprobs] = {}
        self._ranked: list[_Ranked] = []
        self._num_settled = 0

    def report(self, beam: Request, logprobs: TokenLogprobs) -> None:
        self._reports[beam] = logprobs

    def withdraw(self, beam: Request) -> None:
        """The beam was preempted: it will report again."""
        self._reports.pop(beam, None)
        beam.num_in_flight_tokens = 0

    def withdraw_reported(self, beam: Request) -> None:
        """The same for a beam that may have a report still on its way, which is dropped then."""
        if beam in self._reports:
            self.withdraw(beam)

    @property
    def is_complete(self) -> bool:
        """Whether all beams have reported."""
        return len(self._reports) == len(self.beams)

    @property
    def finish_reason(self) -> FinishReason | None:
        """That of the sequences which have ended, as the beams themselves only stop."""
        reason = super().finish_reason
        is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_complete and self._ranked:
            return most_serious([each.hypothesis.finish_reason for each in self._ranked])
        return reason

    def advance(self) -> Step:
        """Choose among the candidates. The caller moves the blocks, then calls `go_on`."""
        step = self.search.advance([self._reports[beam] for beam in self.beams], self._stops)
        self._ranked += [
            _Ranked(score, self._hypothesis(candidate, score))
            for candidate, score in step.hypotheses
        ]
        self._sort()
        del self._ranked[self.beam_params.beam_width :]
        return step

    def go_on(self, survivors: list[Candidate]) -> None:
        """Make the beams the survivors' sequences."""
        if self._stop_checkers is not None:
            self._stop_checkers = [self._checked(survivor)[0] for survivor in survivors]
        grown = self._grown(survivors)
        self.beams = self.beams[: len(survivors)]
        for beam, (token_ids, logprobs) in zip(self.beams, grown, strict=True):
            beam.continue_as(token_ids, logprobs)
        self._reports.clear()

    def end_early(self) -> None:
        """The pool has no room for another token: what the beams have are answers too."""
        if self.search.num_tokens == 0:
            return
        for beam, logprob in zip(self.beams, self.search.cumulative_logprobs, strict=True):
            score = self.search.score(logprob)
            hypothesis = _unfinished(beam, logprob, reported_score(score))
            self._ranked.append(_Ranked(score, hypothesis))
        self._sort()

    def take_update(self) -> RequestUpdate:
        """What is new since the last call. The hypotheses come with the end of the search."""
        update = super().take_update()
        return replace(update, hypotheses=self._best()) if self.is_finished else update

    def _take_sequences(self) -> tuple[SequenceUpdate, ...]:
        """New tokens that all sequences which may win begin with."""
        start = self._num_settled
        if self.is_finished:
            return ()
        answers = [_Answer(beam.token_ids, beam.num_prompt_tokens) for beam in self.beams]
        answers += [_Answer(ranked.hypothesis.token_ids, 0) for ranked in self._ranked]
        while _agree_at(self._num_settled, answers):
            self._num_settled += 1
        if start == self._num_settled:
            return ()
        first, settled = self.beams[0], slice(start, self._num_settled)
        answer = slice(first.num_prompt_tokens + start, first.num_prompt_tokens + self._num_settled)
        return (SequenceUpdate(0, tuple(first.token_ids[answer]), tuple(first.logprobs[settled])),)

    def _best(self) -> tuple[Hypothesis, ...]:
        best = [ranked.hypothesis for ranked in self._ranked]
        is_failed = self.beams[0].finish_reason is FinishReason.ERROR
        if is_failed or not best:  # or aborted, or ended before the first token
            best = [_unfinished(beam, 0.0, None) for beam in self.beams]
        return tuple(best[: self.beam_params.num_answers])

    def _sort(self) -> None:
        self._ranked.sort(key=lambda ranked: ranked.score, reverse=True)

    def _stops(self, candidate: Candidate) -> bool:
        return self._is_stop_token(candidate) or self._stop_string(candidate) is not None

    def _is_stop_token(self, candidate: Candidate) -> bool:
        return candidate.token_id in self.beams[candidate.beam].stop_token_ids

    def _stop_string(self, candidate: Candidate) -> str | None:
        return None if self._stop_checkers is None else self._checked(candidate)[1]

    def _checked(self, candidate: Candidate) -> tuple[StopChecker, str | None]:
        """The stop checker of a candidate's sequence, and the stop string at its end."""
        assert self._stop_checkers is not None
        checker = self._stop_checkers[candidate.beam].fork()
        is_stop_token = self._is_stop_token(candidate)
        return checker, checker.append(candidate.token_id, is_stop_token=is_stop_token)

    def _grown(self, survivors: list[Candidate]) -> list[tuple[list[int], list[TokenLogprobs]]]:
        """Return the survivors' tokens and log-probabilities.

        A parent's lists, which are as long as the answer, go to its last survivor without a copy.
        A beam that ends here keeps its lists.
        """
        last_of = {survivor.beam: place for place, survivor in enumerate(survivors)}
        grown = []
        for place, survivor in enumerate(survivors):
            parent = self.beams[survivor.beam]
            token_ids, logprobs = parent.token_ids, parent.logprobs
            if place != last_of[survivor.beam] or survivor.beam >= len(survivors):
                token_ids, logprobs = token_ids.copy(), logprobs.copy()
            token_ids.append(survivor.token_id)
            logprobs.append(self._token_logprobs(survivor))
            grown.append((token_ids, logprobs))
        return grown

    def _token_logprobs(self, candidate: Candidate) -> TokenLogprobs:
        beam = self.beams[candidate.beam]
        num_top = beam.params.logprobs or 0
        return TokenLogprobs(candidate.logprob, self._reports[beam].top[:num_top])

    def _hypothesis(self, candidate: Candidate, score: Decimal) -> Hypothesis:
        beam, stop_string = self.beams[candidate.beam], self._stop_string(candidate)
        is_stopped = stop_string is not None or self._is_stop_token(candidate)
        is_listed = candidate.token_id in (beam.params.stop_token_ids or ())
        return Hypothesis(
            token_ids=(*beam.token_ids[beam.num_prompt_tokens :], candidate.token_id),
            logprobs=(*beam.logprobs, self._token_logprobs(candidate)),
            cumulative_logprob=candidate.cumulative_logprob,
            score=reported_score(score),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            stop_reason=stop_string or (candidate.token_id if is_listed else None),
        )


class _Answer(NamedTuple):
    token_ids: Sequence[int]
    start: int


def _agree_at(index: int, answers: Sequence[_Answer]) -> bool:
    """Whether all answers have the same token there."""
    places = [start + index for _, start in answers]
    if any(place >= len(ids) for place, (ids, _) in zip(places, answers, strict=True)):
        return False
    return len({ids[place] for place, (ids, _) in zip(places, answers, strict=True)}) == 1


def _unfinished(beam: Request, cumulative_logprob: float, score: float | None) -> Hypothesis:
    """What a beam has when its search ends early."""
    return Hypothesis(
        token_ids=tuple(beam.token_ids[beam.num_prompt_tokens :]),
        logprobs=tuple(beam.logprobs),
        cumulative_logprob=cumulative_logprob,
        score=score,
        finish_reason=beam.finish_reason,
    )
