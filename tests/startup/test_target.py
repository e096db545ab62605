"""The one value that says what an engine runs on."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import jpaged
from jpaged.errors import ConfigError
from jpaged.startup.device_memory import SHARE_OF_RESERVED, device_memory
from jpaged.target import KNOWN_KINDS, described_target, detect_target

ROOT = Path(jpaged.__file__).parents[1]
GIB = 1 << 30


@pytest.mark.parametrize(
    ("description", "platform", "device_kind", "num_devices"),
    [
        ("cpu", "cpu", "cpu", 1),
        ("cpu x8", "cpu", "cpu", 8),
        ("h200", "gpu", "NVIDIA H200", 1),
        ("A100-80GB x2", "gpu", "NVIDIA A100-SXM4-80GB", 2),
        ("v5e-8", "tpu", "TPU v5 lite", 8),
        ("v6e-4", "tpu", "TPU v6 lite", 4),
        ("v6e x4", "tpu", "TPU v6 lite", 4),
        # Names of v5p count cores, of which a chip has two.
        ("v5p-8", "tpu", "TPU v5", 4),
    ],
)
def test_hardware_can_be_described(
    description: str, platform: str, device_kind: str, num_devices: int
) -> None:
    target = described_target(description)
    assert (target.platform, target.device_kind) == (platform, device_kind)
    assert target.num_devices == num_devices and target.mesh_shape == (1, num_devices)
    assert not target.devices and target.bytes_in_use() == 0


@pytest.mark.parametrize(
    "description", ["", "a100", "v9z-8", "v5e-0", "v5p-7", "h200-2", "a100-80gb-2", "v5e x", "x2"]
)
def test_unknown_hardware_is_refused(description: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described_target(description)
    assert repr(description) in str(caught.value)
    assert all(kind in str(caught.value) for kind in KNOWN_KINDS)


def test_real_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(kind: str, capability: str, in_use: int) -> Any:
        stats = {"bytes_limit": 60 * GIB, "bytes_in_use": in_use}
        return SimpleNamespace(
            platform="gpu",
            device_kind=kind,
            compute_capability=capability,
            memory_stats=lambda: stats,
        )

    nvidia = [device("NVIDIA H200", "9.0", in_use) for in_use in (0, GIB, 2 * GIB)]
    monkeypatch.setattr(jax, "local_devices", lambda: nvidia)
    assert detect_target().devices == (nvidia[0],)
    target = detect_target(2)
    assert target.devices == tuple(nvidia[:2]) and target.mesh_shape == (1, 2)
    assert target.compute_capability == (9, 0) and target.memory_bytes == 60 * GIB
    assert target.bytes_in_use() == GIB, "of the fullest one"
    with pytest.raises(
        ConfigError, match=r"is 4, but JAX finds only 3 of its devices \(NVIDIA H200\)"
    ):
        detect_target(4)
    monkeypatch.setattr(jax, "local_devices", lambda: [device("AMD MI300X", "gfx942", 0)])
    assert detect_target().compute_capability is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("Unable to start it. (set JAX_PLATFORMS='' to choose)"),
            "Unable to start it",
        ),
        (AssertionError(), "there is no such device"),
    ],
)
def test_a_platform_that_jax_cannot_use(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """Both are raised by JAX 0.10: the second one for CUDA's plugin without a driver."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(ConfigError, match=re.escape(f"=cpu names: {reason}. Install 'jpaged[")):
        detect_target()


def test_memory_of_described_hardware() -> None:
    memory = device_memory(described_target("a100-80gb x2"), 0.9)
    assert (memory.limit, memory.taken) == (85_100_068_864, 0)
    assert memory.share == pytest.approx(0.9 * SHARE_OF_RESERVED)
    assert device_memory(described_target("v5e-8"), 0.9).share == 0.9
    assert device_memory(described_target("cpu"), 0.9).source == "host memory"


def test_nothing_else_asks_jax_for_devices() -> None:
    """What asks by itself cannot be told of hardware that is somewhere else."""
    asks = re.compile(r"\b(default_backend|(local_)?devices|(local_)?device_count)\(")
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("jpaged", "models", "server", "pallas_kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if asks.search(path.read_text("utf-8"))
    ]
    assert found == ["jpaged/target.py"]
