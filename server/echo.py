"""Puts prompts in front of their answers: `echo` of OpenAI's completions."""

from dataclasses import dataclass, field, replace

from jpaged.errors import RequestError
from jpaged.outputs import TokenLogprobs
from jpaged.server.deltas import GivenPrompt
from jpaged.server.logprobs import TextToken, completion_logprobs
from jpaged.server.protocol import CompletionLogprobs, CompletionRequest
from jpaged.text.token_text import PromptOffsets
from jpaged.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EchoedPrompt:
    """Text of a prompt, to put in front of its answers. logprobs: None if none are wanted."""

    text: str
    logprobs: CompletionLogprobs | None


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Makes the echoes of a response's prompts.

    num_top: number of likeliest tokens to report at each prompt token; None reports no
        log-probabilities.
    """

    tokenizer: Tokenizer | None
    skip_special_tokens: bool
    num_top: int | None
    _made: dict[GivenPrompt, EchoedPrompt] = field(default_factory=dict, init=False)

    def of(self, prompt: GivenPrompt) -> EchoedPrompt:
        """Return the echo of a prompt, made once for all its choices.

        The log-probabilities of a long prompt are megabytes.
        """
        if prompt not in self._made:
            text = self._text(prompt)
            logprobs = None
            if self.num_top is not None:
                logprobs = completion_logprobs(self._tokens(prompt, text), self.tokenizer)
            self._made[prompt] = EchoedPrompt(text, logprobs)
        return self._made[prompt]

    def _text(self, prompt: GivenPrompt) -> str:
        """Return the prompt's text as it was sent, or the text of its token ids."""
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
            is_shown = offsets.shows(token_id)
            offset = offsets.next(token_id)
            begins_text = offsets.reads_as_first(token_id, offset)
            top = _with_top(entry, self.num_top)
            tokens.append(TextToken(token_id, top, offset, begins_text, is_shown))
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
    """Return how many likeliest tokens the engine is to report at each prompt token.

    That is the most that the echo or `prompt_logprobs` shows, and None if neither shows any. Raises
    `RequestError` for a request that would have an empty answer.
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
    """Keep the `number` likeliest tokens: `prompt_logprobs` may have asked the engine for more."""
    return None if entry is None else replace(entry, top=entry.top[:number])
