"""Times of programs, and the most that this machine can do, measured the same way."""

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
    """Median seconds of one run, over samples of several runs, measured for about `seconds`.

    wait: waits for runs to be done. Programs must be compiled already.
    """

    def sample(num_runs: int) -> float:
        started = time.perf_counter()
        wait([run() for _ in range(num_runs)])
        return (time.perf_counter() - started) / num_runs

    end = time.perf_counter() + seconds
    samples = [sample(1)]
    num_runs = max(1, int(MIN_SAMPLE_SECONDS / samples[0]))
    if num_runs > 1:
        samples.clear()
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        samples.append(sample(num_runs))
    return statistics.median(samples)


@dataclass(frozen=True)
class Ceilings:
    """Speed of a copy in memory, counting bytes read and written, and of a large matmul."""

    copy_gb_per_s: float
    matmul_tflop_per_s: float

    def least_seconds(self, *, num_bytes: int, num_operations: int) -> tuple[float, str]:
        """Least seconds for so much work, and which of the two limits it."""
        return max(
            (num_bytes / self.copy_gb_per_s / 1e9, "copy"),
            (num_operations / self.matmul_tflop_per_s / 1e12, "matmul"),
        )


def measure_ceilings(dtype: jnp.dtype, *, seconds: float) -> Ceilings:
    size = 1024 if jax.default_backend() == "cpu" else 8192
    matrix = jnp.zeros((size, size), dtype)
    multiply = jax.jit(lambda matrix: matrix @ matrix)
    multiply(matrix).block_until_ready()
    matmul_seconds = median_seconds(
        lambda: multiply(matrix), jax.block_until_ready, seconds=seconds
    )
    copy_seconds = _measure_copy(seconds=seconds)
    return Ceilings(2 * COPY_BYTES / copy_seconds / 1e9, 2 * size**3 / matmul_seconds / 1e12)


def _measure_copy(*, seconds: float) -> float:
    """Time a copy in place: finding new memory would take longer than copying on a CPU."""
    values = [jnp.zeros(COPY_BYTES // 4, jnp.float32)]
    increase = jax.jit(lambda values: values + 1, donate_argnums=0)

    def run() -> None:
        values[0] = increase(values[0])

    run()
    return median_seconds(run, lambda _: values[0].block_until_ready(), seconds=seconds)
