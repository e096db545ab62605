"""The OpenAI wire format, nothing else.

Requests are pydantic models, which check what clients send; `convert.py` turns them into what the
engine takes. Responses are typed dicts: a key that is not set is not on the wire.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from jpaged.sampling_params import MAX_LOGPROBS
from jpaged.server.messages import Messages
from jpaged.server.wire_model import EMPTY, Label, WireModel

MAX_TEMPERATURE = 2.0


def _text_or_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("invalid_type", "should be a string or a list")
    return value


# Members are checked in one pass by convert.py or SamplingParams. A pydantic union would check a
# list of a million numbers against every alternative, and report a million errors for each.
TextOrList = Annotated[str | list[Any], PlainValidator(_text_or_list)]

# Fields of OpenAI's and vLLM's APIs, with the values that ask for nothing.
NO_OPS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": EMPTY,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "stop": ("",),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"}, *EMPTY),
    "structured_outputs": EMPTY,
    "priority": (0,),
    "request_id": EMPTY,
}


class StreamOptions(WireModel):
    no_ops = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

    include_usage: bool = False


class SamplingRequest(WireModel):
    """Fields that completions and chats have in common. `SamplingParams` checks the ranges.

    temperature, top_p, top_k: where none is given, the model's default is taken.
    """

    model: str | None = None
    n: int = 1
    temperature: float | None = Field(default=None, le=MAX_TEMPERATURE)
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: TextOrList | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
    user: str | None = None
    metadata: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_options: Label = None
    prompt_cache_retention: Label = None


class CompletionRequest(SamplingRequest):
    no_ops = NO_OPS | {
        "suffix": EMPTY,
        "prompt_embeds": EMPTY,
        "add_special_tokens": (True,),
    }

    prompt: TextOrList
    max_tokens: int = 16
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool = False


class ChatCompletionRequest(SamplingRequest):
    no_ops = NO_OPS | {
        "tools": EMPTY,
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),  # without tools there is nothing to call
        "functions": EMPTY,
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": EMPTY,
        "prediction": EMPTY,
        "reasoning_effort": ("none",),
        "include_reasoning": (True, False),  # there is none to include
        "verbosity": ("medium",),
        "web_search_options": EMPTY,
        "moderation": EMPTY,
        "documents": EMPTY,
        "chat_template": EMPTY,
        "chat_template_kwargs": EMPTY,
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "best_of": (1,),
        "echo": (False,),
    }

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptTokenLogprob(TypedDict):
    """A token that could stand at a place of the prompt.

    rank: among the likeliest tokens, from 1; None if it is not among those that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# One entry a token, by token id: its own first, then the most likely ones. None for the first
# token, which follows nothing.
PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a text, one entry a token in each list.

    text_offset: where in the text the token begins.
    bytes: what it adds to the text in UTF-8; null without a tokenizer.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    bytes: list[list[int] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """The answer to a completion request, and each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: str


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail
