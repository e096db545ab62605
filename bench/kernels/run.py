"""`jpaged bench kernels`: paged attention of real models on this machine.

No time without an answer that was checked: against attention in float32 without paging, and for our
backends over pools with NaN wherever nothing may be read.
"""

import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import jax

from jpaged.bench.kernels.backends import BACKENDS, backend_contender, default_block_size
from jpaged.bench.kernels.cases import Case, draw_inputs, select_cases
from jpaged.bench.kernels.contenders import MakeContender, NotApplicable, describe_failure
from jpaged.bench.kernels.options import KernelsOptions
from jpaged.bench.kernels.peers import PEERS
from jpaged.bench.kernels.reference import WrongAnswer, checked_seconds, reference
from jpaged.bench.kernels.timing import Ceilings, measure_ceilings
from jpaged.bench.kernels.tuning import tune_kernels
from jpaged.execution.attention_choice import read_tuning_file
from jpaged.startup.engine_plan import compute_dtype, kv_cache_dtype
from jpaged.target import detect_target
from pallas_kernels.paged_attention.tuning import SHIPPED_FILE
from pallas_kernels.testing import TOLERANCES


@dataclass(frozen=True)
class Result:
    """Result of one contender in one case. None: not measured; `reason` says why.

    error: largest difference from the reference. microseconds: of one layer's attention.
    limit: what takes longer for so much work, the "copy" or the "matmul" that was timed in the
    same run; percent_of_limit: that time as a share of the contender's.
    ratio: the time as a multiple of our first backend's.
    """

    case: str
    block_size: int
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
    """Print all results, and write them to a file if the options name one."""
    config = options.engine_config()
    target = detect_target()
    dtype = compute_dtype(config, target)
    pool_dtype = kv_cache_dtype(config, dtype)
    cases = select_cases(
        options.shapes,
        is_cpu=target.is_cpu,
        dtype=dtype,
        pool_dtype=pool_dtype,
        choose_block_size=lambda shape: default_block_size(config, shape, pool_dtype),
    )
    tuning_file = SHIPPED_FILE if options.tuning_file is None else Path(options.tuning_file)
    if options.tune:
        tune_kernels(cases, tuning_file, seconds=options.seconds)
        return
    if options.tuning_file is not None:
        read_tuning_file(tuning_file)  # mistakes in it come before anything is measured
    ceilings = measure_ceilings(dtype, seconds=options.seconds)
    machine = {
        "device": target.device_kind,
        "platform": target.platform,
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
        print(f"\n{case.name}, blocks of {case.block_size} tokens", flush=True)
        makers = contenders(tuning_file)
        of_case = bench_case(case, makers, ceilings, seconds=options.seconds)
        print(*map(_line, of_case), sep="\n", flush=True)
        results += of_case
    if options.json is not None:
        document = {"machine": machine, "results": [asdict(each) for each in results]}
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    failed = [f"{each.contender} in {each.case}" for each in results if _has_failed(each)]
    if failed:
        sys.exit(f"Wrong or no answer: {', '.join(failed)}")


def contenders(tuning_file: Path) -> dict[str, MakeContender]:
    """List all contenders, ours first. tuning_file: has measured sizes of ours."""
    ours = {name: partial(backend_contender, name, tuning_file=tuning_file) for name in BACKENDS}
    return ours | PEERS


def bench_case(
    case: Case, makers: dict[str, MakeContender], ceilings: Ceilings, *, seconds: float
) -> list[Result]:
    inputs = draw_inputs(case)
    expected = reference(case, inputs)
    results = []
    for name, make in makers.items():
        blank = Result(case.name, case.block_size, name, is_ours=name in BACKENDS)
        try:
            contender = make(case, inputs)
            error, taken = checked_seconds(case, inputs, contender, expected, seconds=seconds)
            result = _with_time(replace(blank, error=error), case, taken, ceilings)
        except NotApplicable as reason:
            result = replace(blank, reason=f"left out: {reason}")
        except WrongAnswer as wrong:
            result = replace(blank, error=wrong.error, reason=str(wrong))
        # A contender may fail in any way; the others go on, and the failure is in the results.
        except Exception as failure:
            result = replace(blank, reason=describe_failure(failure))
        results.append(result)
    return _with_ratios(results)


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
    """Whether one of ours failed; a peer may."""
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
