"""The memory of a device: how much of it this process may plan with."""

import os
from dataclasses import dataclass

from jpaged.config import GIB
from jpaged.startup.host_memory import host_memory_limit
from jpaged.target import Target

# XLA reads these when a backend starts. The second one is the first one's old name.
GPU_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Share of what XLA has reserved on a GPU; the rest is for inputs of steps, and gets fragmented.
SHARE_OF_RESERVED = 0.97
# What a process takes on a CPU beside weights and pool, to read weights and compile: 1.3 GiB were
# measured with the demo model. Constant, as programs of a pool of another size are other programs.
CPU_PROCESS_BYTES = GIB * 7 // 5


@dataclass(frozen=True)
class DeviceMemory:
    """limit: bytes that there are. share: of these, 0 to 1, for weights, programs and KV cache.
    taken: bytes that are in use already. source: whose limit it is, for messages."""

    limit: int
    share: float
    taken: int
    source: str


def reserve_gpu_memory(utilization: float) -> None:
    """Let XLA reserve this share of a GPU, instead of its default of three quarters.

    It has no effect once JAX has started its backend. A share that the user has set stays.
    """
    if not any(name in os.environ for name in GPU_FRACTION_VARIABLES):
        os.environ[GPU_FRACTION_VARIABLES[0]] = str(utilization)


def device_memory(target: Target, utilization: float) -> DeviceMemory:
    """Memory of one device; of a CPU, its share of what this process may use of the machine's."""
    limit, taken = target.memory_bytes, target.bytes_in_use()
    if limit is None:
        limit, taken = (
            value // target.num_devices for value in (host_memory_limit(), CPU_PROCESS_BYTES)
        )
        return DeviceMemory(limit, utilization, taken, "host memory")
    if target.platform != "gpu":
        return DeviceMemory(limit, utilization, taken, "device memory")
    if not target.is_described:
        return DeviceMemory(limit, _share_of_reserved(utilization), taken, "reserved by XLA")
    return DeviceMemory(limit, utilization * SHARE_OF_RESERVED, taken, "device memory")


def _share_of_reserved(utilization: float) -> float:
    """Share of XLA's reservation that makes `utilization` of the card, as far as it goes."""
    given = [os.environ[name] for name in GPU_FRACTION_VARIABLES if name in os.environ]
    reserved = float(given[0]) if given else utilization
    return min(SHARE_OF_RESERVED, utilization / reserved)
