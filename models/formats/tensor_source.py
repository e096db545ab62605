"""Where the weights of a model come from."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

ALL = slice(None)


class TensorSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names.

    A name is, for example, "model.layers.0.self_attn.q_proj.weight". Matrices are [out, in], rows
    of q and k in the half-rotation order of Hugging Face. All methods raise `CheckpointError` and
    may be called from several threads at once.
    """

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int:
        """Bytes in the file."""
        ...

    def location(self, name: str) -> str:
        """Name of the file, for messages."""
        ...

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> np.ndarray:
        """The values: float32, float16 or bfloat16 as stored, float32 when quantised.

        rows, columns: what to read of it; a vector has no columns. Little else is read.

        The array may be a read-only view of the file.
        """
        ...
