"""Finds an accelerator that JAX does not use, which otherwise shows only as a slow server."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from jpaged.target import Target, chosen_platforms

GOOGLE_PCI_VENDOR = "0x1ae0"
# Of TPU v4, v5p, v5e, v6e and 7x. Google's network cards have the same vendor.
TPU_PCI_DEVICES = frozenset({"0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})


@dataclass(frozen=True)
class Accelerator:
    """A kind of device, and what JAX needs for it.

    platform: name in JAX_PLATFORMS. packages: JAX can use the device if one of them is installed.
    extras: extras of jpaged that install them. check: shows whether the device itself works.
    """

    name: str
    platform: str
    packages: tuple[str, ...]
    extras: str
    check: str


NVIDIA_GPU = Accelerator(
    name="an NVIDIA GPU",
    platform="cuda",
    packages=("jax-cuda12-plugin", "jax-cuda13-plugin"),
    extras="'jpaged[cuda12]', or 'jpaged[cuda13]' with a driver from 580 on",
    check="that `nvidia-smi` shows the GPU here, and a driver from 525 on",
)
TPU = Accelerator(
    name="a TPU",
    platform="tpu",
    packages=("libtpu",),
    extras="'jpaged[tpu]'",
    check="that no other process has the TPU",
)


def unused_accelerator(target: Target, root: Path = Path("/")) -> str | None:
    """Say which accelerator the machine has beside the CPU that JAX runs on, and what to do.

    None if JAX runs on one, if there is none, or if the user has chosen the CPU.
    root: where the machine's /dev and /sys are.
    """
    if not target.is_cpu or chosen_platforms():
        return None
    accelerator = _find(root)
    if accelerator is None:
        return None
    found = f"this machine has {accelerator.name}, but JAX runs on the CPU"
    if any(_is_installed(name) for name in accelerator.packages):
        remedy = (
            f"JAX_PLATFORMS={accelerator.platform} makes JAX say why; check {accelerator.check}"
        )
    else:
        remedy = f"install {accelerator.extras}"
    return f"{found}: {remedy}. JAX_PLATFORMS=cpu stops this message."


def _find(root: Path) -> Accelerator | None:
    if any(root.glob("dev/nvidia[0-9]*")) and not _are_gpus_hidden():
        return NVIDIA_GPU
    if any(_is_tpu(folder) for folder in root.glob("sys/bus/pci/devices/*")):
        return TPU
    return None


def _are_gpus_hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def _is_tpu(folder: Path) -> bool:
    try:
        vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return False
    return vendor == GOOGLE_PCI_VENDOR and device in TPU_PCI_DEVICES


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
