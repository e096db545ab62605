"""How the engine's outputs look on the wire: whole answers, and chunks of streams."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

from jpaged.outputs import CompletionOutput, FinishReason, RequestOutput
from jpaged.server.protocol import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    Usage,
)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What an output of a request has more than the one before it.

    prompt_token_ids: in the first delta of a request only.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None

    @classmethod
    def between(cls, before: RequestOutput | None, now: RequestOutput) -> Self:
        answer = now.outputs[0]
        seen = _NOTHING if before is None else before.outputs[0]
        return cls(
            text=answer.text[len(seen.text) :],
            token_ids=list(answer.token_ids[len(seen.token_ids) :]),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            prompt_token_ids=list(now.prompt_token_ids) if before is None else None,
        )


_NOTHING = CompletionOutput(index=0, text="", token_ids=())


@runtime_checkable
class AnswerFormat(Protocol):
    """The answer to one HTTP request; `index` of a choice is the index of its prompt."""

    @property
    def id(self) -> str: ...

    @property
    def includes_usage(self) -> bool: ...

    def answer(self, outputs: Sequence[RequestOutput]) -> Completion | ChatCompletion: ...

    def chunks(self, index: int, delta: Delta) -> Sequence[Completion | ChatCompletionChunk]: ...

    def usage_chunk(self, usage: Usage) -> Completion | ChatCompletionChunk: ...


@dataclass(frozen=True, kw_only=True)
class _Format:
    """What all chunks of an answer share.

    includes_usage: chunks carry the key "usage", null but in the last one.
    returns_token_ids: choices carry their token ids, as vLLM's do.
    """

    model: str
    includes_usage: bool
    returns_token_ids: bool
    id: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, kw_only=True)
class CompletionFormat(_Format):
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")

    def answer(self, outputs: Sequence[RequestOutput]) -> Completion:
        deltas = [Delta.between(None, output) for output in outputs]
        completion = self._with_choices([self._choice(i, delta) for i, delta in enumerate(deltas)])
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
        choice: CompletionChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.returns_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.prompt_token_ids is not None:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        return choice


@dataclass(frozen=True, kw_only=True)
class ChatFormat(_Format):
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    def answer(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        answer = output.outputs[0]
        completion: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": answer.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                }
            ],
            "usage": usage_of(outputs),
        }
        if self.returns_token_ids:
            completion["prompt_token_ids"] = list(output.prompt_token_ids)
            completion["choices"][0]["token_ids"] = list(answer.token_ids)
        return completion

    def chunks(self, index: int, delta: Delta) -> list[ChatCompletionChunk]:
        chunks = []
        if delta.prompt_token_ids is not None:
            chunks.append(self._first_chunk(index, delta.prompt_token_ids))
        chunk = self._chunk(index, {"content": delta.text}, delta.finish_reason)
        chunk["choices"][0]["stop_reason"] = delta.stop_reason
        if self.returns_token_ids:
            chunk["choices"][0]["token_ids"] = delta.token_ids
        return [*chunks, chunk]

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        chunk = self._with_choices([])
        chunk["usage"] = usage
        return chunk

    def _first_chunk(self, index: int, prompt_token_ids: list[int]) -> ChatCompletionChunk:
        chunk = self._chunk(index, {"role": "assistant", "content": ""}, None)
        if self.returns_token_ids:
            chunk["prompt_token_ids"] = prompt_token_ids
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
