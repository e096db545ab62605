"""What a runner tells the devices to do: plain values, which can also be sent to other hosts.

Every host of an engine makes the same calls in the same order, as devices that compute together
wait for each other.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jpaged.execution.step_inputs import ForwardShape


@dataclass(frozen=True)
class StepCall:
    """Compute one step, after copies of blocks and changes of the state that go ahead of it.

    forward: laid out by `shape`. early_writes: each laid out by `SlotState.write`.
    copies: blocks to copy from and to; None without any.
    num_sample_rows: rows of the sampling program; 0 if nobody wants logits.
    """

    shape: ForwardShape
    forward: Int32[np.ndarray, "I"]
    early_writes: list[Int32[np.ndarray, "2 W"]]
    copies: Int32[np.ndarray, "2 C"] | None
    num_sample_rows: int


@dataclass(frozen=True)
class SwapOutCall:
    """Copy blocks to host memory, and keep them there under `key`."""

    key: int
    blocks: list[int]


@dataclass(frozen=True)
class SwapInCall:
    """Copy block i of what is kept under `key` to block targets[i], or nowhere if that is None."""

    key: int
    targets: list[int | None]


@dataclass(frozen=True)
class ForgetCall:
    """Drop what host memory keeps under these keys."""

    keys: list[int]


@dataclass(frozen=True)
class TimeSwapCall:
    """Measure the seconds that one block takes to host memory and back."""


DeviceCall = StepCall | SwapOutCall | SwapInCall | ForgetCall | TimeSwapCall
