"""Where an answer is cut, and what is held back meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.text.detokenizer import Detokenizer
from jpaged.text.stop_strings import find_stop_string, longest_stop_prefix
from tests.doubles import (
    BOS,
    EOS,
    Decoder,
    byte_level_tokenizer,
    byte_tokenizer,
    sentencepiece_tokenizer,
)

pytestmark = pytest.mark.smoke

BYTES = Decoder(byte_tokenizer())
WORDS = Decoder(byte_level_tokenizer())
SENTENCEPIECE = Decoder(sentencepiece_tokenizer())
TOKENIZERS = {"bytes": BYTES, "byte-level": WORDS, "sentencepiece": SENTENCEPIECE}


def feed(detokenizer: Detokenizer, token_ids: list[int]) -> tuple[list[str], str | None]:
    """The visible text after each token taken and after the end, and the stop string."""
    texts, stop_string = [], None
    for token_id in token_ids:
        if stop_string is None:
            stop_string = detokenizer.append(token_id, is_stop_token=False)
            texts.append(detokenizer.visible_text)
    detokenizer.finish()
    return [*texts, detokenizer.visible_text], stop_string


def feed_letters(
    text: str, stops: list[str], *, include: bool = False
) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(BYTES, [], stop_strings=stops, include_stop_str_in_output=include)
    return feed(detokenizer, BYTES.encode(text).ids)


def test_beginning_of_a_stop_string_is_held_back() -> None:
    """O-27: letter by letter, nothing of the stop string is ever visible."""
    texts, stop_string = feed_letters("ABCDEFGHIJ", ["DEFGHIJ", "B" * 40])
    assert stop_string == "DEFGHIJ"
    assert texts == ["A", "A", "ABC", *["ABC"] * 8]


def test_near_miss_comes_after_all() -> None:
    """O-27: what was held back for DEFG is let through when an X comes."""
    texts, stop_string = feed_letters("ABCDEFX", ["DEFG"])
    assert stop_string is None
    assert texts == ["A", "AB", "ABC", "ABC", "ABC", "ABC", "ABCDEFX", "ABCDEFX"]


def test_held_back_text_comes_at_the_end() -> None:
    """O-27: the answer ends while a match is still possible."""
    texts, stop_string = feed_letters("ABCDEF", ["DEFG"])
    assert stop_string is None
    assert texts[-2:] == ["ABC", "ABCDEF"]


def test_long_stop_string() -> None:
    """O-27: 40 characters."""
    stop = "0123456789" * 4
    texts, stop_string = feed_letters(f"ab{stop}cd", [stop])
    assert (texts[-1], stop_string) == ("ab", stop)


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_inside_a_token(include: bool) -> None:
    """O-28: "Pari" where the model says " Paris"."""
    token_ids = WORDS.encode("the Paris is").ids
    detokenizer = Detokenizer(WORDS, [], stop_strings=["Pari"], include_stop_str_in_output=include)
    texts, stop_string = feed(detokenizer, token_ids)
    assert stop_string == "Pari"
    assert texts[-1] == ("the Pari" if include else "the ")


def test_earliest_stop_string_wins() -> None:
    """O-28: both are completed by one token; the one that begins first in the text counts."""
    detokenizer = Detokenizer(WORDS, [], stop_strings=["is", "Par"])
    assert detokenizer.append(WORDS.token_to_id("ĠParis"), is_stop_token=False) == "Par"
    assert detokenizer.visible_text == " "


def test_prompt_never_triggers() -> None:
    """O-28: neither a stop string in the prompt, nor one across the border."""
    detokenizer = Detokenizer(BYTES, BYTES.encode("xSTOP ST").ids, stop_strings=["STOP"])
    texts, stop_string = feed(detokenizer, BYTES.encode("OP").ids)
    assert (texts[-1], stop_string) == ("OP", None)


def test_earliest_beginning_then_shortest() -> None:
    assert find_stop_string("xabcd", ["b", "abc", "d"]) == ("abc", 1, 4)
    assert find_stop_string("xab", ["abc", "ab", "a"]) == ("a", 1, 2)
    assert find_stop_string("xyz", ["abc"]) is None


def test_longest_stop_prefix() -> None:
    assert longest_stop_prefix("xaab", ["aabc", "b"]) == 3
    assert longest_stop_prefix("xab", ["cd"]) == 0
    assert longest_stop_prefix("abcd", ["abcd"]) == 0  # all of it is a match, not a prefix


def test_newline_of_a_byte_token_stops_at_once() -> None:
    """O-28: text of byte tokens is certain one token later only, but stops without delay."""
    tokenizer = TOKENIZERS["sentencepiece"]
    newline = tokenizer.token_to_id("<0x0A>")
    detokenizer = Detokenizer(tokenizer, [], stop_strings=["\n\n"])
    assert detokenizer.append(newline, is_stop_token=False) is None
    assert detokenizer.append(newline, is_stop_token=False) == "\n\n"
    assert detokenizer.visible_text == ""


def test_incomplete_character_is_no_match_for_the_replacement_character() -> None:
    """O-28: U+FFFD as a stop string matches only where the text has it for good."""
    first_byte, *other_bytes = BYTES.encode("🔥").ids
    letter = BYTES.token_to_id("x")
    detokenizer = Detokenizer(BYTES, [], stop_strings=["\ufffd"])
    texts, stop_string = feed(detokenizer, [first_byte, *other_bytes, letter, first_byte])
    assert (texts[-1], stop_string) == ("🔥x", None)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop_token", [EOS, "w"])
def test_stop_token_cuts_no_text(skip_special_tokens: bool, include: bool, stop_token: str) -> None:
    """O-29: its own text comes only with include_stop_str_in_output, if it has any."""
    stop_token_id = BYTES.token_to_id(stop_token)
    detokenizer = Detokenizer(
        BYTES,
        [],
        skip_special_tokens=skip_special_tokens,
        stop_strings=["hello world w"],
        include_stop_str_in_output=include,
    )
    for token_id in BYTES.encode("hello world").ids:
        assert detokenizer.append(token_id, is_stop_token=False) is None
    assert detokenizer.append(stop_token_id, is_stop_token=True) is None
    detokenizer.finish()
    has_text = include and not (skip_special_tokens and stop_token == EOS)
    assert detokenizer.visible_text == "hello world" + (stop_token if has_text else "")


def test_stop_string_and_stop_token_in_one_step() -> None:
    """O-29: a stop token that is not part of the text completes no stop string."""
    for include, expected in ((False, None), (True, "x!")):
        detokenizer = Detokenizer(
            BYTES, [], stop_strings=["x!"], include_stop_str_in_output=include
        )
        detokenizer.append(BYTES.token_to_id("x"), is_stop_token=False)
        last = detokenizer.append(BYTES.token_to_id("!"), is_stop_token=True)
        detokenizer.finish()
        assert last == expected
        assert detokenizer.visible_text == ("x!" if include else "x")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), include=st.booleans())
def test_any_tokens_and_stop_strings(name: str, data: st.DataObject, include: bool) -> None:
    """O-27, O-28: as if str.find searched the whole text after each token."""
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.sampled_from(_token_ids(name)), max_size=80))
    stops = data.draw(st.lists(st.text("ab \né", min_size=1, max_size=4), min_size=1, max_size=3))
    prompt_ids = tokenizer.encode("ab").ids
    detokenizer = Detokenizer(
        tokenizer, prompt_ids, stop_strings=stops, include_stop_str_in_output=include
    )
    texts, stop_string = feed(detokenizer, token_ids)

    expected_text, expected_stop, expected_taken = "", None, len(token_ids)
    for count in range(1, len(token_ids) + 1):
        expected_text = tokenizer.decode(prompt_ids + token_ids[:count]).removeprefix("ab")
        found = [(expected_text.find(stop), len(stop), stop) for stop in stops]
        found = [match for match in found if match[0] >= 0]
        if found:
            start, length, expected_stop = min(found)
            expected_text = expected_text[: start + length if include else start]
            expected_taken = count
            break
    assert (texts[-1], stop_string) == (expected_text, expected_stop)
    assert len(texts) - 1 == expected_taken
    assert all(texts[-1].startswith(text) for text in texts)


def _token_ids(name: str) -> list[int]:
    """Tokens of few letters, so that matches and near misses are frequent."""
    return sorted(set(TOKENIZERS[name].encode("ab a b\n é abab\n\n🔥").ids))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "before"),
    [
        (EOS, "a"),
        (f"a{EOS}b", ""),
        (f"{EOS}b", "a"),
        (f"{EOS}b{BOS}", "a"),
        (f"b{BOS}{EOS}a", f"a{EOS}"),
    ],
)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_special_tokens_in_stop_strings(
    name: str, stop: str, before: str, include: bool, skip_special_tokens: bool
) -> None:
    """O-73: they match where the text leaves them out too, also across text and tokens."""
    tokenizer = TOKENIZERS[name]
    pieces = ["a", EOS, "b", BOS, EOS, "a", "b"]
    detokenizer = Detokenizer(
        tokenizer,
        tokenizer.encode("ab").ids,
        skip_special_tokens=skip_special_tokens,
        stop_strings=["xyz", stop],
        include_stop_str_in_output=include,
    )
    texts, stop_string = feed(detokenizer, [tokenizer.token_to_id(piece) for piece in pieces])
    assert stop_string == stop
    if skip_special_tokens:
        before = before.replace(EOS, "")
    assert texts[-1] == before + (stop if include else "")
    assert all(texts[-1].startswith(text) for text in texts)


def test_parts_of_hidden_tokens_stop_nothing() -> None:
    """O-73: what is only a piece of a token that nobody sees."""
    detokenizer = Detokenizer(BYTES, [], stop_strings=["<", "s>", "/"])
    texts, stop_string = feed(detokenizer, BYTES.encode(f"a{EOS}b{BOS}c").ids)
    assert (texts[-1], stop_string) == ("abc", None)


def test_hidden_token_after_an_open_character() -> None:
    """O-73: and after many tokens without text, when not each of them is decoded."""
    first_byte, *_ = BYTES.encode("🔥").ids
    eos, bos = (BYTES.token_to_id(name) for name in (EOS, BOS))
    for run in ([first_byte], [first_byte] * 9, [bos] * 500):
        detokenizer = Detokenizer(BYTES, [], stop_strings=[f"{EOS}!"])
        letters = [BYTES.token_to_id(letter) for letter in "x!"]
        texts, stop_string = feed(detokenizer, [letters[0], *run, eos, letters[1], letters[0]])
        assert stop_string == f"{EOS}!"
        assert texts[-1].rstrip("\ufffd") == "x"


HIDDEN = [EOS, f"a{EOS}", f"{EOS}b", f"{EOS}{EOS}", f"ab{EOS}a", f"{BOS}{EOS}", f"b{BOS}a"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), include=st.booleans())
def test_any_special_tokens_in_stop_strings(name: str, data: st.DataObject, include: bool) -> None:
    """O-73: as if str.find searched the text with those special tokens in it."""
    tokenizer = TOKENIZERS[name]
    pieces = data.draw(st.lists(st.sampled_from(["a", "b", EOS, BOS]), max_size=12))
    stops = data.draw(st.lists(st.sampled_from([*HIDDEN, "ab", "bb"]), min_size=1, max_size=3))
    detokenizer = Detokenizer(
        tokenizer,
        tokenizer.encode("ab").ids,
        stop_strings=stops,
        include_stop_str_in_output=include,
    )
    texts, stop_string = feed(detokenizer, [tokenizer.token_to_id(piece) for piece in pieces])
    taken, expected_text, expected_stop = expected_stop_of(pieces, stops, include=include)
    assert (texts[-1], stop_string) == (expected_text, expected_stop)
    assert len(texts) - 1 == taken
    assert all(texts[-1].startswith(text) for text in texts)


def expected_stop_of(
    pieces: list[str], stops: list[str], *, include: bool
) -> tuple[int, str, str | None]:
    """Tokens taken, text, and stop string."""
    hidden = {name for name in (BOS, EOS) if any(name in stop for stop in stops)}
    for count in range(1, len(pieces) + 1):
        kept = [piece for piece in pieces[:count] if len(piece) == 1 or piece in hidden]
        # The text with hidden tokens, and where in the text without them each character is.
        whole = "".join(kept)
        is_shown = [len(piece) == 1 for piece in kept for _ in piece]
        shown_at = [index for index, shown in enumerate(is_shown) if shown]
        text = "".join(whole[index] for index in shown_at)
        found = []
        for stop in stops:
            if (start := text.find(stop)) >= 0:
                found.append((shown_at[start], len(stop), stop))
            if any(name in stop for name in hidden) and (start := whole.find(stop)) >= 0:
                found.append((start, len(stop), stop))
        if found:
            start, _, stop = min(found)
            before = text[: sum(is_shown[:start])]
            return count, before + (stop if include else ""), stop
    return len(pieces), "".join(piece for piece in pieces if len(piece) == 1), None
