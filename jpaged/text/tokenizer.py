"""Text to token ids and back, and chats to prompts."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jpaged.errors import CheckpointError, RequestError
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.models.formats.gguf_tokenizer import chat_templates, gguf_tokenizer, special_token
from jpaged.text.chat_roles import with_known_roles

# transformers says on import that it found no PyTorch, which nothing here needs.
_transformers_logger = logging.getLogger("transformers")
_transformers_logger.addFilter(lambda record: "PyTorch was not found" not in record.msg)

from transformers import PreTrainedTokenizerFast  # noqa: E402

from jpaged.text.chat_template import (  # noqa: E402
    check_stored_templates,
    template_location,
    use_default_template,
)

PIPELINE_FILE = "tokenizer.json"
TOKENIZER_FILES = (PIPELINE_FILE, "tokenizer.model", "vocab.json")


class Tokenizer:
    """A Hugging Face tokenizer, with the ways of using it that an engine needs.

    May be used by several threads at once.

    location: the file of its chat template, for messages.
    Raises `CheckpointError` when that is no valid template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, location: str = "the tokenizer"
    ) -> None:
        self._other_templates = use_default_template(tokenizer, location)
        # Some tokenizers are saved with limits for training. They would be taken off at the first
        # use, but then perhaps by two threads at once, which the library does not allow.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        # A token covers at most that many characters of a text.
        self.longest_token_length = max(map(len, tokenizer.get_vocab()))
        self.bos_token_id = _token_id(tokenizer.bos_token_id)
        self.eos_token_id = _token_id(tokenizer.eos_token_id)
        self.special_tokens = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.special_token_ids = frozenset(self.special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder in Hugging Face format.

        Where there is a tokenizer.json, it alone says how text is split: the class that a config
        names may stand for another pipeline, which transformers' AutoTokenizer builds then.
        Raises `CheckpointError` when the folder has no tokenizer, or none that is supported.
        """
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise CheckpointError(
                f"{folder} has no tokenizer ({' or '.join(TOKENIZER_FILES)}); with "
                "skip_tokenizer_init, prompts and answers are token ids only"
            )
        check_stored_templates(folder)
        if (folder / PIPELINE_FILE).is_file():
            loader = PreTrainedTokenizerFast
        else:
            # Seldom needed, and a second slower to import where PyTorch is installed.
            from transformers import AutoTokenizer as loader
        try:
            tokenizer = loader.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # The library raises what its parsers do, even plain Exception.
            raise CheckpointError(f"cannot load the tokenizer of {folder}: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise CheckpointError(
                f"the tokenizer of {folder} is a {type(tokenizer).__name__}, which has no "
                "tokenizer.json; save it again as a fast tokenizer"
            )
        return cls(tokenizer, location=template_location(folder))

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        tokens = {f"{name}_token": special_token(file, role) for name, role in roles.items()}
        return cls(
            PreTrainedTokenizerFast(
                tokenizer_object=gguf_tokenizer(file),
                chat_template=chat_templates(file),
                **tokens,
            ),
            location=file.path.name,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether plain chats can be put in a template."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """add_special_tokens: put those around the text that the model expects, such as BOS."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Ids beyond the vocabulary, which a padded model may sample, are left out."""
        # Past transformers, which would decode the same and costs a few times as much.
        return self._tokenizer.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )

    def piece(self, token_id: int) -> str | None:
        """The token's name in the vocabulary, in its own alphabet; None beyond the vocabulary."""
        return self._tokenizer.backend_tokenizer.id_to_token(token_id)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat. The template writes all special tokens, so none are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Text of a chat, by the model's template in transformers' sandbox.

        Raises `RequestError` with the template's own message when it does not take the messages.
        """
        if not self.has_chat_template:
            others = ", ".join(self._other_templates)
            kind = f"plain chats, only for {others}" if others else "chats"
            raise RequestError(
                f"the model has no chat template for {kind}, so it takes no messages; send a "
                "prompt to the completions endpoint instead",
                param="messages",
            )
        _check_messages(messages)
        try:
            template = self._tokenizer.get_chat_template()
            text = self._tokenizer.apply_chat_template(
                with_known_roles(messages, template),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # A template is a program: it can fail in any way.
            raise RequestError(
                f"the model's chat template does not take these messages: {error}",
                param="messages",
            ) from error
        assert isinstance(text, str)
        return text


def _token_id(token_id: object) -> int | None:
    assert token_id is None or isinstance(token_id, int)
    return token_id


def _check_messages(messages: object) -> None:
    """Refuse what no template takes; each template checks the rest itself."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f"messages must be a list with at least one message, got {messages!r:.80}",
            param="messages",
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] must be an object with a role, got {message!r:.80}",
                param="messages",
            )
