"""Makes the outputs of a request, with their text, from the engine's updates. Imports no JAX."""

import time
from collections.abc import Sequence
from dataclasses import replace

from jpaged.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    RequestTiming,
    TokenLogprobs,
)
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.request_group import RequestGroup
from jpaged.text.detokenizer import Detokenizer
from jpaged.updates import Hypothesis, RequestUpdate, SequenceUpdate


class _Answer:
    """One growing answer.

    detokenizer: starts behind the prompt and belongs to this answer; None for answers without text.

    Tokens behind a stop string are dropped: the engine generates them until it learns of the stop.
    """

    def __init__(self, index: int, detokenizer: Detokenizer | None, *, has_logprobs: bool) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer = detokenizer
        self._cumulative_logprob = 0.0 if has_logprobs else None

    def take(self, update: SequenceUpdate) -> bool:
        """Append new tokens. Returns whether they complete a stop string, which ends the answer."""
        last = len(update.token_ids) - 1
        for position, token_id in enumerate(update.token_ids):
            is_stop_token = update.finish_reason is FinishReason.STOP and position == last
            self.token_ids.append(token_id)
            if self._cumulative_logprob is not None:
                self.logprobs.append(update.logprobs[position])
                self._cumulative_logprob += update.logprobs[position].logprob
            stop_string = self._take_text(token_id, is_stop_token=is_stop_token)
            if stop_string is not None:
                self.finish(FinishReason.STOP, stop_string)
                return True
        if update.finish_reason is not None:
            self.finish(update.finish_reason, update.stop_reason)
        return False

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        # An answer that is cut off does not get the text that is still held back.
        is_cut = reason in (FinishReason.ABORT, FinishReason.ERROR)
        if self._detokenizer is not None and not is_cut:
            self._detokenizer.finish()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _take_text(self, token_id: int, *, is_stop_token: bool) -> str | None:
        if self._detokenizer is None:
            return None
        return self._detokenizer.append(token_id, is_stop_token=is_stop_token)

    def completion(self, *, shows_logprobs: bool) -> CompletionOutput:
        """Return a snapshot, which later tokens do not change."""
        return CompletionOutput(
            index=self.index,
            text="" if self._detokenizer is None else self._detokenizer.visible_text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if shows_logprobs else None,
            cumulative_logprob=self._cumulative_logprob,
        )


class Generation:
    """One request outside of the engine: applies the engine's updates and makes outputs of them.

    group: the request inside the engine. Only the engine's thread reads or changes it.
    num_answers: answers that the client gets. If the request has more sequences, these are the
        best of them.
    """

    def __init__(
        self,
        group: RequestGroup,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        num_answers: int,
        detokenizer: Detokenizer | None,
        arrival_time: float,
    ) -> None:
        self.group = group
        self.number = group.number
        self.request_id = group.request_id
        self.prompt = prompt
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.num_answers = num_answers
        self._is_beam_search = group.policy.waits_for_siblings
        self._detokenizer = detokenizer
        self._hypotheses: list[CompletionOutput] = []
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._timing = RequestTiming(arrival=arrival_time)
        self._answers = [
            self._new_answer(index)
            for index in range(1 if self._is_beam_search else len(group.requests))
        ]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return bool(self._hypotheses) or all(
            answer.finish_reason is not None for answer in self._answers
        )

    def add_answer(self) -> None:
        """Add an answer that is a fork. Its first update has the tokens before the fork, too."""
        self._answers.append(self._new_answer(len(self._answers)))
        self.num_answers += 1

    def take(self, update: RequestUpdate) -> list[int]:
        """Apply an update of the engine.

        Returns the indexes of answers that a stop string has ended. The engine, which knows no
        text, has to be told.
        """
        self._num_cached_tokens = update.num_cached_tokens
        self._timing = update.timing
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        self._hypotheses = [
            self._completion(index, each) for index, each in enumerate(update.hypotheses)
        ]
        stopped = []
        for sequence in update.sequences:
            answer = self._answers[sequence.index]
            if answer.finish_reason is None and answer.take(sequence):
                stopped.append(answer.index)
        if self.is_finished and self._timing.finished is None:
            self._timing = replace(self._timing, finished=time.monotonic())
        return stopped

    def end(self, reason: FinishReason) -> None:
        """End the unfinished answers for a reason that is not the engine's, such as an abort."""
        for answer in self._answers:
            if answer.finish_reason is None:
                answer.finish(reason)

    def output(self) -> RequestOutput:
        """Return a snapshot, which later updates do not change."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(self._completions()),
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            timing=self._timing,
        )

    def _new_answer(self, index: int) -> _Answer:
        detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        has_logprobs = self._is_beam_search or self.params.num_reported_logprobs is not None
        return _Answer(index, detokenizer, has_logprobs=has_logprobs)

    def _completions(self) -> list[CompletionOutput]:
        if self._hypotheses:
            return self._hypotheses
        found = [self._shown(answer) for answer in self._answers]
        if self._is_beam_search:
            # Until the end, all that is known is what every sequence that may win begins with.
            found = [replace(found[0], cumulative_logprob=None)] * self.num_answers
        elif len(found) > self.num_answers:
            if not self.is_finished:
                return []  # which answers are the best is not known yet
            found.sort(key=lambda each: -(each.cumulative_logprob or 0.0))
        return [replace(each, index=index) for index, each in enumerate(found[: self.num_answers])]

    def _shown(self, answer: _Answer) -> CompletionOutput:
        return answer.completion(shows_logprobs=self.params.logprobs is not None)

    def _completion(self, index: int, found: Hypothesis) -> CompletionOutput:
        """Return the answer that a hypothesis of beam search is, with its text."""
        answer = self._new_answer(index)
        stop_reason, finish_reason = found.stop_reason, found.finish_reason
        if isinstance(stop_reason, str):
            stop_reason = finish_reason = None  # the stop string is found once more
        answer.take(
            SequenceUpdate(index, found.token_ids, found.logprobs, finish_reason, stop_reason)
        )
        return replace(
            self._shown(answer), cumulative_logprob=found.cumulative_logprob, score=found.score
        )
