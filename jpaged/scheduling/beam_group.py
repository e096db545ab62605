"""A request answered by beam search. Host side only: imports no JAX."""

from dataclasses import dataclass, replace
from decimal import Decimal
from os.path import commonprefix

from jpaged.beam_search_params import BeamSearchParams
from jpaged.outputs import CompletionOutput, FinishReason, TokenLogprobs
from jpaged.scheduling.beam_search import BeamSearch, Candidate, Step, reported_score
from jpaged.scheduling.request import Progress, Request
from jpaged.scheduling.request_group import RequestGroup, most_serious


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that ended."""

    score: Decimal
    completion: CompletionOutput


class BeamGroup(RequestGroup):
    """One `Request` a beam. The beams run a step, report their most likely next tokens, and go on
    as the survivors among the candidates; a beam waits until all others have reported."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: BeamSearchParams,
        beams: list[Request],
        num_candidates: int,
    ) -> None:
        super().__init__(request_id, prompt, params.sampling_params, beams)
        self.beam_params = params
        self.search = BeamSearch(
            params.beam_width,
            num_candidates=num_candidates,
            max_tokens=beams[0].max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self.beams = beams
        self._reports: dict[Request, TokenLogprobs] = {}
        self._hypotheses: list[Hypothesis] = []

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
        if is_complete and self._hypotheses:
            return most_serious([each.completion.finish_reason for each in self._hypotheses])
        return reason

    def advance(self) -> Step:
        """Choose among the candidates. The caller moves the blocks, then calls `go_on`."""
        step = self.search.advance([self._reports[beam] for beam in self.beams], self._stops)
        for candidate, score in step.hypotheses:
            self._hypotheses.append(Hypothesis(score, self._completion(candidate, score)))
        self._hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self._hypotheses[self.beam_params.beam_width :]
        return step

    def go_on(self, survivors: list[Candidate]) -> None:
        """Make the beams the survivors' sequences."""
        grown = [self._grown(survivor) for survivor in survivors]
        self.beams = self.beams[: len(survivors)]
        for beam, progress in zip(self.beams, grown, strict=True):
            beam.continue_as(progress)
        self._reports.clear()

    def end_early(self) -> None:
        """The pool has no room for another token: what the beams have are answers too."""
        if self.search.num_tokens == 0:
            return
        for beam, logprob in zip(self.beams, self.search.cumulative_logprobs, strict=True):
            score = self.search.score(logprob)
            completion = replace(
                beam.completion(), cumulative_logprob=logprob, score=reported_score(score)
            )
            self._hypotheses.append(Hypothesis(score, completion))
        self._hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)

    def _grown(self, candidate: Candidate) -> Progress:
        """A copy of what the candidate's beam has, and the new token."""
        beam, report = self.beams[candidate.beam], self._reports[self.beams[candidate.beam]]
        detokenizer = None if beam.detokenizer is None else beam.detokenizer.fork()
        return Progress(
            token_ids=[*beam.token_ids, candidate.token_id],
            logprobs=[
                *beam.logprobs,
                TokenLogprobs(candidate.logprob, report.top[: self.params.logprobs or 0]),
            ],
            cumulative_logprob=candidate.cumulative_logprob,
            detokenizer=detokenizer,
            stop_string=None
            if detokenizer is None
            else detokenizer.append(
                candidate.token_id, is_stop_token=candidate.token_id in beam.stop_token_ids
            ),
        )

    def _stops(self, candidate: Candidate) -> bool:
        if candidate.token_id in self.beams[candidate.beam].stop_token_ids:
            return True
        return bool(self.params.stop) and self._grown(candidate).stop_string is not None

    def _completion(self, candidate: Candidate, score: Decimal) -> CompletionOutput:
        beam, progress = self.beams[candidate.beam], self._grown(candidate)
        if progress.detokenizer is not None:
            progress.detokenizer.finish()
        is_stop_token = candidate.token_id in beam.stop_token_ids
        is_stopped = is_stop_token or progress.stop_string is not None
        is_listed = candidate.token_id in (self.params.stop_token_ids or ())
        return CompletionOutput(
            index=0,
            text="" if progress.detokenizer is None else progress.detokenizer.visible_text,
            token_ids=tuple(progress.token_ids[beam.num_prompt_tokens :]),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            stop_reason=progress.stop_string or (candidate.token_id if is_listed else None),
            logprobs=None if self.params.logprobs is None else tuple(progress.logprobs),
            cumulative_logprob=candidate.cumulative_logprob,
            score=reported_score(score),
        )

    def _completions(self) -> tuple[CompletionOutput, ...]:
        """The best answers at the end; before it, what all sequences that may win begin with."""
        num_answers = self.beam_params.num_answers
        if self.is_finished:
            best = [hypothesis.completion for hypothesis in self._hypotheses]
            if not best:  # aborted, or ended before the first token
                best = [beam.completion() for beam in self.beams]
        else:
            best = [self._shared_beginning()] * num_answers
        return tuple(
            replace(completion, index=index) for index, completion in enumerate(best[:num_answers])
        )

    def _shared_beginning(self) -> CompletionOutput:
        completions = [beam.completion() for beam in self.beams]
        completions += [hypothesis.completion for hypothesis in self._hypotheses]
        shared = commonprefix([completion.token_ids for completion in completions])
        text = commonprefix([completion.text for completion in completions])
        logprobs = self.beams[0].logprobs[: len(shared)]
        return CompletionOutput(
            index=0,
            text=text,
            token_ids=tuple(shared),
            logprobs=None if self.params.logprobs is None else tuple(logprobs),
        )
