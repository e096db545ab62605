"""The OpenAI wire format, nothing else.

Requests are pydantic models, as they come from anybody; a request holds what its client sent,
and `convert.py` turns it into what the engine takes. Responses are typed dicts, as we make them
ourselves: a key that is not given is not on the wire.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from jpaged.sampling_params import MAX_LOGPROBS

MAX_MESSAGES = 2048
MAX_TEMPERATURE = 2.0


class WireModel(BaseModel):
    """A JSON object of a client: every field is known and of its exact type, or refused.

    A field that is null counts as not given, as OpenAI documents it.

    not_offered: fields that clients may know from OpenAI or vLLM, with the values that ask
        for nothing and are therefore accepted.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        return {name: value for name, value in given.items() if cls._is_offered(name, value)}

    @classmethod
    def _is_offered(cls, name: str, value: Any) -> bool:
        if name in cls.model_fields:
            return True
        if name not in cls.not_offered:
            raise PydanticCustomError("unknown_parameter", "is not known", {"field": name})
        if not any(_is_same(value, no_op) for no_op in cls.not_offered[name]):
            raise PydanticCustomError(
                "unsupported_parameter", "is not supported yet: leave it out", {"field": name}
            )
        return False


def _is_same(value: Any, no_op: Any) -> bool:
    # In Python True == 1; on the wire they are two things.
    return isinstance(value, bool) == isinstance(no_op, bool) and value == no_op


def _text_or_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("invalid_type", "should be a string or a list")
    return value


# Members are checked in one pass by convert.py or SamplingParams. A pydantic union would check a
# list of a million numbers against every alternative, and report a million errors for each.
TextOrList = Annotated[str | list[Any], PlainValidator(_text_or_list)]

NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "metadata": (),
    "store": (),
    "service_tier": (),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "priority": (0,),
    "request_id": (),
}


class StreamOptions(WireModel):
    not_offered = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

    include_usage: bool = False


class SamplingRequest(WireModel):
    """What completions and chat have in common. Ranges are checked by `SamplingParams`."""

    model: str | None = None
    n: int = 1
    temperature: float = Field(default=1.0, le=MAX_TEMPERATURE)
    top_p: float = 1.0
    top_k: int = 0
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
    user: str | None = None  # identifies an end user to OpenAI; nothing depends on it here


class CompletionRequest(SamplingRequest):
    not_offered = NOT_OFFERED | {
        "suffix": ("",),
        "prompt_embeds": (),
        "add_special_tokens": (True,),
    }

    prompt: TextOrList
    max_tokens: int = 16
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool = False


class ChatMessage(WireModel):
    """One turn of a conversation. Fields that OpenAI's answers carry are accepted when empty,
    as clients send answers back."""

    not_offered = {
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "reasoning_content": (),
        "reasoning": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrList
    name: str | None = None


class ChatCompletionRequest(SamplingRequest):
    not_offered = NOT_OFFERED | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),  # without tools there is nothing to call
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "safety_identifier": (),
        "moderation": (),
        "documents": ([],),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    }

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
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
    """rank: among the most likely tokens, from 1; None beyond those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


# One entry a token, by token id: its own first, then the most likely ones. None for the first
# token, which follows nothing.
PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class CompletionLogprobs(TypedDict):
    """One entry a token in each list. text_offset: where in the text the token begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


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
    bytes: list[int]


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
