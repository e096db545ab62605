"""Formats the engine's outputs as OpenAI's API has them: whole answers and chunks of streams."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jpaged.outputs import FinishReason, RequestOutput
from jpaged.server.deltas import Delta, GivenPrompt, deltas, given_prompt
from jpaged.server.echo import Echo, EchoedPrompt
from jpaged.server.logprobs import chat_logprobs, completion_logprobs, joined, text_tokens
from jpaged.server.prompt_logprobs import prompt_logprobs
from jpaged.server.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
)
from jpaged.text.token_text import TextOffsets
from jpaged.text.tokenizer import Tokenizer

_NO_ECHO = EchoedPrompt("", None)


@runtime_checkable
class AnswerFormat(Protocol):
    """Formats the response to one HTTP request."""

    @property
    def id(self) -> str: ...

    def choice_index(self, prompt_index: int, answer_index: int) -> int:
        """Return the number of a choice: n times the index of its prompt, plus its own index.

        A beam search may end with fewer answers than n, which does not shift the numbers.
        """
        ...

    @property
    def includes_usage(self) -> bool: ...

    @property
    def shows_prompt(self) -> bool:
        """Whether choices show the prompt or its log-probabilities, which may be megabytes."""
        ...

    def answer(self, outputs: Sequence[RequestOutput]) -> Completion | ChatCompletion: ...

    def chunks(self, index: int, delta: Delta) -> Sequence[Completion | ChatCompletionChunk]: ...

    def usage_chunk(self, usage: Usage) -> Completion | ChatCompletionChunk: ...


@dataclass(frozen=True, kw_only=True)
class _Format:
    """What is the same in all chunks of a response.

    num_answers: n of the request, the number of answers to each prompt.
    includes_usage: chunks have the key "usage", which is null in all but the last one.
    returns_token_ids: choices have their token ids, as vLLM's do.
    prompt_logprobs: number of likeliest tokens to show at each prompt token; None shows none.
    skip_special_tokens: special tokens are not in the text, and add neither offsets nor bytes.
    tokenizer: gives the texts of tokens that have log-probabilities.
    """

    model: str
    tokenizer: Tokenizer | None
    num_answers: int
    includes_usage: bool
    returns_token_ids: bool
    prompt_logprobs: int | None
    skip_special_tokens: bool
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def choice_index(self, prompt_index: int, answer_index: int) -> int:
        return prompt_index * self.num_answers + answer_index

    def whole_choices(self, outputs: Sequence[RequestOutput]) -> list[tuple[int, Delta]]:
        """Return number and content of each choice, with its whole answer."""
        return [
            (self.choice_index(prompt_index, answer_index), delta)
            for prompt_index, output in enumerate(outputs)
            for answer_index, delta in deltas(None, output)
        ]


@dataclass(frozen=True, kw_only=True)
class CompletionFormat(_Format):
    """Formats completions. echo: shows prompts in front of their answers."""

    echo: Echo | None
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    _offsets: dict[int, TextOffsets] = field(default_factory=dict, init=False)
    _shown_prompts: dict[GivenPrompt, PromptLogprobs] = field(default_factory=dict, init=False)

    @property
    def shows_prompt(self) -> bool:
        return self.echo is not None or self.prompt_logprobs is not None

    def answer(self, outputs: Sequence[RequestOutput]) -> Completion:
        wholes = self.whole_choices(outputs)
        completion = self._with_choices([self._choice(i, whole) for i, whole in wholes])
        completion["usage"] = usage_of(outputs)
        return completion

    def chunks(self, index: int, delta: Delta) -> list[Completion]:
        return [self._chunk([self._choice(index, delta)])]

    def usage_chunk(self, usage: Usage) -> Completion:
        completion = self._with_choices([])
        completion["usage"] = usage
        return completion

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        completion = self._with_choices(choices)
        if self.includes_usage:
            completion["usage"] = None
        return completion

    def _with_choices(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        echoed = _NO_ECHO
        if self.echo is not None and delta.prompt is not None:
            echoed = self.echo.of(delta.prompt)
        choice: CompletionChoice = {
            "index": index,
            "text": echoed.text + delta.text,
            "logprobs": self._logprobs(index, echoed, delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.returns_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.prompt is not None and self.returns_token_ids:
            choice["prompt_token_ids"] = list(delta.prompt.token_ids)
        if delta.prompt is not None and self.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(delta.prompt, self.prompt_logprobs)
        return choice

    def _prompt_logprobs(self, prompt: GivenPrompt, num_top: int) -> PromptLogprobs:
        """Return the log-probabilities of a prompt, formatted once for all its choices."""
        if prompt not in self._shown_prompts:
            self._shown_prompts[prompt] = prompt_logprobs(prompt, self.tokenizer, num_top)
        return self._shown_prompts[prompt]

    def _logprobs(
        self, index: int, echoed: EchoedPrompt, delta: Delta
    ) -> CompletionLogprobs | None:
        if delta.logprobs is None:
            return None
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(
                self.tokenizer,
                skip_special_tokens=self.skip_special_tokens,
                start=len(echoed.text),
            )
        tokens = text_tokens(delta, self._offsets[index])
        return joined(echoed.logprobs, completion_logprobs(tokens, self.tokenizer))


@dataclass(frozen=True, kw_only=True)
class ChatFormat(_Format):
    """Formats chat completions."""

    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    @property
    def shows_prompt(self) -> bool:
        return self.prompt_logprobs is not None

    def answer(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        wholes = self.whole_choices(outputs)
        completion: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(i, whole) for i, whole in wholes],
            "usage": usage_of(outputs),
        }
        if self.returns_token_ids:
            completion["prompt_token_ids"] = list(output.prompt_token_ids)
        if self.prompt_logprobs is not None:
            completion["prompt_logprobs"] = prompt_logprobs(
                given_prompt(output), self.tokenizer, self.prompt_logprobs
            )
        return completion

    def chunks(self, index: int, delta: Delta) -> list[ChatCompletionChunk]:
        chunks = []
        if delta.prompt is not None:
            chunks.append(self._first_chunk(index, delta.prompt.token_ids))
        chunk = self._chunk(index, {"content": delta.text}, delta.finish_reason)
        (choice,) = chunk["choices"]
        choice["logprobs"] = self._logprobs(delta)
        choice["stop_reason"] = delta.stop_reason
        if self.returns_token_ids:
            choice["token_ids"] = delta.token_ids
        return [*chunks, chunk]

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        chunk = self._with_choices([])
        chunk["usage"] = usage
        return chunk

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        choice: ChatChoice = {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.returns_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta, self.tokenizer, skip_special_tokens=self.skip_special_tokens)

    def _first_chunk(self, index: int, prompt_token_ids: Sequence[int]) -> ChatCompletionChunk:
        chunk = self._chunk(index, {"role": "assistant", "content": ""}, None)
        if self.returns_token_ids:
            chunk["prompt_token_ids"] = list(prompt_token_ids)
        return chunk

    def _chunk(
        self, index: int, delta: ChatDelta, finish_reason: FinishReason | None
    ) -> ChatCompletionChunk:
        chunk = self._with_choices(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]
        )
        if self.includes_usage:
            chunk["usage"] = None
        return chunk

    def _with_choices(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the token counts of a response. A prompt counts once, however many choices it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
    }
