"""From a prompt and its parameters to a request the engine can run, or a refusal."""

import secrets
import time
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, NotRequired, TypedDict

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import PromptTooLongError, RequestError
from jpaged.generation import Generation
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.beam_group import BeamGroup
from jpaged.scheduling.group_policy import policy_of
from jpaged.scheduling.request import Request
from jpaged.scheduling.request_group import RequestGroup
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.length_limit import check_text_length, num_characters
from jpaged.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A text with options. cache_salt: only prompts with the same one share cached blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


MAX_SALT_LENGTH = 256

Prompt = str | TextPrompt | TokensPrompt
Params = SamplingParams | BeamSearchParams


class InputProcessor:
    """Checks requests against the model and its limits. Does no work that a refusal would waste."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._numbers = count()

    def request(
        self, request_id: str, prompt: Prompt, params: Params, *, arrival_time: float | None = None
    ) -> Generation:
        """Make a request. Thread-safe. Raises `RequestError` that names the field at fault.

        arrival_time: when the client asked, on the clock of `time.monotonic()`; now by default.
        """
        text, token_ids = self._tokenize(prompt)
        cache_keys = _cache_keys(prompt)
        is_beam = isinstance(params, BeamSearchParams)
        each = params.sampling_params if is_beam else params
        policy = policy_of(params)
        stop_token_ids = self._stop_token_ids(each)
        max_tokens = self._max_tokens(len(token_ids), each.max_tokens)
        seed = secrets.randbits(63) if each.seed is None else each.seed
        detokenizer = self._detokenizer(token_ids, each)
        if arrival_time is None:
            arrival_time = time.monotonic()
        requests = [
            Request(
                request_id,
                token_ids,
                each,
                max_tokens=max_tokens,
                seed=seed_of_answer(seed, index),
                stop_token_ids=stop_token_ids,
                cache_keys=cache_keys,
                index=index,
                policy=policy,
                arrival_time=arrival_time,
            )
            for index in range(params.num_sequences)
        ]
        number = next(self._numbers)
        if is_beam:
            num_candidates = params.num_candidates(len(stop_token_ids))
            stop_checker = detokenizer if each.stop else None
            group = BeamGroup(number, params, requests, num_candidates, stop_checker)
        else:
            group = RequestGroup(number, requests)
        return Generation(
            group,
            text,
            token_ids,
            each,
            num_answers=params.num_answers,
            detokenizer=detokenizer,
            arrival_time=arrival_time,
        )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        listed = params.stop_token_ids or ()
        self._check_token_ids("stop_token_ids", listed)
        return frozenset(listed) | (frozenset() if params.ignore_eos else self.eos_token_ids)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(fields, dict):
            fields = {}
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        if set(fields) - {"cache_salt"} not in ({"prompt"}, {"prompt_token_ids"}):
            raise RequestError(
                "a prompt must be a text, {'prompt': text} or {'prompt_token_ids': [...]}, the "
                f"latter two with or without 'cache_salt', got {prompt!r:.80}",
                param="prompt",
            )
        if text is not None:
            token_ids = self._encode(text)
        if not isinstance(token_ids, Sequence):
            raise RequestError(
                f"prompt_token_ids must be a list of integers, got {token_ids!r:.80}",
                param="prompt",
            )
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one", param="prompt")
        self._check_token_ids("prompt", token_ids)
        return text, list(token_ids)

    def _encode(self, prompt: object) -> list[int]:
        if not isinstance(prompt, str):
            raise RequestError(f"prompt must be a text, got {prompt!r:.80}", param="prompt")
        if self.tokenizer is None:
            raise RequestError(
                "prompts must be token ids: the engine was started with skip_tokenizer_init",
                param="prompt",
            )
        check_text_length(len(prompt), self.tokenizer, self.max_model_len, param="prompt")
        return self.tokenizer.encode(prompt)

    def _check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Inside jit an id out of range would silently become another token."""
        for token_id in token_ids:
            is_int = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"token ids of {param} must be integers from 0 to {self.vocab_size - 1}, "
                    f"got {token_id!r}",
                    param=param,
                )

    def _max_tokens(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """Tokens that may be generated: all that is left of the context when none are named."""
        limit, left = self.max_model_len, self.max_model_len - num_prompt_tokens
        if left < 1 and not (wanted == 0 and left == 0):
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, and the model's context holds {limit} "
                "with at least one of them for the answer. Shorten the prompt.",
                param="prompt",
            )
        if wanted is None:
            return left
        if wanted > left:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}, together "
                f"{num_prompt_tokens + wanted}, but the model's context holds {limit}. "
                f"Shorten the prompt or set max_tokens to at most {left}.",
                param="max_tokens",
            )
        return wanted

    def _detokenizer(self, token_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            if params.stop:
                raise RequestError(
                    "stop strings need a tokenizer, but the engine was started with "
                    "skip_tokenizer_init; use stop_token_ids",
                    param="stop",
                )
            return None
        if not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop_strings=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )


def seed_of_answer(seed: int, index: int) -> int:
    """A stream of random numbers for each of several answers; the first has the seed itself."""
    if index == 0:
        return seed
    content = seed.to_bytes(9, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 1


def _cache_keys(prompt: Prompt) -> dict[str, str]:
    """What K/V of the prompt depend on besides its tokens."""
    if isinstance(prompt, str) or "cache_salt" not in prompt:
        return {}
    salt = prompt["cache_salt"]
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT_LENGTH:
        raise RequestError(
            f"cache_salt must be a text of 1 to {MAX_SALT_LENGTH} characters, got {salt!r:.80}; a "
            "digest of a longer one does as well",
            param="cache_salt",
        )
    return {"cache_salt": salt}


def chat_prompt(
    tokenizer: Tokenizer | None,
    messages: list[dict[str, Any]],
    *,
    max_model_len: int,
    add_generation_prompt: bool = True,
) -> TokensPrompt:
    """A conversation in the model's chat template, by default ready for its answer.

    One whose text cannot fit into `max_model_len` tokens is refused before it is rendered.
    """
    if tokenizer is None:
        raise RequestError(
            "chat needs a tokenizer, but the engine was started with skip_tokenizer_init",
            param="messages",
        )
    check_text_length(num_characters(messages), tokenizer, max_model_len, param="messages")
    token_ids = tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    return {"prompt_token_ids": token_ids}
