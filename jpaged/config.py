"""Engine options: the only place that holds their defaults and help texts."""

import math
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from jpaged.errors import ConfigError

DEMO_MODEL = "smollm2-135m-instruct"
# Values of `generation_config` that name no folder; vLLM's.
MODELS_GENERATION_CONFIG, NO_GENERATION_CONFIG = "auto", "vllm"

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "int8", "float8_e4m3fn", "float8_e5m2"]
PreemptionMode = Literal["auto", "recompute", "swap"]
AttentionBackend = Literal["auto", "xla", "triton", "pallas-tpu"]

GIB = 1 << 30
MIN_BLOCK_SIZE = 8
MAX_BLOCK_SIZE = 256
# Random keys of JAX are made from 32 bits.
MIN_SEED, MAX_SEED = -(2**31), 2**32 - 1


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """A dataclass field with the help text that the command line shows for it.

    metadata: `is_secret=True` keeps the value out of errors.
    """
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine, checked once when it is made. Raises `ConfigError`."""

    model: str = option(
        DEMO_MODEL,
        "a folder in Hugging Face format, a .gguf file, a Hub id, or the name of the demo model",
    )
    served_model_name: str | None = option(
        None, "name that clients and metrics give the model (default: its name above)"
    )
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer: prompts and answers are token ids only"
    )
    generation_config: str = option(
        MODELS_GENERATION_CONFIG,
        "sampling parameters of requests that give none; auto: those of the model's "
        "generation_config.json; vllm: none of the model's; else a folder with such a file",
    )
    dtype: DType = option(
        "auto", "type of weights and activations; auto: float32 on a CPU, else bfloat16"
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "type of the KV cache; auto: that of the activations. The others hold 2 to 4 times as many "
        "tokens, and change answers a little",
    )
    tensor_parallel_size: int = option(
        1, "devices over which the model and the KV cache are split, each with some of the heads"
    )
    max_model_len: int | None = option(
        None, "most tokens of prompt and answer together (default: what the model was trained for)"
    )
    block_size: int | None = option(
        None,
        "tokens a KV block; a power of two from 8 to 256 (default: 16; on TPUs as many as take "
        "64 KiB a layer, where that is more)",
    )
    max_num_seqs: int | None = option(
        None, "most requests that run at once (default: 64 on a CPU, else 256)"
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens computed in one step (default: 512 on a CPU, else 2048, or max_num_seqs)",
    )
    bucket_growth: int = option(
        2,
        "how many times larger each batch size that is compiled for is than the one before; more "
        "compiles fewer programs, and computes more padding",
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV blocks of requests that began with the same tokens"
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the device's memory that weights, programs and KV cache may take; of a GPU, XLA "
        "reserves it at start, unless XLA_CLIENT_MEM_FRACTION says how much; in a container, the "
        "memory of a CPU is the container's",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "bytes of the KV cache on each device, instead of computing them from the free memory",
    )
    num_gpu_blocks_override: int | None = option(
        None, "number of usable KV blocks, instead of computing it from the free memory"
    )
    swap_space: float | None = option(
        None,
        "GiB of host memory for the KV blocks of preempted requests; 0 computes them again "
        "(default: an eighth of the memory, at most 4; 0 on a CPU)",
    )
    preemption_mode: PreemptionMode = option(
        "auto", "how preempted requests come back; auto: whichever is measured to be faster"
    )
    attention_backend: AttentionBackend = option(
        "auto",
        "implementation of paged attention; auto: triton on NVIDIA cards, pallas-tpu on TPUs, "
        "else xla (on a CPU the first two only interpret their kernels, to test them)",
    )
    tuning_file: str | None = option(
        None,
        "measured sizes of attention kernels, from `jpaged bench kernels --tune` (default: those "
        "that come with jpaged)",
    )
    seed: int = option(0, "base of all random keys")
    compilation_cache_dir: str | None = option(
        None, "folder of compiled programs (default: jpaged/programs in the user's cache folder)"
    )
    check_invariants: bool = option(False, "recompute the block pool's totals after every step")

    def __post_init__(self) -> None:
        check_types(self)
        _check_block_size(self.block_size)
        if self.served_model_name == "":
            raise ConfigError("served_model_name must not be empty", option="served_model_name")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", option=name)
        if self.bucket_growth < 2:
            raise ConfigError(
                f"bucket_growth must be at least 2, got {self.bucket_growth}",
                option="bucket_growth",
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}",
                option="gpu_memory_utilization",
            )
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise ConfigError(
                f"seed must be from {MIN_SEED} to {MAX_SEED}, got {self.seed}", option="seed"
            )
        _check_swap_space(self)
        num_tokens, num_seqs = self.max_num_batched_tokens, self.max_num_seqs
        if num_tokens is not None and num_seqs is not None and num_tokens < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({num_tokens}) must be at least max_num_seqs "
                f"({num_seqs}): every running request needs one token a step. Raise the first or "
                "lower the second.",
                option="max_num_batched_tokens",
            )


_POSITIVE = (
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
)


def check_types(options: Any) -> None:
    """Refuse a value that is not of its field's type. Options come from untyped code, too.

    options: a dataclass instance. Raises `ConfigError` that names the field.
    """
    hints = get_type_hints(type(options))
    for item in fields(options):
        value, hint = getattr(options, item.name), hints[item.name]
        members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not any(_is_of_type(value, member) for member in members):
            is_secret = item.metadata.get("is_secret", False)
            got = "another value, which is not shown" if is_secret else repr(value)
            raise ConfigError(
                f"{item.name} must be {' or '.join(map(_describe, members))}, got {got}",
                option=item.name,
            )


def _is_of_type(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # of any length
        member, _ = get_args(kind)
        return isinstance(value, tuple) and all(_is_of_type(each, member) for each in value)
    if kind is float:
        # An int will do for a float. Neither NaN nor infinity can mean anything.
        return type(value) in (int, float) and math.isfinite(cast(float, value))
    # A bool is an int in Python, but never what is meant by one.
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return f"a tuple of values {_describe(get_args(kind)[0])}"
    if kind is float:
        return "a finite number"
    return "None" if kind is NoneType else f"of type {kind.__name__}"


def _check_swap_space(config: EngineConfig) -> None:
    if config.swap_space is not None and config.swap_space < 0:
        raise ConfigError(
            f"swap_space must be a number of GiB, 0 or more, got {config.swap_space!r}",
            option="swap_space",
        )
    if config.preemption_mode == "swap" and config.swap_space == 0:
        raise ConfigError(
            "preemption_mode is swap, but swap_space is 0: give it some GiB or choose auto",
            option="preemption_mode",
        )


def _check_block_size(block_size: int | None) -> None:
    if block_size is None:
        return
    is_power_of_two = block_size > 0 and block_size & (block_size - 1) == 0
    if not is_power_of_two or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"block_size must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, "
            f"got {block_size}",
            option="block_size",
        )
