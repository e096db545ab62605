"""The host's copy of the device's state by slot, from which it knows what has changed."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jpaged.execution.slot_state import SlotColumn, SlotShape
from jpaged.execution.step_inputs import NO_LOGPROBS
from jpaged.scheduling.request import Request


class SlotMirror:
    """What a `SlotState` holds once every step that was packed has run.

    The device runs steps in the order of their launch, so a slot may change hands while a step of
    its last request is still on its way.
    """

    def __init__(self, shape: SlotShape, *, block_size: int) -> None:
        self.shape = shape
        self._block_size = block_size
        self._words = np.zeros(shape.num_addresses, np.int32)
        # Of each slot: the block table that it shows, and how many blocks of it.
        self._shown: list[list[int]] = [[] for _ in range(shape.num_slots)]
        self._num_shown = np.zeros(shape.num_slots, np.int32)

    def take_over(self, requests: Sequence[Request]) -> list[Int[np.ndarray, "2 W"]]:
        """Return the writes that make the slots those of the requests.

        A block table identifies who has a slot: a request that starts, or whose table changes
        before its end, has a new list; otherwise a list only grows.
        """
        addresses: list[int] = []
        values: list[int] = []
        for request in requests:
            slot = request.running_slot
            if self._shown[slot] is not request.block_ids:
                self._shown[slot] = request.block_ids
                self._num_shown[slot] = 0
                columns = _columns(request)
                addresses += [slot * self.shape.row_size + column for column in columns]
                values += columns.values()
        return [self._changed(addresses, values)] if addresses else []

    def advance(
        self,
        slots: Int[np.ndarray, "S"],
        starts: Int[np.ndarray, "S"],
        ends: Int[np.ndarray, "S"],
    ) -> list[Int[np.ndarray, "2 W"]]:
        """Return the writes without which a step cannot compute tokens [start, end) of each slot.

        Table entries of later tokens are left for later steps, so that a long prompt does not
        send its whole table at once.
        """
        num_needed = -(-ends // self._block_size)
        addresses: list[int] = []
        values: list[int] = []
        for index in np.flatnonzero(self._num_shown[slots] < num_needed):
            slot, end = int(slots[index]), int(num_needed[index])
            first = int(self._num_shown[slot])
            addresses += self.shape.table_addresses(slot, first, end)
            values += self._shown[slot][first:end]
        self._num_shown[slots] = np.maximum(self._num_shown[slots], num_needed)
        tables = self._changed(addresses, values)
        counts = self.shape.column_addresses(slots, SlotColumn.NUM_COMPUTED)
        progress = self._changed(counts, starts)
        self._words[counts] = ends  # as the device counts on
        return [tables, progress]

    def _changed(
        self, addresses: Sequence[int] | np.ndarray, values: Sequence[int] | np.ndarray
    ) -> Int[np.ndarray, "2 W"]:
        """Take in values at addresses and return those that are new there."""
        pairs = np.array([addresses, values], np.int32)
        pairs = pairs[:, self._words[pairs[0]] != pairs[1]]
        self._words[pairs[0]] = pairs[1]
        return pairs


def _columns(request: Request) -> dict[SlotColumn, int]:
    """What the host knows of a request as long as it has its slot."""
    params = request.params
    temperature = 0.0 if params.is_greedy else params.temperature
    return {
        # Halves of a seed are bit patterns: those from 2**31 on are negative numbers.
        SlotColumn.SEED_LOW: _signed(request.seed & 0xFFFFFFFF),
        SlotColumn.SEED_HIGH: _signed((request.seed >> 32) & 0xFFFFFFFF),
        SlotColumn.TOP_K: params.top_k,
        SlotColumn.NUM_LOGPROBS: _or_none(request.num_reported_logprobs),
        SlotColumn.NUM_PROMPT_LOGPROBS: _or_none(request.num_prompt_logprobs),
        SlotColumn.TEMPERATURE: _float_bits(temperature),
        SlotColumn.TOP_P: _float_bits(params.top_p),
    }


def _or_none(number: int | None) -> int:
    return NO_LOGPROBS if number is None else number


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
