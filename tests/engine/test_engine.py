"""The engine as its users see it: limits, refusals, pressure, reuse."""

import json
import re

import numpy as np
import pytest

from jpaged.errors import ConfigError, PromptTooLongError, RequestError
from jpaged.llm import LLM
from jpaged.outputs import FinishReason
from jpaged.sampling_params import SamplingParams
from tests.doubles import byte_tokenizer, chain, save_scripted_model

LETTERS = "abcdefghij"


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory):
    """A model that says "abcdefghij", then the end-of-sequence token, whatever the prompt.

    Its configs name another such token, as those of a base model do.
    """
    tokenizer = byte_tokenizer()
    letters = [tokenizer.token_to_id(letter) for letter in LETTERS]
    eos = tokenizer.token_to_id("</s>")
    folder = save_scripted_model(
        tmp_path_factory.mktemp("scripted"),
        tokenizer,
        chain([*letters, eos]),
        first_token=letters[0],
        eos_token_ids=[tokenizer.token_to_id("!")],
    )
    recommended = {"eos_token_id": [tokenizer.token_to_id("?")], "temperature": 0.5, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return folder


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory):
    """A tiny random Llama without torch."""
    from tests.random_llama import save_random_llama

    return save_random_llama(tmp_path_factory.mktemp("random"))


@pytest.fixture
def llm(scripted_folder, make_llm) -> LLM:
    return make_llm(scripted_folder, max_model_len=128)


def tokens(length: int, first: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(first + index) % 200 for index in range(length)]}


def params(max_tokens: int | None = 8, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def assert_idle(llm: LLM) -> None:
    llm.engine.core.scheduler.check_integrity()
    assert llm.engine.core.block_pool.num_used == 0
    assert not llm.engine.has_unfinished


@pytest.mark.smoke
@pytest.mark.slow
def test_text_in_text_out(llm):
    """O-76: the answer ends at the tokenizer's end of sequence, which no config names."""
    [output] = llm.generate("hello", params(32))
    assert output.finished and output.prompt == "hello"
    completion = output.outputs[0]
    assert completion.text == LETTERS and len(completion.token_ids) == len(LETTERS) + 1
    assert completion.finish_reason is FinishReason.STOP and completion.stop_reason is None
    timing = output.timing
    assert timing.arrival <= timing.first_scheduled <= timing.first_token <= timing.finished


def test_model_recommends_sampling_parameters(llm, monkeypatch):
    """O-75: they are used when no params are given; params that are given are taken whole."""
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=1)
    made = []
    make_request = llm.engine.make_request

    def recording(request_id, prompt, params):
        made.append(params)
        return make_request(request_id, prompt, params)

    monkeypatch.setattr(llm.engine, "make_request", recording)
    llm.generate("hello")
    llm.generate("hello", SamplingParams())
    assert made == [SamplingParams(temperature=0.5, top_k=1), SamplingParams()]


def test_chat(llm):
    [output] = llm.chat([{"role": "user", "content": "hi"}], params(32))
    assert output.outputs[0].text == LETTERS
    expected = llm.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert list(output.prompt_token_ids) == expected
    both = llm.chat([[{"role": "user", "content": text}] for text in ("a", "b")], params(32))
    assert [each.outputs[0].text for each in both] == [LETTERS, LETTERS]


@pytest.mark.parametrize("length", [126, 127])
def test_context_is_filled_to_the_last_token(llm, length):
    """O-10: 127 + 1 works at a limit of 128, and an unset max_tokens fills what is left."""
    for max_tokens in (None, 128 - length):
        [output] = llm.generate([tokens(length)], params(max_tokens, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 128 - length
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length,max_tokens", [(128, None), (128, 1), (129, 1)])
def test_prompts_beyond_the_context_are_refused(llm, length, max_tokens):
    """O-10"""
    with pytest.raises(PromptTooLongError, match=rf"{length} tokens.*context holds 128") as caught:
        llm.generate([tokens(length)], params(max_tokens))
    assert caught.value.param == "prompt"
    assert_idle(llm)


def test_max_tokens_beyond_the_context_is_refused(llm):
    """O-10: the message names the limit, both counts and what would work."""
    message = "127 tokens and max_tokens is 5, together 132, but .* holds 128.*at most 1"
    with pytest.raises(PromptTooLongError, match=message):
        llm.generate([tokens(127)], params(5))


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [10**6]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": 5},
        {"tokens": [1]},
        "",
        7,
    ],
)
def test_bad_prompts_are_refused(llm, prompt):
    """O-37: in jit an id out of range would be clamped or wrapped."""
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], params())
    assert caught.value.param == "prompt"
    assert_idle(llm)
    assert llm.generate("x", params(32))[0].outputs[0].text == LETTERS


def test_vocabulary_limits(llm):
    """O-37: the last token id is good, the one behind it is not."""
    last = llm.engine.inputs.vocab_size - 1
    llm.generate([{"prompt_token_ids": [last]}], params(1))
    with pytest.raises(RequestError, match=rf"from 0 to {last}, got {last + 1}"):
        llm.generate([{"prompt_token_ids": [last + 1]}], params(1))
    with pytest.raises(RequestError, match="stop_token_ids"):
        llm.generate(["a"], params(1, stop_token_ids=[last + 1]))


def test_a_bad_prompt_refuses_the_whole_call(llm):
    """O-35: nothing is computed, and nothing is left behind that shifts later answers."""
    with pytest.raises(PromptTooLongError):
        llm.generate(["short", tokens(500), "short"], params())
    assert_idle(llm)
    for _ in range(2):
        outputs = llm.generate([tokens(3), tokens(9), tokens(40)], params(4))
        assert [len(output.prompt_token_ids) for output in outputs] == [3, 9, 40]


def test_options_and_parameters_are_refused_by_name(scripted_folder, llm):
    with pytest.raises(ConfigError, match="unknown option 'max_batch'"):
        LLM(str(scripted_folder), max_batch=3)
    with pytest.raises(RequestError, match="2 for 1 prompts"):
        llm.generate(["a"], [params(), params()])
    with pytest.raises(ConfigError, match="max_model_len 600 is more than the model's 512"):
        LLM(str(scripted_folder), max_model_len=600)


def test_without_tokenizer(scripted_folder, make_llm):
    llm = make_llm(scripted_folder, skip_tokenizer_init=True)
    [output] = llm.generate([tokens(3)], params(3))
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""
    for prompt, options in (("text", {}), (tokens(3), {"stop": "x"})):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.generate([prompt], params(3, **options))
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "options,text,reason",
    [
        ({"stop": "def"}, "abc", "def"),
        ({"stop": ["ij", "e"]}, "abcd", "e"),
        ({"stop": "ef", "include_stop_str_in_output": True}, "abcdef", "ef"),
        ({"stop": "xyz"}, LETTERS, None),
        ({"stop": "a"}, "", "a"),
    ],
)
def test_stop_strings(llm, options, text, reason):
    """O-27, O-28: over token borders, earliest first; the prompt never triggers."""
    [output] = llm.generate("abcdefghij?", params(32, **options))
    completion = output.outputs[0]
    assert (completion.text, completion.stop_reason) == (text, reason)
    assert completion.finish_reason is FinishReason.STOP
    assert_idle(llm)


def test_stop_token_ids(llm):
    """O-29"""
    [token] = llm.tokenizer.encode("d")
    [output] = llm.generate("q", params(32, stop_token_ids=[token]))
    assert output.outputs[0].text == "abc" and output.outputs[0].stop_reason == token
    assert output.outputs[0].token_ids[-1] == token


@pytest.mark.smoke
@pytest.mark.parametrize("ends", ["eos", "stop string", "length", "abort"])
def test_all_blocks_come_back(llm, ends):
    """O-04: whichever way a request ends, with a step still on its way."""
    options = {
        "eos": params(64),
        "stop string": params(64, stop="h"),
        "length": params(5),
        "abort": params(64, ignore_eos=True),
    }[ends]
    requests = [llm.engine.make_request(str(n), tokens(30 + n), options) for n in range(3)]
    for request in requests:
        llm.engine.add_request(request)
    steps = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.core.scheduler.check_integrity()
        steps += 1
        if ends == "abort" and steps in (1, 3, 6):
            llm.engine.abort(requests.pop())
    assert_idle(llm)


@pytest.fixture(scope="session")
def roomy_answers(random_folder, make_llm):
    """Greedy answers without memory pressure, one request at a time."""

    def answers(prompts, max_tokens):
        llm = make_llm(random_folder)
        return [
            llm.generate([prompt], params(n, ignore_eos=True))[0].outputs[0].token_ids
            for prompt, n in zip(prompts, max_tokens, strict=True)
        ]

    return answers


@pytest.mark.slow
def test_preempted_requests_lose_nothing(random_folder, make_llm, roomy_answers):
    """O-14: a pool for one and a half requests; each gets all its tokens, the same as alone."""
    llm = make_llm(random_folder, num_gpu_blocks_override=12)
    prompts = [tokens(64, first=10 * number) for number in range(4)]
    requests = [
        llm.engine.make_request(str(number), prompt, params(64, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        llm.engine.add_request(request)
    seen: dict[str, list[tuple[int, ...]]] = {}
    while llm.engine.has_unfinished:
        for request in llm.engine.step():
            seen.setdefault(request.request_id, []).append(request.output().outputs[0].token_ids)
    num_preemptions = sum(generation.group.requests[0].num_preemptions for generation in requests)
    assert 0 < num_preemptions < 8
    expected = roomy_answers(prompts, [64] * 4)
    for number, request in enumerate(requests):
        snapshots = seen[request.request_id]
        assert snapshots[-1] == expected[number]
        # O-40: earlier snapshots are unchanged beginnings of the answer, without gap or repeat.
        assert snapshots == [expected[number][: count + 1] for count in range(64)]
    assert_idle(llm)


@pytest.mark.long
def test_500_requests_under_pressure(random_folder, make_llm, roomy_answers, count_compilations):
    """O-61: mixed lengths, a pool that forces preemption: exact counts, no compilation."""
    llm = make_llm(random_folder, num_gpu_blocks_override=16)
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(2.5, 0.8, 500).astype(int), 1, 150)
    max_tokens = np.clip(random.lognormal(3.6, 0.6, 500).astype(int), 1, 80).tolist()
    prompts = [tokens(int(length), first=int(number)) for number, length in enumerate(lengths)]
    options = [
        SamplingParams(
            temperature=float(random.choice([0, 0, 0.8])),
            top_k=int(random.choice([0, 20])),
            top_p=float(random.choice([1, 0.9])),
            seed=number,
            max_tokens=count,
            ignore_eos=True,
        )
        for number, count in enumerate(max_tokens)
    ]
    with count_compilations() as count:
        outputs = llm.generate(prompts, options, use_tqdm=False)
    assert count() == 0
    assert [len(output.outputs[0].token_ids) for output in outputs] == max_tokens
    assert_idle(llm)
    rendered = llm.engine.core.metrics.render()[0].decode()
    [num_preemptions] = re.findall(r"^jpaged:num_preemptions_total\{.*\} (.*)$", rendered, re.M)
    assert float(num_preemptions) > 10, num_preemptions
    greedy = [number for number, option in enumerate(options) if option.is_greedy][:60]
    expected = roomy_answers([prompts[n] for n in greedy], [max_tokens[n] for n in greedy])
    assert [outputs[number].outputs[0].token_ids for number in greedy] == expected


def test_pool_that_can_never_hold_the_prompt(random_folder, make_llm):
    """O-09: refused at once, and others go on; an answer too long for the pool ends by length."""
    llm = make_llm(random_folder, num_gpu_blocks_override=10, max_model_len=256)
    with pytest.raises(RequestError, match="needs 13 KV blocks of 16 tokens.*pool has 10"):
        llm.generate([tokens(200)], params(4))
    assert len(llm.generate([tokens(5)], params(4))[0].outputs[0].token_ids) == 4
    [output] = llm.generate([tokens(100)], params(150, ignore_eos=True))
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert len(output.outputs[0].token_ids) == 61
    assert_idle(llm)


def test_seeds(random_folder, make_llm):
    """O-15: a seeded answer ignores its neighbours; unseeded ones differ."""
    llm = make_llm(random_folder)
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    alone = llm.generate([tokens(20)], seeded)[0].outputs[0].token_ids
    for _ in range(3):
        outputs = llm.generate([tokens(7), tokens(20), tokens(9)], [unseeded, seeded, unseeded])
        assert outputs[1].outputs[0].token_ids == alone
    answers = {output.outputs[0].token_ids for output in llm.generate([tokens(20)] * 6, unseeded)}
    assert len(answers) >= 2


def test_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    step = llm.engine.step
    calls = iter(range(3))

    def interrupted_step():
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "y"], params(64, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert llm.generate("x", params(32), use_tqdm=False)[0].outputs[0].text == LETTERS
    assert_idle(llm)
