"""Parameters of beam search."""

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.errors import RequestError
from jpaged.sampling_params import (
    MAX_REPORTED_TOKENS,
    SamplingParams,
    check_bool,
    check_int,
    check_number,
    check_optional_int,
)

# Fields that mean the same in `SamplingParams`, which checks them.
SHARED_FIELDS = (
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "detokenize",
    "logprobs",
    "prompt_logprobs",
)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search as Hugging Face transformers does it; names are those of vLLM and transformers.

    beam_width: sequences that are followed at once.
    n: answers to return, best first; None returns all `beam_width`.
    length_penalty: an answer's score is its cumulative log-probability / length ** length_penalty,
        so values above 0 favour long answers.
    early_stopping: stop as soon as there are `beam_width` answers, instead of when no better one
        is likely.
    logprobs, prompt_logprobs: report the log-probabilities of answers' tokens, of the prompt's.

    The others are those of `SamplingParams`. Numbers may be numpy's. Raises `RequestError` that
    names the field.
    """

    beam_width: int
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
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
        width = check_int("beam_width", self.beam_width, low=1, high=MAX_REPORTED_TOKENS // 2)
        checked = {
            "beam_width": width,
            "n": check_optional_int("n", self.n, low=1, high=width),
            "length_penalty": check_number(
                "length_penalty", self.length_penalty, low=-100.0, high=100.0
            ),
            "early_stopping": check_bool("early_stopping", self.early_stopping),
            "max_tokens": check_optional_int("max_tokens", self.max_tokens, low=1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        # A beam's parameters check the others.
        each = self.sampling_params
        for name in SHARED_FIELDS:
            object.__setattr__(self, name, getattr(each, name))

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once."""
        return self.beam_width

    @property
    def num_answers(self) -> int:
        return self.beam_width if self.n is None else self.n

    @property
    def sampling_params(self) -> SamplingParams:
        """Parameters of each beam."""
        shared = {name: getattr(self, name) for name in SHARED_FIELDS}
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, **shared)

    def num_candidates(self, num_stop_token_ids: int) -> int:
        """Tokens looked at in a step, enough for `beam_width` that do not stop."""
        number = max(2, 1 + num_stop_token_ids) * self.beam_width
        if number > MAX_REPORTED_TOKENS:
            raise RequestError(
                f"beam_width {self.beam_width} with {num_stop_token_ids} stop tokens needs "
                f"{number} candidates a step, and at most {MAX_REPORTED_TOKENS} are possible: "
                "choose a smaller beam_width or fewer stop_token_ids",
                param="beam_width",
            )
        return number
