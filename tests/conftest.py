"""Settings and fixtures of all tests."""

import os

# Before anything imports JAX.
os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import pytest
from hypothesis import settings

from tests import slices
from tests.cpu_seconds import CpuSeconds
from tests.file_scheduling import FileScheduling
from tests.typechecker import check_annotations

check_annotations()  # before anything imports what is checked

if TYPE_CHECKING:
    from jpaged.llm import LLM

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

MAX_ENGINES = 4
SMALL_ENGINE: dict[str, Any] = {
    "block_size": 16,  # whatever suits the device: few tokens should be many blocks
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "bucket_growth": 64,  # few programs to compile
    "num_gpu_blocks_override": 200,
    "check_invariants": True,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    slices.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds(), "cpu-seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slices.deselect_others(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)


@pytest.fixture(scope="session")
def programs_folder(pytestconfig: pytest.Config) -> Path:
    """Compiled programs of all tests, of all workers and of the runs before."""
    return pytestconfig.rootpath / ".cache" / "programs"


@pytest.fixture(scope="session")
def make_llm(programs_folder: Path) -> "Callable[..., LLM]":
    """make_llm(folder, **options): equal arguments give the same, idle engine."""
    from jpaged.llm import LLM

    made: dict[str, LLM] = {}

    def make(model: Path | str, **options: Any) -> LLM:
        options = {**SMALL_ENGINE, "compilation_cache_dir": str(programs_folder), **options}
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


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file."""
    from jpaged.startup.demo_model import demo_model_file

    return demo_model_file()


@pytest.fixture(scope="session")
def demo_hf_model(demo_model_path: Path) -> Any:
    """The demo model as transformers reads the same file."""
    pytest.importorskip("torch")
    from tests.hf_reference import load_hf_model

    return load_hf_model(demo_model_path)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a random Llama; see `save_tiny_llama`. Equal arguments give the same folder."""
    pytest.importorskip("torch")
    from tests.hf_reference import save_tiny_llama

    made: dict[str, Path] = {}

    def folder(**config: Any) -> Path:
        key = repr(sorted(config.items()))
        if key not in made:
            made[key] = save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), **config)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def hf_model() -> Callable[[Path], Any]:
    """Loads a folder as transformers does, once a session."""
    pytest.importorskip("torch")
    from tests.hf_reference import load_hf_model

    return cache(load_hf_model)
