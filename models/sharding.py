"""How a model is split over the devices of a mesh (tensor parallelism, Shoeybi et al. 2019).

Column-parallel projections (qkv, gate and up) are followed by row-parallel ones (out, down), so a
layer needs two sums over the devices, and nothing has to be put into another order.
"""

from dataclasses import replace

from jax.sharding import PartitionSpec

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig

DATA_AXIS, TENSOR_AXIS = "dp", "tp"
# Axes of parameters along which every device has a part. Each device has all of the others.
SPLIT_AXES = frozenset({"heads", "kv_heads", "mlp", "vocab"})


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The sharding of a parameter with these axes."""
    return PartitionSpec(*(TENSOR_AXIS if axis in SPLIT_AXES else None for axis in axes))


def split_config(config: ModelConfig, num_devices: int) -> ModelConfig:
    """The config of a model whose parameters can be split evenly.

    Several devices get copies of the same KV head where there are fewer heads than devices, and
    the vocabulary is filled up. Raises `ConfigError` for numbers that cannot be split.
    """
    num_kv_heads = config.num_kv_heads
    _check_multiple("num_attention_heads", config.num_heads, num_devices)
    _check_multiple("intermediate_size", config.intermediate_size, num_devices)
    if num_devices % num_kv_heads:
        _check_multiple("num_key_value_heads", num_kv_heads, num_devices)
    copies = max(num_devices // num_kv_heads, 1)
    return replace(
        config,
        num_kv_heads=num_kv_heads * copies,
        kv_head_copies=copies,
        vocab_padding=-config.vocab_size % num_devices,
    )


def _check_multiple(name: str, number: int, num_devices: int) -> None:
    if number % num_devices:
        possible = [count for count in range(1, num_devices) if number % count == 0]
        raise ConfigError(
            f"tensor_parallel_size is {num_devices}, which does not divide the model's {name} "
            f"{number}: choose one that does, such as {possible[-1]}."
        )
