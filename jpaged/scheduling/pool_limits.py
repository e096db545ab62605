"""Refuses requests that can never run, however empty the pool is. Imports no JAX."""

from jpaged.errors import RequestError
from jpaged.scheduling.request import Request


class PoolLimits:
    """Checks what is certain of a request against all slots and all blocks."""

    def __init__(self, *, num_slots: int, num_blocks: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.block_size = block_size

    def check(self, request: Request) -> None:
        """Raise `RequestError` if the request, or siblings that it cannot go on without, never fit.

        A request that may fit is not refused: how long its answer gets is not known before.
        """
        self._check_prompt(request.num_prompt_tokens)
        if request.policy.waits_for_siblings:
            self._check_beams(request)

    def _check_prompt(self, num_tokens: int) -> None:
        # The token that the prompt's step samples needs no room unless it is computed in turn.
        needed = -(-num_tokens // self.block_size)
        if needed > self.num_blocks:
            raise RequestError(
                f"the prompt has {num_tokens} tokens and needs {needed} KV blocks of "
                f"{self.block_size} tokens, but the whole pool has {self.num_blocks}. Shorten the "
                "prompt or start the engine with a larger KV cache.",
                param="prompt",
            )

    def _check_beams(self, beam: Request) -> None:
        width = len(beam.siblings)
        if width > self.num_slots:
            raise RequestError(
                f"beam_width {width} is more than max_num_seqs, {self.num_slots}: "
                "beams run together. Choose a smaller beam_width or start with more max_num_seqs.",
                param="beam_width",
            )
        if beam.max_tokens == 1:  # never computed in turn
            return
        # Beams share the full blocks of the prompt. The block of its first token is a beam's own.
        num_shared = beam.num_prompt_tokens // self.block_size
        if num_shared + width > self.num_blocks:
            raise RequestError(
                f"beam_width {width} needs at least {num_shared + width} KV blocks of "
                f"{self.block_size} tokens: {num_shared} for the prompt of "
                f"{beam.num_prompt_tokens} tokens and one for each beam, but the whole pool has "
                f"{self.num_blocks}. Choose a smaller beam_width, shorten the prompt or start the "
                "engine with a larger KV cache.",
                param="beam_width",
            )
