"""Where memory goes: limits of containers, the share of a device, and what does not fit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import GIB, EngineConfig
from jpaged.errors import ConfigError
from jpaged.execution.kv_cache import kv_cache_spec
from jpaged.execution.programs import ProgramSpec
from jpaged.models.loading import abstract_model
from jpaged.startup import device_memory, load_engine
from jpaged.startup.device_memory import DeviceMemory, reserve_gpu_memory
from jpaged.startup.host_memory import host_memory_limit
from jpaged.startup.memory_plan import MemoryBudget, choose_num_blocks, choose_num_swap_blocks
from jpaged.startup.model_files import load_model_config, resolve_model
from jpaged.startup.step_limits import StepLimits, step_limits
from jpaged.target import described_target, detect_target
from pallas_kernels.paged_attention import XlaPagedAttention
from tests.random_llama import save_random_llama

MACHINE = host_memory_limit(Path("/no/such/root"))
CPU = described_target("cpu")
SMALL = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("random"))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n"}, MACHINE),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": f"{SMALL}\n"}, SMALL),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/memory.max": "max",
                f"{V2}/a/memory.max": f"{SMALL}",
            },
            SMALL,
        ),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{SMALL}"}, SMALL),
        ({"proc/self/cgroup": "0::/a", f"{V2}/unified/a/memory.max": f"{SMALL}"}, SMALL),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:cpuset,memory:/jp/in\n0::/\n",
                f"{V1}/jp/in/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/jp/memory.limit_in_bytes": f"{SMALL}\n",
            },
            SMALL,
        ),
        # The path is the host's; the group's own files are mounted at the top.
        (
            {
                "proc/self/cgroup": "4:memory:/docker/0123\n",
                f"{V1}/memory.limit_in_bytes": f"{SMALL}\n",
            },
            SMALL,
        ),
        ({"proc/self/cgroup": "0::/a", f"{V2}/a/memory.max": "rubbish"}, MACHINE),
    ],
)
def test_the_tightest_limit_of_a_container_counts(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    """O-83: of both versions of control groups, parents included."""
    assert host_memory_limit(write(tmp_path, files)) == expected


def test_swap_space_is_a_share_of_what_the_container_has() -> None:
    """O-83: its default and its check."""

    def num_blocks(limit: int, **options: Any) -> int:
        config = EngineConfig(preemption_mode="swap", **options)
        return choose_num_swap_blocks(config, CPU, block_bytes=1024, memory_limit=lambda: limit)

    assert num_blocks(GIB) == GIB // 8 // 1024
    assert num_blocks(64 * GIB) == 4 * GIB // 1024
    assert num_blocks(GIB, swap_space=0.5) == GIB // 2 // 1024
    with pytest.raises(ConfigError, match=r"swap_space of 2 GiB is more .* 1\.0 GiB: choose less"):
        num_blocks(GIB, swap_space=2)


@pytest.fixture
def spec(folder: Path) -> ProgramSpec:
    config = load_model_config(resolve_model(str(folder)))
    dtype, attention = jnp.dtype("float32"), XlaPagedAttention()
    return ProgramSpec(
        target=CPU,
        model=abstract_model(config, dtype),
        attention=attention,
        kv_cache=kv_cache_spec(config, attention, dtype, num_blocks=1, block_size=16),
        num_slots=4,
        max_num_tokens=16,
        num_table_blocks=32,
        seed=0,
    )


def test_devices_give_the_pool_all_they_may(spec: ProgramSpec) -> None:
    """Free memory keeps prefixes. On a CPU others need it, unless an option says how much."""
    budget = MemoryBudget(DeviceMemory(GIB, 0.9, 0, "host memory"), spec.model.num_bytes, 0)
    useful = spec.num_slots * spec.num_table_blocks
    assert choose_num_blocks(EngineConfig(), budget, spec) == useful
    given = EngineConfig(kv_cache_memory_bytes=GIB // 2)
    assert choose_num_blocks(given, budget, spec) == GIB // 2 // spec.kv_cache.block_bytes - 1
    on_gpu = replace(spec, target=described_target("h200"))
    num_blocks = choose_num_blocks(EngineConfig(), budget, on_gpu)
    assert (num_blocks + 2) * spec.kv_cache.block_bytes > budget.kv_cache
    assert num_blocks > 100 * useful


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"no memory for the KV cache: .*0\.01 GiB \(host memory\) x 0\.9 - .* are missing"),
        ({"kv_cache_memory_bytes": GIB}, "kv_cache_memory_bytes is 1073741824, which takes 1.00"),
        ({"num_gpu_blocks_override": 10**6}, "num_gpu_blocks_override is 1000000, which takes"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(
    spec: ProgramSpec, options: dict[str, Any], message: str
) -> None:
    """O-83: in a container of 10 MB, for example."""
    budget = MemoryBudget(DeviceMemory(10**7, 0.9, 10**7, "host memory"), 10**6, 0)
    with pytest.raises(ConfigError, match=message):
        choose_num_blocks(EngineConfig(**options), budget, spec)


def test_memory_is_planned_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        pytest.fail("weights are read")

    monkeypatch.setattr(load_engine, "load_model", read)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is .* GiB are left"):
        load_engine.load_engine(EngineConfig(model=str(folder), kv_cache_memory_bytes=2**50))


def test_the_share_of_a_gpu_is_what_xla_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own default is three quarters; a share that the user has chosen stays."""
    new, old = device_memory.GPU_FRACTION_VARIABLES
    card = 80 * GIB

    def planned(utilization: float) -> float:
        """Share of the card."""
        reserve_gpu_memory(utilization)
        reserved = float(device_memory.os.environ.get(new) or device_memory.os.environ[old])
        device = SimpleNamespace(
            platform="gpu",
            device_kind="NVIDIA H200",
            memory_stats=lambda: {"bytes_limit": int(card * reserved)},
        )
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        memory = device_memory.device_memory(detect_target(), utilization)
        return memory.limit * memory.share / card

    for name in (new, old):
        monkeypatch.setenv(name, "1")  # so that both are restored
        monkeypatch.delenv(name)
    assert planned(0.9) == pytest.approx(0.9 * 0.97)
    monkeypatch.delenv(new)
    monkeypatch.setenv(old, "0.5")
    assert planned(0.9) == pytest.approx(0.5 * 0.97)
    assert planned(0.4) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("options", "platform", "expected"),
    [
        ({}, "cpu", (64, 512)),
        ({}, "gpu", (256, 2048)),
        ({"max_num_seqs": 1000}, "cpu", (1000, 1000)),
        ({"max_num_batched_tokens": 32}, "tpu", (32, 32)),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 7}, "tpu", (3, 7)),
    ],
)
def test_sizes_of_steps_suit_the_device(
    options: dict[str, Any], platform: str, expected: tuple[int, int]
) -> None:
    assert step_limits(EngineConfig(**options), platform) == StepLimits(*expected)


def test_equal_starts_plan_equal_pools() -> None:
    """Whatever the process holds by then: a pool of another size would compile everything anew."""
    before = device_memory.device_memory(detect_target(), 0.9)
    ballast = bytearray(64 << 20)
    assert device_memory.device_memory(detect_target(), 0.9) == before and ballast
