"""How the tokens of one request are chosen, and when to stop."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Self

from jpaged.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_SEQUENCES = 128
MAX_SEED = 2**63 - 1
# The seed that asks for a random one, as in vLLM and llama.cpp.
DRAWN_SEED = -1
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
    seed: makes the answer reproducible; None or -1 draws one when the request is admitted.
    max_tokens: most tokens to generate; None generates until the context is full.
    stop: strings that end the answer; it is cut before the earliest of them. They may contain
        special tokens, whether the text shows these or not.
    stop_token_ids: tokens that end the answer, besides the model's end-of-sequence tokens.
    ignore_eos: do not stop at the model's end-of-sequence tokens.
    include_stop_str_in_output: keep the stop string (or the text of the stop token) in the text.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: make text at all; without, only token ids are returned.
    logprobs: report the log-probability of every generated token and of that many most likely
        ones, in the model's own distribution; None reports nothing.
    prompt_logprobs: the same for every token of the prompt but the first, which follows nothing.
        With it max_tokens may be 0, to score a prompt without generating anything.

    Numbers may be numpy's. Raises `RequestError` that names the field.
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
        for name, value in self._checked_numbers().items():
            object.__setattr__(self, name, value)
        _check_max_tokens(self)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            object.__setattr__(self, name, check_bool(name, getattr(self, name)))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_stop_token_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise RequestError("stop needs text, but detokenize is False", param="stop")

    def _checked_numbers(self) -> dict[str, int | float | None]:
        n = check_int("n", self.n, low=1, high=MAX_SEQUENCES)
        seed = check_optional_int("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED)
        return {
            "n": n,
            "best_of": check_optional_int("best_of", self.best_of, low=n, high=MAX_SEQUENCES),
            "temperature": check_number("temperature", self.temperature, low=0.0, high=math.inf),
            "top_p": check_number("top_p", self.top_p, low=0.0, high=1.0, low_included=False),
            "top_k": check_int("top_k", self.top_k, low=-1, high=MAX_TOP_K),
            "seed": None if seed == DRAWN_SEED else seed,
            "max_tokens": check_optional_int("max_tokens", self.max_tokens, low=0),
            "logprobs": check_optional_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS),
            "prompt_logprobs": check_optional_int(
                "prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS
            ),
        }

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
    def num_answers(self) -> int:
        """Answers to return, the best of those generated."""
        return self.n

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
) -> float:
    """The value as a float, if it is finite and within the limits."""
    interval = f"{'[' if low_included else '('}{low}, {high}{']' if high < math.inf else ')'}"
    if isinstance(value, Real) and not isinstance(value, bool):
        number = _float(value)
        if math.isfinite(number) and (number > low or (low_included and number == low)):
            if number <= high:
                return number
    raise RequestError(f"{name} must be a number in {interval}, got {_shown(value)}", param=name)


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        return math.inf


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes out integers of some thousand digits only
        return f"an {type(value).__name__} that is too long to show"


def check_int(name: str, value: object, *, low: int, high: int | None = None) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low:
        if high is None or int(value) <= high:
            return int(value)
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise RequestError(f"{name} must be an integer {limits}, got {_shown(value)}", param=name)


def check_optional_int(
    name: str, value: object, *, low: int, high: int | None = None
) -> int | None:
    return None if value is None else check_int(name, value, low=low, high=high)


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool) and not _is_array(value, num_dimensions=0, kind="b"):
        raise RequestError(f"{name} must be true or false, got {_shown(value)}", param=name)
    return bool(value)


def _check_max_tokens(params: SamplingParams) -> None:
    if params.max_tokens == 0 and (params.prompt_logprobs is None or params.num_sequences > 1):
        raise RequestError(
            "max_tokens must be an integer of at least 1, got 0, which makes sense only for "
            "one answer with prompt_logprobs",
            param="max_tokens",
        )


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _members("stop", stop, "strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop"
        )
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_STRING_LENGTH:
            raise RequestError(
                f"stop strings must have 1 to {MAX_STOP_STRING_LENGTH} characters, "
                f"got {_shown(string)}",
                param="stop",
            )
    return strings


def _checked_stop_token_ids(token_ids: object) -> tuple[int, ...]:
    listed = _members("stop_token_ids", token_ids, "integers")
    if len(listed) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(listed)}",
            param="stop_token_ids",
        )
    return tuple(check_int("stop_token_ids", token_id, low=0) for token_id in listed)


def _is_array(value: Any, *, num_dimensions: int, kind: str | None = None) -> bool:
    """Whether a value is numpy's, of a kind of type. Importing numpy would slow down `--help`."""
    if type(value).__module__.partition(".")[0] != "numpy" or value.ndim != num_dimensions:
        return False
    return kind is None or value.dtype.kind == kind


def _members(name: str, value: Any, kind: str) -> tuple[Any, ...]:
    """Members of a list, a tuple, a set or a one-dimensional array; None has none."""
    if value is None:
        return ()
    if _is_array(value, num_dimensions=1):
        return tuple(value.tolist())
    if not isinstance(value, Collection) or isinstance(value, str | bytes | bytearray | Mapping):
        raise RequestError(f"{name} must be a list of {kind}, got {_shown(value)}", param=name)
    return tuple(value)
