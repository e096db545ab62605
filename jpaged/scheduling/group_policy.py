"""What scheduler and engine need to know of a kind of request. Host side only: imports no JAX.

A request group is one prompt and its sequences: answers drawn independently, answers of which the
best are returned, beams of one search, or no answer at all when only the prompt is scored. What
differs between these kinds is listed here once; nothing else asks which kind a request is.
"""

from dataclasses import dataclass

from jpaged.beam_search_params import BeamSearchParams
from jpaged.sampling_params import MAX_REPORTED_TOKENS, SamplingParams


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """How the sequences of one group are computed.

    generates: tokens are sampled. False: the request ends with its prompt's log-probabilities.
    waits_for_siblings: a sequence takes its next step only after the results of the step before
        have come for all sequences, as its next token is chosen among the candidates of all.
        Until then its latest token is unknown, so no step is launched ahead.
    ends_together: a sequence cannot go on without its siblings, so when the pool has no block
        for one of them, all end.
    report_is_repeatable: results that a preemption has made useless are computed again from the
        last known token. False: a token is final once its step was launched.
    is_forkable: clients may start more sequences from one that exists.
    num_reported_logprobs: most likely tokens that every step reports besides the sampled one,
        whatever the client asks for; None: what the client asks for.
    """

    generates: bool = True
    waits_for_siblings: bool = False
    ends_together: bool = False
    report_is_repeatable: bool = False
    is_forkable: bool = True
    num_reported_logprobs: int | None = None


SAMPLING = GroupPolicy()
# Which sequences are returned is settled at the end only.
BEST_OF = GroupPolicy(is_forkable=False)
SCORING = GroupPolicy(generates=False, is_forkable=False)
BEAM_SEARCH = GroupPolicy(
    waits_for_siblings=True,
    ends_together=True,
    report_is_repeatable=True,
    is_forkable=False,
    num_reported_logprobs=MAX_REPORTED_TOKENS,
)


def policy_of(params: SamplingParams | BeamSearchParams) -> GroupPolicy:
    """The policy of requests with these parameters."""
    if isinstance(params, BeamSearchParams):
        return BEAM_SEARCH
    if params.max_tokens == 0:
        return SCORING
    return BEST_OF if params.num_sequences > params.n else SAMPLING
