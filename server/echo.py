"""Prompts in front of their answers: OpenAI's `echo` of completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.errors import RequestError
from jpaged.outputs import TokenLogprobs
from jpaged.server.deltas import GivenPrompt
from jpaged.server.logprobs import TextToken
from jpaged.server.protocol import CompletionRequest
from jpaged.text.token_text import PromptOffsets
from jpaged.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EchoedPrompt:
    """tokens: none unless log-probabilities are wanted."""

    text: str
    tokens: Sequence[TextToken]


@dataclass(frozen=True, kw_only=True)
class Echo:
    """How prompts are shown. num_top: likeliest tokens at each place; None shows no tokens."""

    tokenizer: Tokenizer | None
    skip_special_tokens: bool
    num_top: int | None

    def of(self, prompt: GivenPrompt) -> EchoedPrompt:
        text = self._text(prompt)
        return EchoedPrompt(text, () if self.num_top is None else self._tokens(prompt, text))

    def _text(self, prompt: GivenPrompt) -> str:
        """As it was sent; of token ids, what they read."""
        if prompt.text is not None:
            return prompt.text
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=self.skip_special_tokens)

    def _tokens(self, prompt: GivenPrompt, text: str) -> list[TextToken]:
        assert prompt.logprobs is not None and self.num_top is not None
        offsets = PromptOffsets(self.tokenizer, text)
        tokens = []
        for token_id, entry in zip(prompt.token_ids, prompt.logprobs, strict=True):
            offset = offsets.next(token_id)
            begins_text = offsets.reads_as_first(token_id, offset)
            top = _with_top(entry, self.num_top)
            tokens.append(TextToken(token_id, top, offset, begins_text))
        return tokens


def echo_of(request: CompletionRequest, tokenizer: Tokenizer | None) -> Echo | None:
    if not request.echo:
        return None
    return Echo(
        tokenizer=tokenizer,
        skip_special_tokens=request.skip_special_tokens,
        num_top=request.logprobs,
    )


def needed_prompt_logprobs(request: CompletionRequest) -> int | None:
    """What the engine is asked for, of which an echo and `prompt_logprobs` show their parts.

    Raises `RequestError` for a request that would have no answer.
    """
    wanted = [request.prompt_logprobs]
    if request.echo:
        # The engine generates nothing only if it is asked for these.
        wanted.append(0 if request.max_tokens == 0 else None)
        wanted.append(request.logprobs)
    most = max((number for number in wanted if number is not None), default=None)
    if request.max_tokens == 0 and most is None:
        raise RequestError(
            "max_tokens 0 generates nothing: set echo to true to get the prompt back, or ask for "
            "at least 1 token",
            param="max_tokens",
        )
    return most


def _with_top(entry: TokenLogprobs | None, number: int) -> TokenLogprobs | None:
    """The engine may have been asked for more, for `prompt_logprobs`."""
    return None if entry is None else replace(entry, top=entry.top[:number])
