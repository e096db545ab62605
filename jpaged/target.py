"""What an engine runs on, said once at start and passed down from there.

Everything that a start decides follows from the options, the model's config and this value, so it
can also be had for hardware that is somewhere else: see `described_target`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jpaged.config import GIB
from jpaged.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices of an engine, all of one kind.

    platform: "cpu", "gpu" or "tpu". device_kind: `jax.Device.device_kind`.
    memory_bytes: memory of one device that programs may use; on a GPU that is there, what XLA has
        reserved of it. None on a CPU, whose memory is that of the host.
    compute_capability: of an NVIDIA card, for example (8, 0); None for anything else.
    mesh_shape: number of devices along the axes ("dp", "tp"), data and tensor parallelism.
    devices: `jax.Device`s in the order of the mesh.
    is_described: the hardware is somewhere else. Then `devices` may be those of a topology, for
        which programs can be compiled.
    """

    platform: str
    device_kind: str
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    mesh_shape: tuple[int, int] = (1, 1)
    devices: tuple[Any, ...] = ()
    is_described: bool = False

    @property
    def num_devices(self) -> int:
        return self.mesh_shape[0] * self.mesh_shape[1]

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"

    def bytes_in_use(self) -> int:
        """Memory of the fullest device that is taken already."""
        if self.is_described:
            return 0
        return max((_memory_stats(each).get("bytes_in_use", 0) for each in self.devices), default=0)


def detect_target(num_devices: int = 1) -> Target:
    """The first devices of this process; starts JAX's backend.

    Raises `ConfigError` if there are fewer, or if JAX cannot use what JAX_PLATFORMS names.
    """
    devices = _local_devices()
    if num_devices > len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {num_devices}, but JAX finds only {len(devices)} of its "
            f"devices ({devices[0].device_kind}): choose at most {len(devices)}.",
            option="tensor_parallel_size",
        )
    first = devices[0]
    return Target(
        platform=first.platform,
        device_kind=first.device_kind,
        memory_bytes=_memory_stats(first).get("bytes_limit"),
        compute_capability=_compute_capability(first),
        mesh_shape=(1, num_devices),
        devices=tuple(devices[:num_devices]),
    )


def chosen_platforms() -> str:
    """Return what JAX may use by the user's choice, JAX_PLATFORMS; empty without one."""
    config: Any = jax.config  # its attributes are made at runtime
    return config.jax_platforms or ""


def _local_devices() -> Sequence[Any]:
    try:
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter from a plugin without a device
        reason = str(error).partition(" (set JAX_PLATFORMS=")[0].rstrip(".")
        reason = reason or "there is no such device"
        raise ConfigError(
            f"JAX cannot use what JAX_PLATFORMS={chosen_platforms()} names: {reason}. Install "
            "'jpaged[cuda12]', 'jpaged[cuda13]' or 'jpaged[tpu]' for such a device, or unset "
            "JAX_PLATFORMS to run on what there is."
        ) from error


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device that can be described without being there.

    cores_per_chip: what the number in a name such as v5e-8 counts for each chip. Names of other
    devices have no such number (0).
    """

    platform: str
    device_kind: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None = None
    cores_per_chip: int = 0


# NVIDIA: the card's memory as CUDA reports it. TPU: what libtpu leaves to programs.
KNOWN_KINDS = {
    "cpu": DeviceKind("cpu", "cpu", None),
    "a100-80gb": DeviceKind("gpu", "NVIDIA A100-SXM4-80GB", 85_100_068_864, (8, 0)),
    "h100-80gb": DeviceKind("gpu", "NVIDIA H100 80GB HBM3", 84_929_347_584, (9, 0)),
    "h200": DeviceKind("gpu", "NVIDIA H200", 151_397_597_184, (9, 0)),
    "v5e": DeviceKind("tpu", "TPU v5 lite", int(15.75 * GIB), cores_per_chip=1),
    "v5p": DeviceKind("tpu", "TPU v5", int(95.73 * GIB), cores_per_chip=2),
    "v6e": DeviceKind("tpu", "TPU v6 lite", int(31.24 * GIB), cores_per_chip=1),
}


def described_target(description: str) -> Target:
    """The target that a text names: a known kind, then how many, for example "a100-80gb x2", or
    "v5e-8" for TPUs. All devices are on the axis of tensor parallelism.

    Raises `ConfigError` with all known kinds.
    """
    name, kind, num_devices = description.strip().lower(), None, 1
    if name in KNOWN_KINDS:
        kind = KNOWN_KINDS[name]
    elif match := re.fullmatch(r"(\S+) ?x ?([1-9]\d{0,4})", name):
        kind, num_devices = KNOWN_KINDS.get(match[1]), int(match[2])
    elif match := re.fullmatch(r"(\w+)-([1-9]\d{0,4})", name):
        kind = KNOWN_KINDS.get(match[1])
        cores_per_chip = kind.cores_per_chip if kind else 0
        num_devices, rest = divmod(int(match[2]), max(cores_per_chip, 1))
        kind = kind if cores_per_chip and not rest else None
    if kind is None:
        raise ConfigError(
            f"there is no target {description!r}. Known are {', '.join(KNOWN_KINDS)}, with the "
            'number of devices behind it if there are several, such as "a100-80gb x2" or "v5e-8".'
        )
    return Target(
        platform=kind.platform,
        device_kind=kind.device_kind,
        memory_bytes=kind.memory_bytes,
        compute_capability=kind.compute_capability,
        mesh_shape=(1, num_devices),
        is_described=True,
    )


def _memory_stats(device: Any) -> dict[str, int]:
    return device.memory_stats() or {}


def _compute_capability(device: Any) -> tuple[int, int] | None:
    """Of an NVIDIA card; an AMD card has an attribute of that name with another form."""
    version = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", version):
        return None
    major, minor = map(int, version.split("."))
    return major, minor
