"""What a start says where JAX runs on the CPU of a machine that has something faster."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jax
import pytest

from jpaged.startup import unused_accelerator as module
from jpaged.startup.unused_accelerator import unused_accelerator
from jpaged.target import described_target

CPU = described_target("cpu")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chosen = jax.config.jax_platforms
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    jax.config.update("jax_platforms", "")
    yield
    jax.config.update("jax_platforms", chosen)


def machine(root: Path, *, has_gpu: bool = False, pci: str | None = None) -> Path:
    """A file tree of devices. pci: device id of a PCI device by Google."""
    (root / "dev").mkdir(parents=True)
    (root / "dev/nvidiactl").touch()
    if has_gpu:
        (root / "dev/nvidia0").touch()
    folder = root / "sys/bus/pci/devices/0000:00:04.0"
    folder.mkdir(parents=True)
    (root / "sys/bus/pci/devices/without-files").mkdir()
    (folder / "vendor").write_text("0x1ae0\n" if pci else "0x8086\n")
    (folder / "device").write_text(f"{pci or '0x1237'}\n")
    return root


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    def find(name: str) -> None:
        if name not in packages:
            raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", find)


@pytest.mark.parametrize(
    ("installed", "remedy"),
    [
        ((), "install 'jpaged[cuda12]', or 'jpaged[cuda13]'"),
        (("libtpu",), "install 'jpaged[cuda12]', or 'jpaged[cuda13]'"),
        (("jax-cuda13-plugin",), "JAX_PLATFORMS=cuda makes JAX say why; check that `nvidia-smi`"),
    ],
)
def test_a_gpu_without_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], remedy: str
) -> None:
    install(monkeypatch, *installed)
    message = unused_accelerator(CPU, machine(tmp_path, has_gpu=True))
    assert message is not None and message.startswith(
        f"this machine has an NVIDIA GPU, but JAX runs on the CPU: {remedy}"
    )


def test_a_tpu_without_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    message = unused_accelerator(CPU, machine(tmp_path, pci="0x006f"))
    assert message is not None and message.startswith(
        "this machine has a TPU, but JAX runs on the CPU: install 'jpaged[tpu]'."
    )


def test_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator, one in use, or the user's choice of the CPU."""
    install(monkeypatch)
    assert unused_accelerator(CPU, machine(tmp_path / "bare")) is None
    assert unused_accelerator(CPU, machine(tmp_path / "network-card", pci="0x0042")) is None
    with_gpu = machine(tmp_path / "gpu", has_gpu=True)
    assert unused_accelerator(described_target("a100-80gb"), with_gpu) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_accelerator(CPU, with_gpu) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert unused_accelerator(CPU, with_gpu) is not None
    jax.config.update("jax_platforms", "cpu")
    assert unused_accelerator(CPU, with_gpu) is None
