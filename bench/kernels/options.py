"""Options of `jpaged bench kernels`."""

import math
from dataclasses import dataclass

from jpaged.config import DType, EngineConfig, KVCacheDType, option
from jpaged.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KernelsOptions:
    """Options of the benchmark. Raises `ConfigError`."""

    shapes: str = option(
        "*", "cases to run, model/workload, as a shell pattern; for example 'llama-3-8b/decode*'"
    )
    dtype: DType = option("auto", "type of the queries; auto: float32 on a CPU, else bfloat16")
    kv_cache_dtype: KVCacheDType = option("auto", "type of the KV cache; auto: that of the queries")
    block_size: int | None = option(
        None, "tokens a KV block (default: as many as an engine takes on this device)"
    )
    seconds: float = option(0.2, "how long to time each contender of a case")
    json: str | None = option(None, "file to write all results to")
    tune: bool = option(
        False,
        "instead of comparing, look for the fastest sizes of our kernels for the cases of each "
        "shape, and keep what is at least 3 % faster than what is chosen unmeasured",
    )
    tuning_file: str | None = option(
        None,
        "file of measured sizes, to use and, with --tune, to write (default: the one that comes "
        "with jpaged); serve has the same option",
    )

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            raise ConfigError(f"seconds must be more than 0, got {self.seconds}")
        if self.tune and self.json is not None:
            raise ConfigError(
                "json cannot be given with --tune, which writes its results elsewhere"
            )
        self.engine_config()

    def engine_config(self) -> EngineConfig:
        """Engine options that follow from these options."""
        return EngineConfig(
            dtype=self.dtype, kv_cache_dtype=self.kv_cache_dtype, block_size=self.block_size
        )
