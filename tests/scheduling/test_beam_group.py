"""How the beams of a search become its survivors."""

from jpaged.beam_search_params import BeamSearchParams
from jpaged.outputs import TokenLogprobs
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.beam_group import BeamGroup
from jpaged.scheduling.beam_search import Candidate
from jpaged.scheduling.group_policy import BEAM_SEARCH
from jpaged.scheduling.request import Request

PROMPT = [1, 2]


def test_only_siblings_copy_what_their_parent_has():
    """A step costs the same however long the answers are; no two sequences share a list."""
    params = SamplingParams(max_tokens=9)
    beams = [Request("r", PROMPT, params, max_tokens=9, policy=BEAM_SEARCH) for _ in range(4)]
    group = BeamGroup(0, BeamSearchParams(beam_width=4, max_tokens=9), beams, 8)

    def go_on(*survivors: tuple[int, int]) -> None:
        for beam in group.beams:
            group.report(beam, TokenLogprobs(-1.0, ()))
        group.go_on([Candidate(parent, token, -token, 0.0) for parent, token in survivors])

    def answers() -> list[list[int]]:
        for beam in beams:
            assert [-int(each.logprob) for each in beam.logprobs] == beam.token_ids[2:]
        return [beam.token_ids[2:] for beam in beams]

    go_on((0, 10), (1, 11), (2, 12), (3, 13))
    lists = [(beam.token_ids, beam.logprobs) for beam in beams]
    go_on((3, 20), (1, 21), (1, 22), (0, 23))
    assert answers() == [[13, 20], [11, 21], [11, 22], [10, 23]]
    for beam, parent in (0, 3), (2, 1), (3, 0):
        assert beams[beam].token_ids is lists[parent][0]
        assert beams[beam].logprobs is lists[parent][1]
    # The last two beams end here with what they have.
    go_on((3, 30), (1, 31))
    go_on((1, 40), (0, 41))
    assert answers() == [[11, 21, 31, 40], [10, 23, 30, 41], [11, 22], [10, 23]]
