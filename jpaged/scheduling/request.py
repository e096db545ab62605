"""The state of one request inside the engine. Host side only: imports no JAX."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from jpaged.outputs import FinishReason, TokenLogprobs
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.group_policy import SAMPLING, GroupPolicy
from jpaged.updates import SequenceUpdate

if TYPE_CHECKING:
    from jpaged.scheduling.request_group import RequestGroup


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class SwappedBlocks:
    """Blocks that were moved to host memory when requests were preempted together.

    tables: of each request that is to come back, its block table as positions among these blocks.
    data: the runner's, who keeps the content here; it goes when nobody refers to it any more.
    """

    num_blocks: int
    tables: "dict[Request, list[int]]"
    data: Any = None


class Request:
    """Tokens, progress and blocks of one answer to a request.

    group: all answers to the same request, this one included; set by the group.
    index: place of this answer among them.
    policy: how this request and its siblings are computed.
    max_tokens: most tokens of the answer, as asked for. token_limit: the same, lowered by the
        scheduler when the pool cannot hold more.
    num_reported_logprobs: most likely tokens to read with each sampled one; None reads nothing.
    num_prompt_logprobs: the same with each token of the prompt; only the first answer asks.
    prompt_logprobs: of the prompt's first tokens, as far as they are known; None for the first.
    num_scored_tokens: the same, those included that are on their way.
    token_ids: prompt, then every generated token the host has read.
    num_handed_over: generated tokens that updates have reported.
    num_computed_tokens: tokens whose K/V are written by steps launched so far; the one truth
        about progress.
    num_in_flight_tokens: tokens sampled by launched steps and not read by the host yet. Their
        ids are on the device; `num_tokens` counts them.
    num_cached_tokens: prompt tokens in whole blocks that the prefix cache had when the request
        first ran.
    cache_keys: what K/V depend on besides the tokens before, by tag; see `prefix_cache`.
    root_digest: the digest of `cache_keys`, once it was needed.
    block_digests: names of the request's full blocks, as far as they were needed.
    num_registered_blocks: blocks whose content was made known to the prefix cache.
    block_ids: block table; slot t of the request is in block_ids[t // block_size].
    slot: row of the device's per-request arrays while running.
    swapped: where its blocks are while it waits, if they were moved to host memory.
    """

    group: "RequestGroup"

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        cache_keys: Mapping[str, str] | None = None,
        index: int = 0,
        policy: GroupPolicy = SAMPLING,
        arrival_time: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.policy = policy
        self.num_reported_logprobs = (
            params.num_reported_logprobs
            if policy.num_reported_logprobs is None
            else policy.num_reported_logprobs
        )
        self.num_prompt_logprobs = params.prompt_logprobs if index == 0 else None
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_scored_tokens = 1
        self.params = params
        self.max_tokens = max_tokens
        self.token_limit = max_tokens
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.logprobs: list[TokenLogprobs] = []
        self.num_handed_over = 0
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.cache_keys = cache_keys or {}
        self.root_digest: bytes | None = None
        self.block_digests: list[bytes] = []
        self.num_registered_blocks = 0
        self.block_ids: list[int] = []
        self.slot: int | None = None
        self.swapped: SwappedBlocks | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self._is_end_handed_over = False
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def siblings(self) -> "Sequence[Request]":
        return self.group.requests

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, those included that only the device knows yet."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def running_slot(self) -> int:
        assert self.slot is not None, f"request {self.request_id} does not run"
        return self.slot

    @property
    def is_fresh(self) -> bool:
        """Whether it waits, to be computed from its beginning, and nothing was sampled yet."""
        is_waiting = self.status is RequestStatus.WAITING and self.swapped is None
        return is_waiting and self.num_tokens == self.num_prompt_tokens

    @property
    def needs_scores(self) -> bool:
        """Whether log-probabilities of its prompt are wanted that no launched step reports."""
        return (
            self.num_prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens
        )

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of its prompt, if wanted, are all known."""
        return (
            self.num_prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt_tokens
        )

    @property
    def num_tokens_to_compute(self) -> int:
        """Known or sampled tokens whose logits are still of use. The last token of a prompt that
        is only scored is not."""
        if not self.policy.generates:
            return max(0, self.num_prompt_tokens - 1 - self.num_computed_tokens)
        return 0 if self.has_all_tokens_in_flight else self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def has_all_tokens_in_flight(self) -> bool:
        """True once the steps launched so far sample the last token that is allowed."""
        return self.num_tokens - self.num_prompt_tokens >= self.token_limit

    def scores_of(self, start: int, num_tokens: int) -> range:
        """Positions of the prompt tokens whose log-probabilities are wanted and come with the
        logits of tokens [start, start + num_tokens)."""
        if not self.needs_scores:
            return range(0)
        last = min(start + num_tokens, self.num_prompt_tokens - 1)
        return range(max(start + 1, self.num_scored_tokens), last + 1)

    def num_tokens_with_logits(self, num_tokens: int, num_logits: int) -> int:
        """As many of its next `num_tokens` tokens as a step can compute that makes the logits of
        at most `num_logits` of them."""
        start = self.num_computed_tokens
        if self.needs_scores:
            first = self.scores_of(start, num_tokens).start
            num_tokens = min(num_tokens, first - start + num_logits - 1)
        is_sampled = start + num_tokens == self.num_tokens
        is_too_much = len(self.scores_of(start, num_tokens)) + is_sampled > num_logits
        return num_tokens - 1 if is_sampled and is_too_much else num_tokens

    def append_scores(self, first: int, scores: Sequence[TokenLogprobs | None]) -> None:
        """Take log-probabilities of the prompt from position `first` on; known ones stay."""
        known = len(self.prompt_logprobs)
        assert first <= known, f"{first=} {known=}"
        self.prompt_logprobs += scores[known - first :]
        self.num_scored_tokens = max(self.num_scored_tokens, len(self.prompt_logprobs))

    def append_token(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take a token that the device sampled, and finish when it ends the answer."""
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.num_in_flight_tokens -= 1
        self.token_ids.append(token_id)
        self._note_token_time()
        if token_id in self.stop_token_ids:
            is_listed = token_id in (self.params.stop_token_ids or ())
            self.finish(FinishReason.STOP, token_id if is_listed else None)
        elif self.num_output_tokens >= self.token_limit:
            self.finish(FinishReason.LENGTH)

    def fork(self, *, index: int, seed: int) -> "Request":
        """Another answer that goes on from the tokens that are known now, with its own noise."""
        child = Request(
            self.request_id,
            self.token_ids,
            self.params,
            max_tokens=self.max_tokens,
            seed=seed,
            stop_token_ids=self.stop_token_ids,
            cache_keys=self.cache_keys,
            index=index,
            policy=self.policy,
        )
        child.group = self.group
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.logprobs = list(self.logprobs)
        child.block_digests = list(self.block_digests)
        return child

    def continue_as(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Become another beam's sequence, one token longer."""
        self.num_in_flight_tokens = 0
        self.token_ids = token_ids
        self.logprobs = logprobs
        self._note_token_time()

    def _note_token_time(self) -> None:
        self.last_token_time = time.monotonic()
        if self.first_token_time is None:
            self.first_token_time = self.last_token_time

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        assert not self.is_finished, f"request {self.request_id} finished twice"
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.finished_time = time.monotonic()

    def take_update(self) -> SequenceUpdate | None:
        """What is new since the last call; None if nothing is."""
        start = self.num_handed_over
        is_end = self.is_finished and not self._is_end_handed_over
        if start == self.num_output_tokens and not is_end:
            return None
        self.num_handed_over = self.num_output_tokens
        self._is_end_handed_over = self.is_finished
        wants_logprobs = self.num_reported_logprobs is not None
        return SequenceUpdate(
            self.index,
            token_ids=tuple(self.token_ids[self.num_prompt_tokens + start :]),
            logprobs=tuple(self.logprobs[start:]) if wants_logprobs else (),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
