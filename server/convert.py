"""Converts requests from the wire format to the engine's types; `answers.py` converts back.

The engine gets a prompt and parameters, and never sees a request of the wire format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import RequestError
from jpaged.inputs import Params, Prompt, TextPrompt, TokensPrompt
from jpaged.sampling_params import SamplingParams
from jpaged.server.beams import beam_params, refuse_beam_fields
from jpaged.server.echo import needed_prompt_logprobs
from jpaged.server.errors import ModelNotFoundError
from jpaged.server.messages import ChatMessage
from jpaged.server.prompt_logprobs import refuse_prompt_logprobs_in_streams
from jpaged.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingRequest

MAX_PROMPTS = 1024
MAX_ANSWERS = 1024


def check_model(request: SamplingRequest, served: str) -> None:
    if request.model is not None and request.model != served:
        raise ModelNotFoundError(
            f"model {request.model!r:.200} is not served here; use {served!r}", param="model"
        )


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a request, one or a list; each is text or token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [TokensPrompt(prompt_token_ids=prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt takes at most {MAX_PROMPTS} prompts in one request, got {len(prompt)}: "
            "send several requests",
            param="prompt",
        )
    if kinds == {str}:
        return list(prompt)
    if kinds == {list} and all(set(map(type, token_ids)) == {int} for token_ids in prompt):
        return [TokensPrompt(prompt_token_ids=token_ids) for token_ids in prompt]
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
        f"token ids, and not empty; got {_kinds(prompt)}",
        param="prompt",
    )


def salted(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """Add a salt: the prompt shares cached blocks only with prompts that have the same."""
    if cache_salt is None:
        return prompt
    if isinstance(prompt, str):
        return TextPrompt(prompt=prompt, cache_salt=cache_salt)
    prompt = prompt.copy()
    prompt["cache_salt"] = cache_salt
    return prompt


def chat_messages(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Return the conversation as chat templates take it."""
    return [_message(message) for message in request.messages]


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, Any], *, has_text: bool
) -> Params:
    """Convert the parameters of a completion.

    defaults: the model's sampling parameters, for those that the request leaves out.
    """
    best_of = request.best_of
    if request.stream and best_of is not None and best_of > request.n:
        raise RequestError(
            f"best_of ({best_of}) must not be more than n ({request.n}) in a stream: which answers "
            "are the best is known only when all are finished",
            param="best_of",
        )
    return _params(
        request,
        defaults,
        request.max_tokens,
        best_of=best_of,
        logprobs=request.logprobs,
        prompt_logprobs=needed_prompt_logprobs(request),
        has_text=has_text,
    )


def check_num_answers(prompts: Sequence[Prompt], params: Params) -> None:
    """Raise `RequestError` if prompts times sequences are too many for one request."""
    num_answers = len(prompts) * params.num_sequences
    if num_answers > MAX_ANSWERS:
        if isinstance(params, BeamSearchParams):
            name = "beam_width"
        else:
            name = "n" if params.best_of is None else "best_of"
        raise RequestError(
            f"{name} ({params.num_sequences}) for each of {len(prompts)} prompts makes "
            f"{num_answers} answers; one request takes at most {MAX_ANSWERS}",
            param=name,
        )


def chat_params(
    request: ChatCompletionRequest, defaults: Mapping[str, Any], *, has_text: bool
) -> Params:
    """Convert the parameters of a chat.

    `max_completion_tokens` is OpenAI's new name of `max_tokens`; without either, an answer may fill
    the context.

    defaults: the model's sampling parameters, for those that the request leaves out.
    """
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError(
            f"max_tokens ({request.max_tokens}) and max_completion_tokens "
            f"({request.max_completion_tokens}) mean the same: give one of them",
            param="max_completion_tokens",
        )
    if request.top_logprobs > 0 and not request.logprobs:
        raise RequestError(
            f"top_logprobs ({request.top_logprobs}) needs logprobs: set it to true",
            param="top_logprobs",
        )
    return _params(
        request,
        defaults,
        limits.pop() if limits else None,
        logprobs=request.top_logprobs if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        has_text=has_text,
    )


def includes_usage(request: SamplingRequest) -> bool:
    """Whether a stream ends with a chunk of token counts."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise RequestError(
            "stream_options is only for streams: set stream to true or leave it out",
            param="stream_options",
        )
    return request.stream_options.include_usage


def _params(
    request: SamplingRequest,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    *,
    best_of: int | None = None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    has_text: bool,
) -> Params:
    refuse_prompt_logprobs_in_streams(request)
    if request.use_beam_search:
        return beam_params(
            request,
            max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            has_text=has_text,
        )
    refuse_beam_fields(request)
    return SamplingParams(
        n=request.n,
        best_of=best_of,
        seed=request.seed,
        max_tokens=max_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        detokenize=has_text,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **_drawing(request, defaults),
    )


def _drawing(request: SamplingRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return temperature, top_k and top_p of the request, and the defaults for the others."""
    named = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p")}
    return {**defaults, **{name: value for name, value in named.items() if value is not None}}


def _message(message: ChatMessage) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        values["name"] = message.name
    return values


def _kinds(prompt: list[Any]) -> str:
    names = sorted({type(member).__name__ for member in prompt})
    return f"a list of {' and '.join(names)}" if names else "an empty list"
