"""Bytes of single tokens, for those that are only a part of a character."""

import re
from functools import lru_cache

from jpaged.text.detokenizer import REPLACEMENT
from jpaged.text.token_text import CACHED_TEXTS, token_text
from jpaged.text.tokenizer import Tokenizer

# SentencePiece's names of single bytes.
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in vocabularies of byte-level BPE, by GPT-2's rule:
    printable Latin-1 characters stand for themselves, those from U+0100 on for the other bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES_BY_CHARACTER = _byte_level_alphabet()


@lru_cache(maxsize=CACHED_TEXTS)
def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The token's own bytes: those of consecutive tokens, joined, are the UTF-8 of their text.

    A token that reads as whole characters has the bytes of its text. Any other is looked up in
    the vocabulary, which names bytes in one of two ways.
    """
    text = token_text(tokenizer, token_id)
    piece = tokenizer.piece(token_id)
    if REPLACEMENT not in text or piece is None:
        return text.encode()
    byte_piece = _BYTE_PIECE.fullmatch(piece)
    if byte_piece is not None:
        return bytes([int(byte_piece.group(1), 16)])
    if all(character in _BYTES_BY_CHARACTER for character in piece):
        return bytes(_BYTES_BY_CHARACTER[character] for character in piece)
    return text.encode()
