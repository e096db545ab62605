"""What clients learn of the prefix cache."""

import re

from jpaged.sampling_params import SamplingParams
from tests.engine.scripted_runner import VOCAB_SIZE, ScriptedRunner
from tests.engine.test_engine_machine import make_engine

BLOCK_SIZE = 8
SECRET = [3, 1, 4, 1, 5, 6, 2, 0, 2, 7, 1, 0, 2, 0, 1, 4, 5, 1]


class Probe:
    """An engine that has answered one client, and then answers another one.

    reported: everything that the second one learns besides the answer and the time it took.
    """

    def __init__(self, prompt: list[int], **options) -> None:
        runner = ScriptedRunner(num_blocks=32, block_size=8, num_slots=4, max_num_tokens=32)
        self.engine = make_engine(runner)
        self._answer(SECRET)
        self.output = self._answer(prompt, **options)
        metrics, _ = self.engine.core.metrics.render()
        metrics = re.sub(r"(?m)^.*(seconds|_created).*$", "", metrics.decode())
        self.reported = (self.output.num_cached_tokens, metrics)

    def _answer(self, prompt: list[int], **options):
        params = SamplingParams(max_tokens=1, ignore_eos=True, **options)
        generation = self.engine.make_request("r", {"prompt_token_ids": prompt}, params)
        schedule = self.engine.core.scheduler.schedule
        self.num_computed = 0

        def counted():
            batch = schedule()
            self.num_computed += batch.num_tokens
            return batch

        self.engine.core.scheduler.schedule = counted
        self.engine.add_request(generation)
        while self.engine.has_unfinished:
            self.engine.step()
        self.engine.core.scheduler.schedule = schedule
        return generation.output()


def test_no_guess_of_a_single_token_shows():
    """O-08: whoever knows the prompt up to a token learns nothing from trying all tokens there,
    be it from the number of cached tokens or from the server's metrics. Only a block that is
    guessed as a whole shows."""
    for known in range(BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1):
        guesses = [Probe([*SECRET[:known], guess, 7, 7, 7]).reported for guess in range(VOCAB_SIZE)]
        assert all(guess == guesses[0] for guess in guesses), f"token {known} can be read"
        assert guesses[0][0] == BLOCK_SIZE


def test_counts_are_of_whole_blocks():
    for length in range(1, len(SECRET) + 1):
        for options in ({}, {"prompt_logprobs": 0}):
            assert Probe(SECRET[:length], **options).output.num_cached_tokens % BLOCK_SIZE == 0
    assert Probe(SECRET).output.num_cached_tokens == 16


def test_partly_equal_blocks_help_all_the_same():
    assert Probe([*SECRET[:13], 7, 7]).num_computed == 2
    assert Probe(SECRET[:16]).num_computed == 1
