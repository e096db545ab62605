"""Limits the log-probabilities of one response, as a small body could ask for millions."""

from collections import Counter
from collections.abc import Sequence

from jpaged.errors import RequestError
from jpaged.inputs import Params
from jpaged.server.protocol import ChatCompletionRequest, CompletionRequest

# About 70 MB of JSON in the form of `prompt_logprobs`, 16 MB in that of `logprobs`.
MAX_LOGPROB_ENTRIES = 2**20
# Counted for answers without max_tokens: few of them fill a long context.
UNSET_MAX_TOKENS = 4096


def check_num_logprobs(
    request: CompletionRequest | ChatCompletionRequest,
    num_prompt_tokens: Sequence[int],
    params: Params,
) -> None:
    """Raise `RequestError` if the response could have too many log-probabilities.

    num_prompt_tokens: of each prompt.
    """
    counts = _entries(request, num_prompt_tokens, params)
    total = sum(counts.values())
    if total <= MAX_LOGPROB_ENTRIES:
        return
    name = max(counts, key=lambda each: counts[each])
    raise RequestError(
        f"{name} makes an answer of up to {total} log-probabilities, for {sum(num_prompt_tokens)} "
        f"prompt tokens in {len(num_prompt_tokens)} prompts, {params.num_answers} choices a "
        f"prompt and max_tokens {params.max_tokens}; one request takes at most "
        f"{MAX_LOGPROB_ENTRIES}: ask for fewer, or send several requests",
        param=name,
    )


def _entries(
    request: CompletionRequest | ChatCompletionRequest,
    num_prompt_tokens: Sequence[int],
    params: Params,
) -> Counter[str]:
    """Return the number of log-probabilities in the response, by the field that asks for them.

    A token has its own one and those of the likeliest tokens. Each choice of completions repeats
    those of its prompt.
    """
    choices = params.num_answers
    prompt_tokens = sum(num_prompt_tokens)
    max_tokens = UNSET_MAX_TOKENS if params.max_tokens is None else params.max_tokens
    counts: Counter[str] = Counter()
    is_chat = isinstance(request, ChatCompletionRequest)
    if params.logprobs is not None:
        name = "top_logprobs" if is_chat and params.logprobs > 0 else "logprobs"
        answer_tokens = len(num_prompt_tokens) * choices * max_tokens
        counts[name] += answer_tokens * (1 + params.logprobs)
    if not is_chat and request.echo and request.logprobs is not None:
        counts["logprobs"] += prompt_tokens * choices * (1 + request.logprobs)
    if request.prompt_logprobs is not None:
        shown = prompt_tokens * (1 if is_chat else choices)
        counts["prompt_logprobs"] += shown * (1 + request.prompt_logprobs)
    return counts
