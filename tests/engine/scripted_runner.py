"""A device that is as simple as can be: K/V of a token are its id, and the model is a hash.

It reads and writes blocks exactly as told. Blocks that nobody may read are poisoned: whoever
reads one has a wrong block table, or a block that was not written, copied or moved in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np

from jpaged.execution.runner import LaunchedStep, Runner
from jpaged.outputs import TokenLogprobs
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefill_clock import StepTrace
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch
from tests.engine.poison import Poison

VOCAB_SIZE = 8
POISON = -1


def scores(context: Sequence[int]) -> np.ndarray:
    """Log-probabilities of the token after a context."""
    digest = blake2b(bytes(context), digest_size=VOCAB_SIZE).digest()
    logits = np.frombuffer(digest, np.uint8) / 64
    return logits - np.log(np.exp(logits).sum())


def draw(context: Sequence[int], request: Request) -> int:
    """The next token: the likeliest, or one that depends on seed and position alone."""
    values = scores(context)
    if not request.params.is_greedy:
        key = f"{request.seed} {len(context)}".encode()
        noise = blake2b(key, digest_size=VOCAB_SIZE).digest()
        values = values + np.frombuffer(noise, np.uint8) / 32
    return int(values.argmax())


def logprobs_of(context: Sequence[int], token: int, number: int) -> TokenLogprobs:
    values = scores(context)
    best = sorted(range(VOCAB_SIZE), key=lambda each: -values[each])[:number]
    return TokenLogprobs(float(values[token]), tuple((each, float(values[each])) for each in best))


@dataclass(frozen=True)
class ScriptedStep(LaunchedStep):
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]

    def read_tokens(self) -> list[int]:
        return self.tokens

    def read_logprobs(self) -> list[TokenLogprobs | None]:
        return self.logprobs


class ScriptedRunner(Runner):
    def __init__(
        self, *, num_blocks: int, block_size: int, num_slots: int, max_num_tokens: int, num_swap=0
    ) -> None:
        self.spec = SimpleNamespace(
            kv_cache=SimpleNamespace(num_blocks=num_blocks, block_size=block_size),
            num_slots=num_slots,
            max_num_tokens=max_num_tokens,
            num_swap_blocks=num_swap,
        )
        self.pool = np.full((num_blocks + 1, block_size), POISON)
        self.last_token = [POISON] * num_slots

    def watch(self, block_pool: BlockPool) -> None:
        """Poison what nobody may read, from now on."""
        self.block_pool = block_pool
        self._poison = Poison(block_pool)

    def time_swap(self) -> float:
        return 1e-9

    def move_blocks(self, batch: ScheduledBatch) -> None:
        """In the order of a real device: out, in, copies."""
        for out in batch.swap_outs:
            out.swapped.data = self.pool[out.blocks]
        self.pool[self._poison.unreadable(batch)] = POISON
        for back in batch.swap_ins:
            for content, target in zip(back.swapped.data, back.targets, strict=True):
                if target is not None:
                    self.pool[target] = content
        targets = [target for _, target in batch.copies]
        assert len(set(targets)) == len(targets), "which copy wins is undefined"
        before = self.pool.copy()
        for source, target in batch.copies:
            self.pool[target] = before[source]

    def pack(self, batch: ScheduledBatch) -> ScheduledBatch:
        return batch

    def launch(self, batch: ScheduledBatch) -> ScriptedStep:
        tokens, logprobs, requests = [], [], []
        for row in batch.rows:
            self._write(row.request, row.start, row.num_tokens)
        for row in batch.rows:
            if row.sampled:
                context = self._read(row.request, row.start + row.num_tokens)
                for request in row.sampled:
                    token = draw(context, request)
                    number = request.num_reported_logprobs
                    requests.append(request)
                    tokens.append(token)
                    logprobs.append(None if number is None else logprobs_of(context, token, number))
        assert batch.num_outputs <= self.spec.num_slots
        for row in batch.scored_rows:
            context = self._read(row.request, row.start + row.num_tokens)
            for position in row.scored:
                assert row.start < position <= row.start + row.num_tokens
                token = row.request.token_ids[position]
                number = row.request.num_prompt_logprobs
                logprobs.append(logprobs_of(context[:position], token, number))
        scored = [(row.request, row.scored) for row in batch.scored_rows]
        for request, token in zip(requests, tokens, strict=True):
            self.last_token[request.running_slot] = token
        return ScriptedStep(requests, scored, StepTrace(1, True, 0.0), None, tokens, logprobs)

    def _write(self, request: Request, start: int, num_tokens: int) -> None:
        size = self.spec.kv_cache.block_size
        for position in range(start, start + num_tokens):
            is_known = position < len(request.token_ids)
            token = (
                request.token_ids[position] if is_known else self.last_token[request.running_slot]
            )
            block = request.block_ids[position // size]
            known = self.block_pool.digest(block)
            assert known is None or self.pool[block, position % size] == token, (
                f"{request.request_id} changes block {block}, which others may find"
            )
            self.pool[block, position % size] = token

    def _read(self, request: Request, num_tokens: int) -> list[int]:
        size = self.spec.kv_cache.block_size
        context = self.pool[request.block_ids].reshape(-1)[:num_tokens].tolist()
        assert POISON not in context, f"{request.request_id} reads {context}, {size=}"
        known = request.token_ids[:num_tokens]
        assert context[: len(known)] == known, f"{request.request_id} reads another's blocks"
        return context
