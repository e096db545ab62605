"""How the tokens of one request are chosen, and when to stop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from jpaged.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_SEQUENCES = 128
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
# Most likely tokens that a step reports at all: beam search looks at more than users do.
MAX_REPORTED_TOKENS = 32
MAX_TOP_K = 2**31 - 1
# Below this, dividing logits by the temperature could overflow float32; the result is greedy.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; names and defaults are vLLM's.

    n: answers to return. best_of: answers to generate, of which the n with the highest
        cumulative log-probability are returned; None generates n.
    temperature: 0 chooses the most likely token; 1 samples from the model's distribution.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of tokens, most likely first, whose probability reaches top_p.
    seed: makes the answer reproducible; None draws one when the request is admitted.
    max_tokens: most tokens to generate; None generates until the context is full.
    stop: strings that end the answer; it is cut before the earliest of them.
    stop_token_ids: tokens that end the answer, besides the model's end-of-sequence tokens.
    ignore_eos: do not stop at the model's end-of-sequence tokens.
    include_stop_str_in_output: keep the stop string (or the text of the stop token) in the text.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: make text at all; without, only token ids are returned.
    logprobs: report the log-probability of every generated token and of that many most likely
        ones, in the model's own distribution; None reports nothing.
    prompt_logprobs: the same for every token of the prompt but the first, which follows nothing.
        With it max_tokens may be 0, to score a prompt without generating anything.

    Raises `RequestError` that names the field.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, low=1, high=MAX_SEQUENCES)
        if self.best_of is not None:
            check_int("best_of", self.best_of, low=self.n, high=MAX_SEQUENCES)
        check_number("temperature", self.temperature, low=0.0, high=math.inf)
        check_number("top_p", self.top_p, low=0.0, high=1.0, low_included=False)
        check_int("top_k", self.top_k, low=-1, high=MAX_TOP_K)
        if self.seed is not None:
            check_int("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED)
        _check_max_tokens(self)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            check_bool(name, getattr(self, name))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_stop_token_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise RequestError("stop needs text, but detokenize is False", param="stop")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make parameters from untyped input; an unknown name is refused, never ignored."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(
                    f"unknown sampling parameter {name!r}; supported: {', '.join(known)}",
                    param=name,
                )
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        """Answers to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_reported_logprobs(self) -> int | None:
        """What is asked of the sampler: choosing the best answers needs those of their tokens."""
        return 0 if self.logprobs is None and self.num_sequences > self.n else self.logprobs

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert self.stop is None or isinstance(self.stop, tuple)
        return self.stop or ()


def check_number(
    name: str, value: object, *, low: float, high: float, low_included: bool = True
) -> None:
    """Comparisons with NaN are false, so the test is written to let only good values through."""
    interval = f"{'[' if low_included else '('}{low}, {high}{']' if high < math.inf else ')'}"
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        if (value > low or (low_included and value == low)) and value <= high:
            return
    raise RequestError(f"{name} must be a number in {interval}, got {value!r}", param=name)


def check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= low:
        if high is None or value <= high:
            return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise RequestError(f"{name} must be an integer {limits}, got {value!r}", param=name)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}", param=name)


def _check_max_tokens(params: SamplingParams) -> None:
    if params.max_tokens == 0 and not isinstance(params.max_tokens, bool):
        if params.prompt_logprobs is None or params.num_sequences > 1:
            raise RequestError(
                "max_tokens must be an integer of at least 1, got 0, which makes sense only for "
                "one answer with prompt_logprobs",
                param="max_tokens",
            )
    elif params.max_tokens is not None:
        check_int("max_tokens", params.max_tokens, low=1)


def _checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop"
        )
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_STRING_LENGTH:
            raise RequestError(
                f"stop strings must have 1 to {MAX_STOP_STRING_LENGTH} characters, "
                f"got {string!r:.80}",
                param="stop",
            )
    return strings


def _checked_stop_token_ids(token_ids: Sequence[int] | None) -> tuple[int, ...]:
    checked = tuple(token_ids or ())
    if len(checked) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(checked)}",
            param="stop_token_ids",
        )
    for token_id in checked:
        check_int("stop_token_ids", token_id, low=0)
    return checked
