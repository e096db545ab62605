"""Chooses the implementation of paged attention for a device, and its tile sizes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.execution.device_mesh import device_mesh
from jpaged.models.sharding import TENSOR_AXIS
from jpaged.target import Target
from pallas_kernels.paged_attention import (
    MosaicPagedAttention,
    PagedAttention,
    ShardedPagedAttention,
    TritonPagedAttention,
    XlaPagedAttention,
)
from pallas_kernels.paged_attention.mosaic_sizes import chip_sizes
from pallas_kernels.paged_attention.tuning import (
    SHIPPED_FILE,
    Sizes,
    TuningError,
    TuningKey,
    read_sizes,
)

PLATFORM_BACKENDS = {"gpu": "triton", "tpu": "pallas-tpu"}


class AttentionHeads(Protocol):
    """Heads of a model, which decide the shapes that a backend works on."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def choose_attention(
    config: EngineConfig, model: AttentionHeads, kv_dtype: jnp.dtype, target: Target
) -> PagedAttention:
    """Return the backend that the config names, or by default that of the platform.

    Raises `ConfigError` if this backend cannot serve the model. It never falls back to a slower
    one, as that is the user's decision.
    """
    name = config.attention_backend
    if name == "auto":
        name = PLATFORM_BACKENDS.get(target.platform, "xla")
    model = _heads_of_a_device(model, target)
    attention = make_backend(name, model, target, interpret=target.is_cpu)
    block_size = choose_block_size(config, attention, model, kv_dtype)
    reason = reason_against(attention, target, kv_dtype, block_size)
    if reason is None:
        path = _tuning_file(config, attention)
        attention = with_measured_sizes(attention, path, model, target, kv_dtype, block_size)
        mesh = device_mesh(target)
        return attention if mesh is None else ShardedPagedAttention(attention, mesh, TENSOR_AXIS)
    message = f"attention_backend {config.attention_backend!r} means {name!r} here, but {reason}."
    if name != "xla":
        message += " Set attention_backend to 'xla', which is slower but can do it."
    raise ConfigError(message)


@dataclass(frozen=True)
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


def _heads_of_a_device(model: AttentionHeads, target: Target) -> AttentionHeads:
    num_devices = target.num_devices
    return _Heads(model.num_heads // num_devices, model.num_kv_heads // num_devices, model.head_dim)


def make_backend(
    name: str, model: AttentionHeads, target: Target, *, interpret: bool = False
) -> PagedAttention:
    """Return the backend of this name, with default tile sizes."""
    if name == "xla":
        return XlaPagedAttention()
    group = model.num_heads // model.num_kv_heads
    if name == "triton":
        return TritonPagedAttention(group=group, head_dim=model.head_dim, interpret=interpret)
    sizes = chip_sizes(target.device_kind)
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
    """Return the configured block size, or else the backend's default for the model."""
    return config.block_size or attention.default_block_size(
        num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=kv_dtype
    )


def _tuning_file(config: EngineConfig, attention: PagedAttention) -> Path:
    if config.tuning_file is None:
        return SHIPPED_FILE
    if attention.name == "xla":
        raise ConfigError(
            f"tuning_file is {config.tuning_file!r}, but attention_backend "
            f"{config.attention_backend!r} means 'xla' here, which has no sizes. Leave it out."
        )
    return Path(config.tuning_file)


def reason_against(
    attention: PagedAttention, target: Target, kv_dtype: jnp.dtype, block_size: int
) -> str | None:
    """Return why the backend cannot serve such a pool on the target; None if it can."""
    return attention.supports(
        block_size=block_size,
        dtype=kv_dtype,
        platform=target.platform,
        compute_capability=target.compute_capability,
    )


def with_measured_sizes(
    attention: PagedAttention,
    path: Path,
    model: AttentionHeads,
    target: Target,
    kv_dtype: jnp.dtype,
    block_size: int,
) -> PagedAttention:
    """Return the backend with the tile sizes that a tuning file has for it, if any.

    Raises `ConfigError` for a file with mistakes, and for sizes that the backend cannot use.
    """
    if not isinstance(attention, MosaicPagedAttention | TritonPagedAttention):
        return attention
    key = tuning_key(attention.name, model, target, kv_dtype, block_size)
    sizes = read_tuning_file(path).get(key)
    if sizes is None:
        return attention
    measured = replace(attention, measured=sizes)
    reason = reason_against(measured, target, kv_dtype, block_size)
    if reason is not None:
        raise ConfigError(f"{path}, entry of {key}: {reason}. Correct the entry, or remove it.")
    return measured


def read_tuning_file(path: Path) -> dict[TuningKey, Sizes]:
    """Read measured tile sizes by backend, device and model. Raises `ConfigError`."""
    try:
        return read_sizes(path)
    except TuningError as error:
        raise ConfigError(str(error)) from error


def tuning_key(
    backend: str, model: AttentionHeads, target: Target, kv_dtype: jnp.dtype, block_size: int
) -> TuningKey:
    """Return the key under which a tuning file has the sizes of a backend."""
    return TuningKey(
        device=target.device_kind,
        backend=backend,
        num_kv_heads=model.num_kv_heads,
        group=model.num_heads // model.num_kv_heads,
        head_dim=model.head_dim,
        pool_dtype=kv_dtype.name,
        block_size=block_size,
    )
