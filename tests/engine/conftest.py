"""Engines of tiny models, made once for all tests that ask for the same options."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from jpaged.llm import LLM

MAX_ENGINES = 4
SMALL: dict[str, Any] = {
    "block_size": 16,  # whatever suits the device: few tokens should be many blocks
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "bucket_growth": 64,  # few programs to compile
    "num_gpu_blocks_override": 200,
    "check_invariants": True,
}


@pytest.fixture(scope="session")
def make_llm(programs_folder: Path) -> Callable[..., LLM]:
    """make_llm(folder, **options): equal arguments give the same, idle engine."""
    made: dict[str, LLM] = {}

    def make(model: Path | str, **options: Any) -> LLM:
        options = {**SMALL, "compilation_cache_dir": str(programs_folder), **options}
        key = f"{model} {sorted(options.items())}"
        if key in made:
            made[key] = made.pop(key)  # the one used last goes last
        else:
            # Compiled programs take thousands of memory maps an engine, and a process may have
            # some ten thousands.
            while len(made) >= MAX_ENGINES:
                del made[next(iter(made))]
            made[key] = LLM(str(model), **options)
        assert not made[key].engine.has_unfinished
        return made[key]

    return make


@pytest.fixture
def count_compilations():
    """A context that counts how often XLA compiles, or reads a program from its cache."""

    @contextmanager
    def counting():
        events = []

        def listen(event: str, duration: float, **_: Any) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                events.append(duration)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield lambda: len(events)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counting
