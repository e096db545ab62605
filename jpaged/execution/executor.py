"""Carries out device calls: owns the parameters, the KV pools and the state of one host's devices.

With several hosts each has an executor, and all get the same calls in the same order.
"""

from typing import Any

from jpaged.execution.block_mover import BlockMover, HostChunk
from jpaged.execution.device_calls import (
    DeviceCall,
    ForgetCall,
    StepCall,
    SwapInCall,
    SwapOutCall,
    TimeSwapCall,
)
from jpaged.execution.programs import Programs, ProgramSpec
from jpaged.execution.sampler import Samples
from jpaged.execution.slot_state import SlotState


class Executor:
    """Not thread-safe. Devices execute calls in the order of `run`, which returns at once.

    pools: one array a layer. swapped: blocks in host memory, by key.
    """

    def __init__(self, spec: ProgramSpec, programs: Programs) -> None:
        self.programs = programs
        self.block_mover = BlockMover(programs, num_pool_blocks=spec.kv_cache.layer_shape[0])
        self.params = spec.model.params
        self.pools = spec.kv_cache.allocate()
        self.state = SlotState.zeros(spec.slot_shape, spec.whole)
        self.swapped: dict[int, list[HostChunk]] = {}

    def run(self, call: DeviceCall) -> Any:
        """Start a call. Returns `Samples` of a step that has some, and seconds of a timed swap."""
        match call:
            case StepCall():
                return self._step(call)
            case SwapOutCall(key, blocks):
                self.swapped[key] = self.block_mover.fetch(self.pools, blocks)
            case SwapInCall(key, targets):
                self.pools = self.block_mover.put_back(self.pools, self.swapped[key], targets)
            case ForgetCall(keys):
                for key in keys:
                    del self.swapped[key]
            case TimeSwapCall():
                seconds, self.pools = self.block_mover.time_round_trip(self.pools)
                return seconds
        return None

    def _step(self, call: StepCall) -> Samples | None:
        programs = self.programs
        if call.copies is not None:
            self.pools = programs.copy[call.copies.shape[1]](self.pools, call.copies)
        for writes in call.early_writes:
            self.state = programs.write(self.state, writes)
        outputs, self.pools, self.state = programs.forward[call.shape](
            self.params, self.pools, self.state, call.forward
        )
        if not call.num_sample_rows:
            return None
        samples, self.state = programs.sample[call.num_sample_rows](
            self.params, outputs, self.state
        )
        return samples
