"""Times of programs, and what this machine can do at most, measured the same way."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

COPY_BYTES = 256 << 20
MIN_SAMPLE_SECONDS = 2e-3  # a sample of less would measure the clock and the launch
MIN_SAMPLES = 3


def median_seconds(run: Callable[[], Any], wait: Callable[[Any], Any], *, seconds: float) -> float:
    """Of one run, over samples of several, for about so many seconds. The first run is no part of
    it: it may compile. wait: for a run to be done."""
    wait(run())
    started = time.perf_counter()
    wait(run())
    num_runs = max(1, int(MIN_SAMPLE_SECONDS / (time.perf_counter() - started)))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        started = time.perf_counter()
        results = [run() for _ in range(num_runs)]
        wait(results)
        samples.append((time.perf_counter() - started) / num_runs)
    return statistics.median(samples)


@dataclass(frozen=True)
class Ceilings:
    """A copy in memory, each byte read and written counted, and a large matmul."""

    copy_gb_per_s: float
    matmul_tflop_per_s: float

    def least_seconds(self, *, num_bytes: int, num_operations: int) -> tuple[float, str]:
        """For so much work, and which of the two limits it."""
        return max(
            (num_bytes / self.copy_gb_per_s / 1e9, "copy"),
            (num_operations / self.matmul_tflop_per_s / 1e12, "matmul"),
        )


def measure_ceilings(dtype: jnp.dtype, *, seconds: float) -> Ceilings:
    is_cpu = jax.default_backend() == "cpu"
    source = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    copy = jax.jit(lambda values: values + 1)
    copy_seconds = median_seconds(lambda: copy(source), jax.block_until_ready, seconds=seconds)
    size = 1024 if is_cpu else 8192
    matrix = jnp.zeros((size, size), dtype)
    multiply = jax.jit(lambda matrix: matrix @ matrix)
    matmul_seconds = median_seconds(
        lambda: multiply(matrix), jax.block_until_ready, seconds=seconds
    )
    return Ceilings(2 * COPY_BYTES / copy_seconds / 1e9, 2 * size**3 / matmul_seconds / 1e12)
