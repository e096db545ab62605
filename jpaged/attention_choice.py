"""Which implementation of paged attention a device gets."""

import re
from typing import Any, Protocol

import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from pallas_kernels.paged_attention import (
    MosaicPagedAttention,
    PagedAttention,
    TritonPagedAttention,
    XlaPagedAttention,
)
from pallas_kernels.paged_attention.mosaic_sizes import chip_sizes

PLATFORM_BACKENDS = {"gpu": "triton", "tpu": "pallas-tpu"}


class AttentionHeads(Protocol):
    """What a backend has to know of a model."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def choose_attention(
    config: EngineConfig, model: AttentionHeads, kv_dtype: jnp.dtype, device: Any
) -> PagedAttention:
    """The backend that an option names, or the one of the device. A backend that cannot do it is
    no reason to take a slower one: that is refused, and the user decides."""
    name = config.attention_backend
    if name == "auto":
        name = PLATFORM_BACKENDS.get(device.platform, "xla")
    attention = make_backend(name, model, device, interpret=device.platform == "cpu")
    block_size = choose_block_size(config, attention, model, kv_dtype)
    reason = reason_against(attention, device, kv_dtype, block_size)
    if reason is None:
        return attention
    message = f"attention_backend {config.attention_backend!r} means {name!r} here, but {reason}."
    if name != "xla":
        message += " Set attention_backend to 'xla', which is slower but can do it."
    raise ConfigError(message)


def make_backend(
    name: str, model: AttentionHeads, device: Any, *, interpret: bool = False
) -> PagedAttention:
    if name == "xla":
        return XlaPagedAttention()
    group = model.num_heads // model.num_kv_heads
    if name == "triton":
        return TritonPagedAttention(group=group, head_dim=model.head_dim, interpret=interpret)
    sizes = chip_sizes(device.device_kind)
    return MosaicPagedAttention(
        num_kv_heads=model.num_kv_heads,
        group=group,
        head_dim=model.head_dim,
        interpret=interpret,
        fetch_bytes=sizes.fetch_bytes,
        vmem_limit=sizes.vmem_limit,
    )


def choose_block_size(
    config: EngineConfig, attention: PagedAttention, model: AttentionHeads, kv_dtype: jnp.dtype
) -> int:
    return config.block_size or attention.default_block_size(
        num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=kv_dtype
    )


def reason_against(
    attention: PagedAttention, device: Any, kv_dtype: jnp.dtype, block_size: int
) -> str | None:
    """Why the backend cannot serve such a pool on the device, if so."""
    return attention.supports(
        block_size=block_size,
        dtype=kv_dtype,
        platform=device.platform,
        compute_capability=compute_capability(device),
    )


def compute_capability(device: Any) -> tuple[int, int] | None:
    """Of an NVIDIA card, e.g. (8, 0); None for anything else."""
    version = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", version):
        return None
    major, minor = map(int, version.split("."))
    return major, minor
