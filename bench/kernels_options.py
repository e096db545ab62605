"""Options of `jpaged bench kernels`."""

import math
from dataclasses import dataclass

from jpaged.config import DType, KVCacheDType, option
from jpaged.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KernelsOptions:
    """Raises `ConfigError`."""

    shapes: str = option(
        "*", "cases to run, model/workload, as a shell pattern; for example 'llama-3-8b/decode*'"
    )
    dtype: DType = option("auto", "type of the queries; auto: float32 on a CPU, else bfloat16")
    kv_cache_dtype: KVCacheDType = option("auto", "type of the KV cache; auto: that of the queries")
    seconds: float = option(0.2, "how long to time each contender of a case")
    json: str | None = option(None, "file to write all results to")

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            raise ConfigError(f"seconds must be more than 0, got {self.seconds}")
