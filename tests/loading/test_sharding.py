"""Models split over several devices: what each holds, what is read for it, what they compute."""

import json
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.formats.safetensors_source import SafetensorsSource
from jpaged.models.formats.tensor_source import ALL
from jpaged.models.loading import Model, abstract_model, load_model
from jpaged.models.sharding import DATA_AXIS, TENSOR_AXIS, split_config
from jpaged.progress import Progress
from pallas_kernels.paged_attention import (
    AttentionMetadata,
    PagedAttention,
    ShardedPagedAttention,
    XlaPagedAttention,
)
from tests.execution.large_models import check_collectives
from tests.random_llama import save_random_llama

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 50, 49], np.int32)


def mesh_of(num_devices: int) -> Mesh:
    return jax.make_mesh(
        (1, num_devices),
        (DATA_AXIS, TENSOR_AXIS),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:num_devices],
    )


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))


def load_split(folder: Path, num_devices: int, source: Any = None) -> Model:
    config = split_config(config_of(folder), num_devices)
    model = abstract_model(config, jnp.dtype("float32"), mesh_of(num_devices))
    return load_model(model, source or SafetensorsSource(folder), progress=Progress(shown=False))


def load_whole(folder: Path) -> Model:
    model = abstract_model(config_of(folder), jnp.dtype("float32"))
    return load_model(model, SafetensorsSource(folder), progress=Progress(shown=False))


@dataclass(frozen=True)
class Step:
    """A prefill of one short text, in a pool of its own. mesh: of the model, if it is split."""

    model: Model
    mesh: Mesh | None = None

    @property
    def attention(self) -> PagedAttention:
        one = XlaPagedAttention()
        return one if self.mesh is None else ShardedPagedAttention(one, self.mesh, TENSOR_AXIS)

    def hidden(self, params: tuple[Any, ...], tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        (num_tokens,), config, attention = tokens.shape, self.model.config, self.attention
        metadata = AttentionMetadata(
            block_tables=jnp.array([[1]], jnp.int32),
            context_lens=jnp.array([num_tokens], jnp.int32),
            query_starts=jnp.array([0, num_tokens], jnp.int32),
            num_decodes=jnp.int32(0),
        )
        plan = attention.plan(metadata, num_tokens=num_tokens, block_size=16, decode_only=False)
        heads = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        shape = attention.pool_shape(num_blocks=2, block_size=16, **heads)
        pools = (jnp.zeros(shape, self.model.dtype),) * config.num_layers
        positions = jnp.arange(num_tokens, dtype=jnp.int32)
        module = self.model.merge(params)
        return module(tokens, positions, positions + 16, pools, plan, attention=attention)[0]

    def logits(self, params: tuple[Any, ...], tokens: Int[Array, "T"]) -> Float[Array, "T V"]:
        return self.model.merge(params).logits(self.hidden(params, tokens))

    def run(self) -> Float[np.ndarray, "T V"]:
        return np.asarray(jax.jit(self.logits)(self.model.params, TOKENS))


class CountingSource(SafetensorsSource):
    """Counts the bytes that are read."""

    num_read = 0

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> np.ndarray:
        values = super().read(name, rows, columns)
        self.num_read += values.nbytes
        return values


@pytest.mark.parametrize(
    ("num_devices", "changes"),
    [
        pytest.param(2, {"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param(4, {"tie_word_embeddings": True}, id="fewer-kv-heads-tied"),
        pytest.param(8, {}, id="fewer-kv-heads"),
        pytest.param(4, {"num_key_value_heads": 8, "vocab_size": 64}, id="more-kv-heads"),
    ],
)
def test_split_model_computes_what_it_computes_on_one_device(
    tmp_path: Path, num_devices: int, changes: dict[str, Any]
) -> None:
    sizes = {"vocab_size": 51, "num_attention_heads": 8}
    folder = save_random_llama(tmp_path, **sizes | changes)
    whole = Step(load_whole(folder)).run()
    vocab_size = whole.shape[1]
    split = Step(load_split(folder, num_devices), mesh_of(num_devices)).run()
    assert split.shape[1] % num_devices == 0
    np.testing.assert_allclose(
        split[:, :vocab_size], whole, rtol=0, atol=1e-5 * np.abs(whole).max()
    )
    assert (split[:, vocab_size:] == -np.inf).all(), "no token has these logits"


@pytest.mark.parametrize(
    "num_devices,num_kv_heads", [(2, 2), (8, 2)], ids=["kv-heads-split", "kv-heads-copied"]
)
def test_devices_wait_for_each_other_twice_a_layer(
    hf_config: dict[str, Any], num_devices: int, num_kv_heads: int
) -> None:
    """They add up what each has after attention and after the MLP, and once for the embedding.
    Nothing is put into another order, and logits stay where they are."""
    changes = {"num_attention_heads": 8, "num_key_value_heads": num_kv_heads}
    config = split_config(ModelConfig.from_hf(hf_config | changes), num_devices)
    mesh = mesh_of(num_devices)
    step = Step(abstract_model(config, jnp.dtype("float32"), mesh), mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    tokens = jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32, sharding=whole)
    compiled = jax.jit(step.logits).lower(step.model.params, tokens).compile()
    check_collectives(compiled, config)


def test_every_device_holds_and_reads_its_part(tmp_path: Path) -> None:
    """Nothing is read twice, and nothing is read that no device needs."""
    folder = save_random_llama(tmp_path, vocab_size=512, num_attention_heads=8)
    source = CountingSource(folder)
    num_bytes = sum(source.num_bytes(name) for name in source.names())
    model = load_split(folder, 2, source)
    for device in model.params[0].sharding.device_set:
        held = sum(
            shard.data.nbytes
            for param in model.params
            for shard in param.addressable_shards
            if shard.device == device
        )
        assert held == pytest.approx(num_bytes / 2, rel=0.05)
    assert source.num_read == num_bytes


def test_host_holds_no_more_than_the_largest_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random_llama(tmp_path, vocab_size=16384, hidden_size=512, intermediate_size=512)
    device_put = jax.device_put

    def put(host: np.ndarray, device: Any) -> jax.Array:
        """To a device whose memory is not the host's."""
        return device_put(jnp.zeros(host.shape, host.dtype), device)

    source = SafetensorsSource(folder)
    monkeypatch.setattr(jax, "device_put", put)
    load_split(folder, 2, source)  # makes what is made once
    tracemalloc.start()
    try:
        load_split(folder, 2, source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = 16384 * 512 * 4 // 2
    assert largest <= peak <= 1.1 * largest


@pytest.mark.parametrize(
    ("num_devices", "changes", "named"),
    [
        (8, {}, "num_attention_heads 4: choose one that does, such as 4"),
        (3, {"num_heads": 6}, "num_key_value_heads 2: .* such as 2"),
        (4, {"intermediate_size": 90}, "intermediate_size 90: .* such as 3"),
    ],
)
def test_numbers_that_cannot_be_split_are_refused(
    hf_config: dict[str, Any], num_devices: int, changes: dict[str, int], named: str
) -> None:
    config = replace(ModelConfig.from_hf(hf_config), **changes)
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {num_devices}, .* {named}"):
        split_config(config, num_devices)


def test_one_device_needs_no_other_config(hf_config: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(hf_config)
    assert split_config(config, 1) == config
