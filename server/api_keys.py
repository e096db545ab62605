"""API keys that clients must send. No error, log or repr shows them."""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jpaged.errors import ConfigError

API_KEY_VARIABLE = "JPAGED_API_KEY"


class Secret:
    """A text that its repr does not show, and hence that of no object which holds it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


class ApiKeys:
    """The accepted keys, stored as digests. It is false if there are none."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        # Digests have one length, so that comparing tells nothing about the lengths of keys.
        self._digests = tuple({_digest(key.encode()): None for key in keys})

    def __len__(self) -> int:
        return len(self._digests)

    def accepts(self, shown: bytes) -> bool:
        """Whether this is one of the keys. The time taken does not depend on where it differs."""
        digest = _digest(shown)
        return any([hmac.compare_digest(digest, each) for each in self._digests])


def read_api_keys(
    options: Sequence[Secret], file: str | None, environment: Mapping[str, str] = os.environ
) -> ApiKeys:
    """Read the keys of all sources.

    options: values of --api-key.
    file: path of a file with one key a line.
    environment: its JPAGED_API_KEY is one key.

    Raises `ConfigError` that names the source but not the key.
    """
    found = [("api_key", secret.reveal()) for secret in options]
    if file is not None:
        found += [(f"api_key_file {file}", key) for key in _keys_of_file(file)]
    if API_KEY_VARIABLE in environment:
        found.append((API_KEY_VARIABLE, environment[API_KEY_VARIABLE]))
    for source, key in found:
        _check(source, key)
    return ApiKeys(key for _, key in found)


def _keys_of_file(file: str) -> list[str]:
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ConfigError(f"api_key_file {file} cannot be read: {reason}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file {file} has no keys; write one a line")
    return keys


def _check(source: str, key: str) -> None:
    """Refuse keys that no header can have, and the empty one, which everybody could send."""
    if not key or not all("!" <= character <= "~" for character in key):
        raise ConfigError(
            f"{source} must be one or more visible ASCII characters without spaces, got "
            f"{len(key)} characters; leave it out to serve without a key"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
