"""Settings and fixtures of all tests."""

import os

# Before anything imports JAX.
os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings

from tests import slices
from tests.cpu_seconds import CpuSeconds
from tests.file_scheduling import FileScheduling
from tests.typechecker import check_annotations

check_annotations()  # before anything imports what is checked

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


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
