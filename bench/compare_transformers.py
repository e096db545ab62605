"""`jpaged bench transformers`: jpaged beside transformers' `generate`, same weights, same work.

Answers are greedy, of fixed lengths, and compared before times are printed. Takes some minutes.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from jpaged.bench.options import ModelOptions
from jpaged.bench.workload import Work, equal_work, mixed_work
from jpaged.errors import ConfigError
from jpaged.inputs import Prompt
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams
from jpaged.startup.interruption import cleaned_up
from jpaged.step_timings import StepTimings

if TYPE_CHECKING:
    from jpaged.bench.transformers_baseline import TransformersBaseline

Result = TypeVar("Result")

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
STATIC_BATCH_SIZE = 8
START_CODE = f"""
import sys
from jpaged import LLM
model, folder = sys.argv[1:]
options = dict(max_model_len={MAX_MODEL_LEN}, max_num_seqs={MAX_NUM_SEQS})
LLM(model, compilation_cache_dir=folder, **options)
"""


def bench_transformers(options: ModelOptions) -> None:
    """Print start times, throughput beside transformers', and the host's time a step."""
    model = options.model
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the comparison needs torch, and accelerate for GGUF files; install jpaged[torch-test]"
        )
    print_machine()
    print_start_times(model)
    # Not before, as importing torch takes seconds and memory.
    from jpaged.bench.transformers_baseline import TransformersBaseline

    baseline = TransformersBaseline(model)
    llm = LLM(model, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)
    print_throughput(llm, baseline)
    print_host_time(llm)


def print_machine() -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "torch", "transformers"))
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}")


def print_start_times(model: str) -> None:
    """Print the seconds from the start of a process until its engine is ready."""
    make_folder = partial(tempfile.mkdtemp, prefix="jpaged-programs-")
    with cleaned_up(make_folder, partial(shutil.rmtree, ignore_errors=True)) as folder:
        for name in ("cold start, nothing compiled", "warm start"):
            seconds, _ = timed(partial(start_engine, model, folder))
            print(f"{name:40} {seconds:6.1f} s", flush=True)


def start_engine(model: str, cache_folder: str) -> None:
    """Start an engine in a process of its own, which ends once the engine is ready."""
    command = [sys.executable, "-c", START_CODE, model, cache_folder]
    with cleaned_up(partial(subprocess.Popen, command), subprocess.Popen.kill) as process:
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command)


def print_throughput(llm: LLM, baseline: "TransformersBaseline") -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    single = equal_work(tokenizer, 1, num_input_tokens=16, num_output_tokens=64)
    equal = equal_work(tokenizer, 32, num_input_tokens=128, num_output_tokens=64)
    mixed = mixed_work(tokenizer, 64)
    # First calls set up more than later ones do.
    run_ours(llm, single)
    baseline.generate(single, batch_size=1)
    compare(llm, baseline, "1 request, 16 in, 64 out", single, batch_size=1)
    compare(llm, baseline, "32 requests, 128 in, 64 out", equal, batch_size=32)
    compare(llm, baseline, "64 mixed requests", mixed, batch_size=STATIC_BATCH_SIZE)


def compare(
    llm: LLM, baseline: "TransformersBaseline", name: str, works: list[Work], *, batch_size: int
) -> None:
    """Print useful tokens a second: tokens asked for, without the padding of static batches."""
    our_seconds, ours = timed(lambda: run_ours(llm, works))
    their_seconds, theirs = timed(lambda: baseline.generate(works, batch_size=batch_size))
    num_equal = check_answers(baseline, works, ours, theirs)
    num_tokens = sum(work.num_output_tokens for work in works)
    ties = f"{len(works) - num_equal} answers differ after a tie" if num_equal < len(works) else ""
    print(
        f"{name:28} ours {num_tokens / our_seconds:6.1f} tok/s ({our_seconds:.1f} s), "
        f"transformers in batches of {batch_size} {num_tokens / their_seconds:6.1f} tok/s "
        f"({their_seconds:.1f} s): {their_seconds / our_seconds:.2f}x {ties}",
        flush=True,
    )


def run_ours(llm: LLM, works: list[Work]) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0, max_tokens=work.num_output_tokens, ignore_eos=True)
        for work in works
    ]
    prompts: list[Prompt] = [{"prompt_token_ids": work.prompt} for work in works]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_answers(
    baseline: "TransformersBaseline",
    works: list[Work],
    ours: list[list[int]],
    theirs: list[list[int]],
) -> int:
    """Count equal answers. The others must be as good for transformers, up to rounding."""
    num_equal = 0
    for work, our_answer, their_answer in zip(works, ours, theirs, strict=True):
        if our_answer == their_answer:
            num_equal += 1
        elif len(our_answer) != work.num_output_tokens or not baseline.is_greedy(work, our_answer):
            sys.exit(f"Wrong answer, so no times: got {our_answer}, expected {their_answer}")
    return num_equal


def print_host_time(llm: LLM) -> None:
    """Print the milliseconds of Python a step while as many requests run as can."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    works = equal_work(tokenizer, MAX_NUM_SEQS, num_input_tokens=8, num_output_tokens=64)
    llm.engine.step_timings = StepTimings()
    run_ours(llm, works)
    timings = llm.engine.step_timings
    print(f"Host's milliseconds a step with {MAX_NUM_SEQS} requests:", end="")
    for name in ("scheduling", "packing", "launching", "processing", "waiting"):
        print(f" {name} {1000 * getattr(timings, name) / timings.num_steps:.2f}", end="")
    print(flush=True)


def timed(function: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result
