"""How much one step computes, where the options do not say."""

from dataclasses import dataclass

from jpaged.config import EngineConfig

# A CPU computes so slowly that larger steps only make each token late.
_CPU_DEFAULTS = (64, 512)
_DEVICE_DEFAULTS = (256, 2048)


@dataclass(frozen=True)
class StepLimits:
    """max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


def step_limits(config: EngineConfig, platform: str) -> StepLimits:
    """The limits given as options, or those that suit the platform.

    A default gives way to the option beside it: every running request needs a token a step.
    """
    num_seqs, num_tokens = _CPU_DEFAULTS if platform == "cpu" else _DEVICE_DEFAULTS
    if config.max_num_batched_tokens is None:
        num_seqs = config.max_num_seqs or num_seqs
        return StepLimits(num_seqs, max(num_tokens, num_seqs))
    num_tokens = config.max_num_batched_tokens
    return StepLimits(config.max_num_seqs or min(num_seqs, num_tokens), num_tokens)
