"""Text of an answer as it grows: characters, spaces, added tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.text.detokenizer import REPLACEMENT, Detokenizer, find_byte_token
from tests.doubles import (
    EOS,
    TAG,
    Decoder,
    byte_level_tokenizer,
    byte_tokenizer,
    sentencepiece_tokenizer,
)

TOKENIZERS = {
    "bytes": Decoder(byte_tokenizer()),
    "byte-level": Decoder(byte_level_tokenizer()),
    "sentencepiece": Decoder(sentencepiece_tokenizer()),
}
MIXED_TEXT = "fire 🔥 é 漢字 a    b\n\n  c 👨‍👩‍👧"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Decoder:
    return TOKENIZERS[request.param]


def visible_texts(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """The visible text after each token, and after the end."""
    texts = []
    for token_id in token_ids:
        detokenizer.append(token_id, is_stop_token=False)
        texts.append(detokenizer.visible_text)
    detokenizer.finish()
    return [*texts, detokenizer.visible_text]


def assert_only_grows(texts: list[str]) -> None:
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before)


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Decoder) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = tokenizer.special_tokens
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("prompt", ["", "say: ", "日本"])
def test_text_equals_decoding_everything_at_once(tokenizer: Decoder, prompt: str) -> None:
    """O-30: spaces, newlines, emoji and CJK; no U+FFFD that is not in the final text."""
    prompt_ids = tokenizer.encode(prompt).ids
    answer_ids = tokenizer.encode(MIXED_TEXT).ids
    texts = visible_texts(Detokenizer(tokenizer, prompt_ids), answer_ids)
    assert_only_grows(texts)
    assert tokenizer.decode(prompt_ids + answer_ids) == tokenizer.decode(prompt_ids) + texts[-1]
    assert not any(REPLACEMENT in text for text in texts)
    assert texts[-1].strip() == MIXED_TEXT


def test_first_space_of_a_sentencepiece_answer_is_kept() -> None:
    """O-30: decoding the answer alone would lose it."""
    tokenizer = TOKENIZERS["sentencepiece"]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("Paris").ids)
    detokenizer.append(tokenizer.token_to_id("▁he"), is_stop_token=False)
    assert detokenizer.visible_text == " he"


def test_first_space_is_kept_after_many_skipped_special_tokens() -> None:
    """O-30: the tail of the prompt that is decoded with the answer must contain text."""
    tokenizer = TOKENIZERS["sentencepiece"]
    prompt_ids = tokenizer.encode("hello").ids + [tokenizer.token_to_id(EOS)] * 50
    texts = visible_texts(Detokenizer(tokenizer, prompt_ids), tokenizer.encode("Paris").ids)
    assert texts[-1] == " Paris"


def test_text_is_visible_at_once_when_no_character_is_open() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("the quick brown fox " * 50).ids
    texts = visible_texts(Detokenizer(tokenizer, []), token_ids)
    assert texts[:-1] == [tokenizer.decode(token_ids[: n + 1]) for n in range(len(token_ids))]


def test_incomplete_character_is_held_back_until_the_end(tokenizer: Decoder) -> None:
    """O-30: an answer that ends within a character ends with U+FFFD, as decode() has it."""
    alphabet = byte_ids(tokenizer)
    texts = visible_texts(Detokenizer(tokenizer, []), [alphabet[0x41], alphabet[0xF0]])
    assert REPLACEMENT not in texts[1]
    assert texts[-1] == tokenizer.decode([alphabet[0x41], alphabet[0xF0]])


def test_byte_fallback_text_that_a_later_byte_spoils_is_not_shown_early() -> None:
    """O-30: "é" of two byte tokens becomes three U+FFFD when an invalid byte follows."""
    tokenizer = TOKENIZERS["sentencepiece"]
    alphabet = byte_ids(tokenizer)
    token_ids = [alphabet[byte] for byte in (0xC3, 0xA9, 0x80)]
    texts = visible_texts(Detokenizer(tokenizer, []), token_ids)
    assert texts == ["", "", "", REPLACEMENT * 3]


def test_character_begun_by_the_prompt_is_completed(tokenizer: Decoder) -> None:
    """O-30: what the prompt shows as U+FFFD is a character once the answer's bytes are there."""
    alphabet = byte_ids(tokenizer)
    prompt_ids = [alphabet[0x41], alphabet[0xF0], alphabet[0x9F]]
    texts = visible_texts(
        Detokenizer(tokenizer, prompt_ids), [alphabet[0x94], alphabet[0xA5], alphabet[0x42]]
    )
    assert texts[-1].endswith("🔥B")
    assert REPLACEMENT not in texts[-1]


def test_invalid_bytes_begun_by_the_prompt_are_not_repeated(tokenizer: Decoder) -> None:
    """O-30: a long run of bytes, whose beginning belongs to the prompt, is closed at last."""
    alphabet = byte_ids(tokenizer)
    prompt_ids = [alphabet[byte] for byte in b"a" + b"\x80" * 20]
    answer_ids = [alphabet[byte] for byte in b"\x80" * 100] + [tokenizer.token_to_id(TAG)]
    texts = visible_texts(Detokenizer(tokenizer, prompt_ids), answer_ids)
    assert texts[-1] == REPLACEMENT * 100 + TAG


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("text", ["a<tag>b</tag>1</s>2", "<tag>a", "a</tag>", "</s>a</s>"])
def test_added_tokens(tokenizer: Decoder, text: str, skip_special_tokens: bool) -> None:
    """O-31: no spaces around added tokens; only special ones are skipped, and only on demand."""
    prompt_ids = tokenizer.encode("hello").ids
    answer_ids = tokenizer.encode(text).ids
    texts = visible_texts(
        Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens), answer_ids
    )
    decoded = tokenizer.decode(prompt_ids + answer_ids, skip_special_tokens=skip_special_tokens)
    assert texts[-1] == decoded.removeprefix("hello")
    assert texts[-1].count(TAG) == text.count(TAG)
    assert texts[-1].count(EOS) == (0 if skip_special_tokens else text.count(EOS))


@pytest.mark.parametrize("open_tokens", ["special", "bytes"])
def test_work_per_token_does_not_grow(tokenizer: Decoder, open_tokens: str) -> None:
    """Ordinary text, then a run that shows nothing: the number of tokens decoded is linear."""
    run = tokenizer.token_to_id(EOS) if open_tokens == "special" else byte_ids(tokenizer)[0x80]
    words = tokenizer.encode("the hello world " * 200).ids
    counting = CountingTokenizer(tokenizer)
    detokenizer = Detokenizer(counting, words)
    for token_id in [*words, *[run] * 4000, *words]:
        counting.num_decoded, before = 0, counting.num_decoded
        detokenizer.append(token_id, is_stop_token=False)
        counting.num_decoded += before
    assert counting.num_decoded < 300 * (2 * len(words) + 4000)
    detokenizer.finish()
    assert detokenizer.visible_text.endswith(tokenizer.decode(words))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("content", ["é", "🔥", "\x80"])
def test_long_prompts_of_byte_tokens_cost_no_more(name: str, content: str) -> None:
    """O-57: however long; and the answer goes on where the prompt ends."""
    tokenizer = TOKENIZERS[name]
    alphabet = byte_ids(tokenizer)
    encoded = b"\x80" if content == "\x80" else content.encode()
    counting = CountingTokenizer(tokenizer)
    find_byte_token(counting)
    for num_more in range(3):
        prompt_ids = [alphabet[byte] for byte in (b"a" * num_more + encoded * 20_000)]
        counting.num_decoded = 0
        detokenizer = Detokenizer(counting, prompt_ids)
        assert counting.num_decoded < 4000
        answer_ids = [*(alphabet[byte] for byte in encoded), tokenizer.token_to_id(TAG)]
        texts = visible_texts(detokenizer, answer_ids)
        assert texts[-1] == encoded.decode(errors="replace") + TAG


def test_tokenizer_without_byte_tokens() -> None:
    class Letters:
        special_tokens: dict[int, str] = {}

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return "".join("abc"[token_id] for token_id in token_ids)

    letters = Letters()
    assert find_byte_token(letters) is None
    assert visible_texts(Detokenizer(letters, [0]), [1, 2]) == ["b", "bc", "bc"]


def byte_ids(tokenizer: Decoder) -> dict[int, int]:
    """Byte -> token that stands for it."""
    vocabulary = tokenizer.get_vocab()
    if "<0x00>" in vocabulary:
        return {byte: vocabulary[f"<0x{byte:02X}>"] for byte in range(256)}
    # ByteLevel gives bytes that are no printable letters the code points from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {byte: vocabulary[letter] for byte, letter in letters.items()}


def token_lists(tokenizer: Decoder) -> st.SearchStrategy[list[int]]:
    """Any tokens; and sequences that are rich in characters of several tokens."""
    alphabet = byte_ids(tokenizer)
    some_bytes = [alphabet[byte] for byte in "A\n🔥é".encode()]
    spaces = tokenizer.encode("  a b").ids
    added = [tokenizer.token_to_id(name) for name in (EOS, TAG)]
    return st.lists(st.sampled_from(some_bytes + spaces + added), max_size=100) | st.lists(
        st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_any_tokens(name: str, data: st.DataObject, skip_special_tokens: bool) -> None:
    """O-30, O-31: only grows; joined, it is what decoding prompt and answer at once gives."""
    tokenizer = TOKENIZERS[name]
    prompt_ids = data.draw(token_lists(tokenizer))
    answer_ids = data.draw(token_lists(tokenizer))
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
    texts = visible_texts(detokenizer, answer_ids)
    assert_only_grows(texts)
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skip_special_tokens)
    both = tokenizer.decode(prompt_ids + answer_ids, skip_special_tokens=skip_special_tokens)
    if both.startswith(before):
        assert before + texts[-1] == both
    else:  # the answer completes a character that the prompt began
        assert both.endswith(texts[-1])
