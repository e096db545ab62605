"""Weights from a GGUF file, de-quantised while they are read."""

import math
import re
from collections.abc import Iterable

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.formats.gguf_config import ROPE_FACTORS
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.models.formats.tensor_source import ALL

STORED_DTYPES = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
QUANTISED_TYPES = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)
# `dequantize` works on 16 rows at a time. Blocks are independent, so rows may be cut anew: with
# this many values a row it is 2 to 8 times faster than with rows of a small model.
VALUES_PER_ROW = 8192

_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource:
    """The tensors of a GGUF file of the llama architecture. A `TensorSource`."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._gguf_names = {_hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        self._permuted_heads = {
            ".self_attn.q_proj.": config.num_heads,
            ".self_attn.k_proj.": config.num_kv_heads,
        }
        _check_types(file)

    def names(self) -> Iterable[str]:
        return self._gguf_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def num_bytes(self, name: str) -> int:
        return self._file.tensors[self._gguf_names[name]].num_bytes

    def location(self, name: str) -> str:
        return self._file.location(self._gguf_names[name])

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> np.ndarray:
        gguf_name = self._gguf_names[name]
        tensor = self._file.tensors[gguf_name]
        num_rows = tensor.shape[0]
        start, stop, _ = rows.indices(num_rows)
        num_heads = self._num_permuted_heads(name)
        # Quantised blocks never lie across rows of a matrix.
        unit = num_rows // num_heads if num_heads else 1 if len(tensor.shape) > 1 else num_rows
        first, last = start // unit * unit, -(-stop // unit) * unit
        row_bytes = tensor.num_bytes // num_rows
        data = self._file.tensor_bytes(gguf_name)[first * row_bytes : last * row_bytes]
        values = _values(data, tensor.type).reshape(last - first, *tensor.shape[1:])
        if num_heads:
            values = _to_half_rotation_order(values, (last - first) // unit)
        values = values[start - first : stop - first]
        return values if values.ndim == 1 else values[:, columns]

    def _num_permuted_heads(self, name: str) -> int:
        """Heads whose rows the file has in another order; 0 if they are in ours."""
        return next((heads for part, heads in self._permuted_heads.items() if part in name), 0)


def _check_types(file: GgufFile) -> None:
    supported = (*STORED_DTYPES, *QUANTISED_TYPES)
    refused = [
        f"{name} ({tensor.type.name})"
        for name, tensor in file.tensors.items()
        if tensor.type not in supported
    ]
    if refused:
        raise CheckpointError(
            f"{file.path.name} has tensors of types that are not supported: {', '.join(refused)}; "
            f"supported: {', '.join(item.name for item in supported)}"
        )


def _hf_name(gguf_name: str) -> str:
    """Translate to the Hugging Face name; unknown names stay, and are reported as unused."""
    base, _, kind = gguf_name.rpartition(".")
    if base in _MODEL_NAMES:
        return f"{_MODEL_NAMES[base]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
    return gguf_name


def _values(data: np.ndarray, tensor_type: GGMLQuantizationType) -> np.ndarray:
    if tensor_type in STORED_DTYPES:
        return data.view(STORED_DTYPES[tensor_type])
    block_size, bytes_per_block = GGML_QUANT_SIZES[tensor_type]
    blocks_per_row = math.gcd(len(data) // bytes_per_block, VALUES_PER_ROW // block_size)
    return dequantize(data.reshape(-1, blocks_per_row * bytes_per_block), tensor_type)


def _to_half_rotation_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the order in which converters store the rows of q and k.

    A head of 4 dimensions rotates (0, 2) and (1, 3). Files have partners side by side.
    In: rows 0 2 1 3. Out: rows 0 1 2 3.
    """
    by_pair = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(rows.shape)
