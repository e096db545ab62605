"""From checkpoint tensors to parameters on the device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.formats.safetensors_source import SafetensorsSource
from jpaged.models.tied_head import with_stored_head
from jpaged.models.weight_spec import Part, WeightSpec, single
from jpaged.models.weights import load_weights

pytestmark = pytest.mark.smoke

# Five heads of four rows: K of 5, of which q has two rows each and k and v one, of D of 4.
ROWS = {"q": (5, 2, 4), "k": (5, 1, 4), "v": (5, 1, 4)}
AXES = ("embed", "kv_heads", None, None)


def parts(kind: str) -> tuple[Part, ...]:
    return tuple(Part(f"{name}.{kind}", rows) for name, rows in ROWS.items())


TABLE = [
    single("embedding", "model.embed_tokens.weight", 51, ("vocab", "embed")),
    WeightSpec(path="qkv", axes=AXES, parts=parts("weight"), join=1, transpose=True),
    WeightSpec(path="qkv_bias", axes=AXES[1:], parts=parts("bias"), join=1),
]
SHAPES = {"embedding": (51, 32), "qkv": (32, 5, 4, 4), "qkv_bias": (5, 4, 4)}


def parameters(dtype: Any = jnp.float32, **overrides: Any) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = SHAPES | overrides
    return {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in shapes.items()}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (51, 32)}
    for name, num_rows in {"q": 40, "k": 20, "v": 20}.items():
        shapes |= {f"{name}.weight": (num_rows, 32), f"{name}.bias": (num_rows,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def joined(tensors: dict[str, np.ndarray], kind: str) -> np.ndarray:
    """Rows of q, k and v, head by head: [K, G + 2, D, ...]."""
    split = [
        tensors[f"{name}.{kind}"].reshape(*rows, *tensors[f"{name}.{kind}"].shape[1:])
        for name, rows in ROWS.items()
    ]
    return np.concatenate(split, axis=1)


@pytest.fixture
def tied(hf_config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(hf_config | {"tie_word_embeddings": True})


def source_of(tensors: dict[str, np.ndarray], folder: Path) -> SafetensorsSource:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


def test_joins_and_transposes(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    loaded = load_weights(parameters(), TABLE, source_of(tensors, tmp_path))
    assert loaded.keys() == SHAPES.keys()
    np.testing.assert_array_equal(loaded["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(loaded["qkv"], np.moveaxis(joined(tensors, "weight"), -1, 0))
    np.testing.assert_array_equal(loaded["qkv_bias"], joined(tensors, "bias"))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_casts_to_the_type_of_the_parameter(
    tensors: dict[str, np.ndarray], tmp_path: Path, stored: Any, wanted: Any
) -> None:
    tensors = {name: values.astype(stored) for name, values in tensors.items()}
    loaded = load_weights(parameters(wanted), TABLE, source_of(tensors, tmp_path))
    assert {array.dtype for array in loaded.values()} == {np.dtype(wanted)}
    rows = np.moveaxis(joined(tensors, "weight"), -1, 0)
    np.testing.assert_array_equal(loaded["qkv"], rows.astype(wanted))


def test_values_beyond_the_range_of_the_type_are_refused(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    tensors["k.weight"][3, 4] = 1e6
    source = source_of(tensors, tmp_path)
    assert load_weights(parameters(jnp.bfloat16), TABLE, source)["qkv"][4, 0, 2, 3] > 9e5
    with pytest.raises(CheckpointError, match="k.weight in model.safetensors .* of float16"):
        load_weights(parameters(jnp.float16), TABLE, source)


def test_loaded_weights_do_not_depend_on_the_file(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    loaded = load_weights(parameters(), TABLE, source_of(tensors, tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    np.testing.assert_array_equal(loaded["embedding"], tensors["model.embed_tokens.weight"])


def test_one_error_lists_everything_that_does_not_fit(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    del tensors["k.weight"], tensors["v.bias"]
    tensors["model.embed_tokens.weight"] = np.zeros((60, 32), np.float32)
    wanted = parameters(extra=(4,), unnamed=(5,))
    with pytest.raises(CheckpointError) as caught:
        load_weights(wanted, TABLE, source_of(tensors, tmp_path))
    assert str(caught.value).split("\n  ") == [
        "the checkpoint does not fit the model:",
        "model.embed_tokens.weight [60, 32] in model.safetensors: expected shape [51, 32] "
        "for parameter embedding",
        "k.weight is missing",
        "v.bias is missing",
        "parameter extra is in no row of the weight table",
        "parameter unnamed is in no row of the weight table",
    ]


@pytest.mark.parametrize(
    ("name", "shape"), [("k.weight", (20, 31)), ("k.weight", (21, 32)), ("k.weight", (640,))]
)
def test_wrong_shape_of_a_part_is_refused(
    tensors: dict[str, np.ndarray], tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    tensors[name] = np.zeros(shape, np.float32)
    message = rf"k.weight \{list(shape)} in .* expected shape \[20, 32\] for parameter qkv"
    with pytest.raises(CheckpointError, match=message):
        load_weights(parameters(), TABLE, source_of(tensors, tmp_path))


def test_transposed_matrix_in_the_file_is_refused(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    tensors["model.embed_tokens.weight"] = np.ascontiguousarray(
        tensors["model.embed_tokens.weight"].T
    )
    with pytest.raises(CheckpointError, match=r"\[32, 51\] .* expected shape \[51, 32\]"):
        load_weights(parameters(), TABLE, source_of(tensors, tmp_path))


@pytest.mark.parametrize("name", ["k.bias", "model.layers.0.q_norm.weight", "lm_head.bias"])
def test_tensors_that_nobody_reads_are_refused(
    tensors: dict[str, np.ndarray], tmp_path: Path, name: str
) -> None:
    """O-44: with all else that is wrong, and before anything is read."""
    tensors |= {"adapter.b": np.zeros(2, np.float32), name: np.zeros(2, np.float32)}
    del tensors["model.embed_tokens.weight"]
    table = [spec for spec in TABLE if spec.path != "qkv_bias"]
    wanted = {path: each for path, each in parameters().items() if path != "qkv_bias"}
    with pytest.raises(CheckpointError) as caught:
        load_weights(wanted, table, source_of(tensors, tmp_path))
    lines = str(caught.value).split("\n  ")
    assert lines[1] == "model.embed_tokens.weight is missing"
    assert {f"{name} is used by no parameter", "adapter.b is used by no parameter"} <= set(lines)


def test_tied_model_may_have_its_head_and_frequencies(
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
    tied: ModelConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """O-43: a table without lm_head.weight is that of a tied model."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    source = source_of(tensors, tmp_path)
    assert load_weights(parameters(), TABLE, source).keys() == SHAPES.keys()
    assert with_stored_head(tied, source) == tied
    assert not caplog.records


def test_stored_head_that_differs_is_used(
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
    tied: ModelConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """O-90: an equal one stays tied, as does a model without."""
    assert with_stored_head(tied, source_of(tensors, tmp_path)) == tied
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1)
    untied = with_stored_head(tied, source_of(tensors, tmp_path))
    assert untied == replace(tied, tie_word_embeddings=False)
    assert "lm_head.weight in model.safetensors differs" in caplog.text


def test_untied_model_without_its_head_is_refused(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """O-43."""
    table = [*TABLE, single("lm_head", "lm_head.weight", 51, ("vocab", "embed"))]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load_weights(parameters(lm_head=(51, 32)), table, source_of(tensors, tmp_path))
