"""`jpaged bench kernels`: paged attention of real models on this machine.

No time without an answer that was checked: against attention in float32 without paging, and for our
backends over pools with NaN wherever nothing may be read.
"""

import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.bench.kernel_cases import Case, CaseInputs, draw_inputs, select_cases
from jpaged.bench.kernel_contenders import (
    CONTENDERS,
    Contender,
    NotApplicable,
    as_numpy,
    dense_attention,
)
from jpaged.bench.kernel_timing import Ceilings, measure_ceilings, median_seconds
from jpaged.bench.kernels_options import KernelsOptions
from jpaged.config import EngineConfig
from jpaged.startup import compute_dtype, kv_cache_dtype
from pallas_kernels.testing import TOLERANCES

# More than the caches between memory and cores hold, so that every pool is read from memory.
ROTATED_BYTES = 256 << 20
MIN_POOLS, MAX_POOLS = 2, 16
REFERENCE_ROWS = 4


@dataclass(frozen=True)
class Result:
    """Of one contender in one case. What was not measured is None, and `reason` says why.

    error: largest difference from the reference. microseconds: of one layer's attention.
    limit: what takes longer for so much work, the "copy" or the "matmul" that was timed in the
    same run; percent_of_limit: that time as a share of the contender's.
    ratio: the time as a multiple of our first backend's.
    """

    case: str
    contender: str
    is_ours: bool
    error: float | None = None
    microseconds: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    limit: str | None = None
    percent_of_limit: float | None = None
    ratio: float | None = None
    reason: str | None = None


def bench_kernels(options: KernelsOptions) -> None:
    """Prints all results, and writes them to a file if there is to be one."""
    config = EngineConfig(dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype)
    dtype = compute_dtype(config)
    pool_dtype = kv_cache_dtype(config, dtype)
    is_cpu = jax.default_backend() == "cpu"
    cases = select_cases(options.shapes, is_cpu=is_cpu, dtype=dtype, pool_dtype=pool_dtype)
    ceilings = measure_ceilings(dtype, seconds=options.seconds)
    machine = {
        "device": jax.local_devices()[0].device_kind,
        "platform": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dtype": dtype.name,
        "kv_cache_dtype": pool_dtype.name,
        "tolerance": TOLERANCES[dtype.name],
        **asdict(ceilings),
    }
    print(*(f"{name}: {_shown(value)}" for name, value in machine.items()), sep="\n", flush=True)
    results = []
    for case in cases:
        print(f"\n{case.name}", flush=True)
        of_case = bench_case(case, ceilings, seconds=options.seconds)
        print(*map(_line, of_case), sep="\n", flush=True)
        results += of_case
    if options.json is not None:
        document = {"machine": machine, "results": [asdict(each) for each in results]}
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    failed = [f"{each.contender} in {each.case}" for each in results if _has_failed(each)]
    if failed:
        sys.exit(f"Wrong or no answer: {', '.join(failed)}")


def bench_case(case: Case, ceilings: Ceilings, *, seconds: float) -> list[Result]:
    num_pools = -(-ROTATED_BYTES // case.pool_bytes)
    inputs = draw_inputs(case, num_pools=min(max(num_pools, MIN_POOLS), MAX_POOLS))
    reference = _reference(case, inputs)
    results = []
    for name, make in CONTENDERS.items():
        blank = Result(case.name, name, is_ours=name in ("triton", "xla"))
        try:
            contender = make(case, inputs)
            error = _largest_error(case, contender, reference)
            result = replace(blank, error=error)
            if not error <= TOLERANCES[case.dtype.name]:
                result = replace(result, reason=f"wrong by {error:.2g}, so not timed")
            else:
                taken = median_seconds(contender.run, contender.wait, seconds=seconds)
                result = _with_time(result, case, taken / len(inputs.pools), ceilings)
        except NotApplicable as reason:
            result = replace(blank, reason=f"left out: {reason}")
        # A contender may fail in any way; the others go on, and the failure is in the results.
        except Exception as failure:
            message = str(failure).strip().partition("\n")[0]
            result = replace(blank, reason=f"failed: {type(failure).__name__}: {message:.200}")
        results.append(result)
    return _with_ratios(results)


def _reference(case: Case, inputs: CaseInputs) -> np.ndarray:
    """The right answer over the first pool."""
    attend = jax.jit(
        lambda query, pool: dense_attention(
            case,
            inputs,
            query,
            pool,
            dtype=jnp.dtype("float32"),
            num_rows_at_once=REFERENCE_ROWS,
        )
    )
    return np.asarray(attend(inputs.query, inputs.pools[0]))


def _largest_error(case: Case, contender: Contender, reference: np.ndarray) -> float:
    """NaN if there is one in an answer."""
    answers = [contender.run()[0]]
    if contender.run_poisoned is not None:
        answers.append(contender.run_poisoned())
    contender.wait(answers)
    errors = [np.abs(as_numpy(answer, case) - reference).max() for answer in answers]
    return float(np.max(errors))


def _with_time(result: Result, case: Case, seconds: float, ceilings: Ceilings) -> Result:
    least_seconds, limit = ceilings.least_seconds(
        num_bytes=case.num_bytes, num_operations=case.num_operations
    )
    return replace(
        result,
        microseconds=1e6 * seconds,
        gb_per_s=case.num_bytes / seconds / 1e9,
        tflop_per_s=case.num_operations / seconds / 1e12,
        limit=limit,
        percent_of_limit=100 * least_seconds / seconds,
    )


def _with_ratios(results: list[Result]) -> list[Result]:
    ours = next((each.microseconds for each in results if each.is_ours and each.microseconds), None)
    if ours is None:
        return results
    return [
        replace(each, ratio=each.microseconds / ours) if each.microseconds else each
        for each in results
    ]


def _has_failed(result: Result) -> bool:
    """Of ours: peers may do as they like."""
    is_left_out = result.reason is None or result.reason.startswith("left out")
    return result.is_ours and not is_left_out


def _line(result: Result) -> str:
    if result.microseconds is None:
        return f"  {result.contender:20} {result.reason}"
    return (
        f"  {result.contender:20} {result.microseconds:10.1f} µs {result.gb_per_s:8.1f} GB/s "
        f"{result.tflop_per_s:7.2f} TFLOP/s {result.percent_of_limit:6.1f} % of {result.limit:6} "
        f"{result.ratio or 1:7.2f} x  error {result.error:.1e}"
    )


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
