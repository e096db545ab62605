"""Engine options: the only place that holds their defaults and help texts."""

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

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


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """A dataclass field with the help text that the command line shows for it."""
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
    max_model_len: int | None = option(
        None, "most tokens of prompt and answer together (default: what the model was trained for)"
    )
    block_size: int | None = option(
        None,
        "tokens a KV block; a power of two from 8 to 256 (default: 16; on TPUs as many as take "
        "64 KiB a layer, where that is more)",
    )
    max_num_seqs: int = option(64, "most requests that run at once")
    max_num_batched_tokens: int = option(512, "most tokens computed in one step")
    bucket_growth: int = option(
        2,
        "how many times larger each batch size that is compiled for is than the one before; more "
        "compiles fewer programs, and computes more padding",
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV blocks of requests that began with the same tokens"
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the device's memory that weights, programs and KV cache may take"
    )
    kv_cache_memory_bytes: int | None = option(
        None, "size of the KV cache in bytes, instead of computing it from the free memory"
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
        _check_types(self)
        _check_block_size(self.block_size)
        if self.served_model_name == "":
            raise ConfigError("served_model_name must not be empty")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            _check_at_least(self, name, 1)
        _check_at_least(self, "bucket_growth", 2)
        _check_at_least(self, "kv_cache_memory_bytes", 1)
        _check_at_least(self, "num_gpu_blocks_override", 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        _check_swap_space(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request needs one token a "
                "step. Raise the first or lower the second."
            )


def _check_types(config: EngineConfig) -> None:
    """Options come from users of untyped code and command lines: refuse other types by name."""
    wanted = {
        int: ("max_num_seqs", "max_num_batched_tokens", "bucket_growth", "seed"),
        str: (
            "model",
            "generation_config",
            "dtype",
            "kv_cache_dtype",
            "preemption_mode",
            "attention_backend",
        ),
        bool: ("skip_tokenizer_init", "enable_prefix_caching", "check_invariants"),
    }
    optional_ints = (
        "max_model_len",
        "block_size",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    )
    for kind, names in wanted.items():
        for name in names:
            _check_type(name, getattr(config, name), kind)
    for name in optional_ints:
        if getattr(config, name) is not None:
            _check_type(name, getattr(config, name), int)
    for item in fields(config):
        choices = getattr(item.type, "__args__", ())
        value = getattr(config, item.name)
        if getattr(item.type, "__origin__", None) is Literal and value not in choices:
            raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, got {value!r}")


def _check_swap_space(config: EngineConfig) -> None:
    wanted = config.swap_space
    if wanted is not None:
        is_number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
        if not is_number or not math.isfinite(wanted) or wanted < 0:
            raise ConfigError(f"swap_space must be a number of GiB, 0 or more, got {wanted!r}")
        if wanted * GIB > host_memory_bytes():
            raise ConfigError(
                f"swap_space of {wanted} GiB is more than this machine's memory, "
                f"{host_memory_bytes() / GIB:.1f} GiB: choose less"
            )
    if config.preemption_mode == "swap" and wanted == 0:
        raise ConfigError(
            "preemption_mode is swap, but swap_space is 0: give it some GiB or choose auto"
        )


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_type(name: str, value: object, kind: type) -> None:
    # A bool is an int in Python, but never what is meant by one.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}")


def _check_block_size(block_size: int | None) -> None:
    if block_size is None:
        return
    is_power_of_two = block_size > 0 and block_size & (block_size - 1) == 0
    if not is_power_of_two or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"block_size must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, "
            f"got {block_size}"
        )


def _check_at_least(config: EngineConfig, name: str, minimum: int) -> None:
    value = getattr(config, name)
    if value is not None and value < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {value}")
