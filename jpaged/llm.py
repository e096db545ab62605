"""Offline batches: prompts in, finished answers out."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

from jpaged.beam_search_params import BeamSearchParams
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.generation import Generation
from jpaged.inline_engine import InlineEngine
from jpaged.inputs import Params, Prompt, chat_prompt
from jpaged.interrupts import held_interrupts
from jpaged.outputs import RequestOutput
from jpaged.progress import progress_bar
from jpaged.sampling_params import SamplingParams
from jpaged.startup.load_engine import load_engine

Conversation = Sequence[dict[str, Any]]


class LLM:
    """A model and an engine for it. Options are those of `EngineConfig`.

    >>> llm = LLM("smollm2-135m-instruct", max_model_len=1024)
    >>> outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = engine_config(model, options)
        loaded = load_engine(self.config)
        self.engine = InlineEngine(loaded.engine, loaded.inputs)
        self.tokenizer = loaded.tokenizer
        self.max_model_len = loaded.max_model_len
        self._sampling_defaults = loaded.sampling_defaults
        self._request_ids = count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of `generate` and `chat` unless others are given: the model's recommendation.

        See the option `generation_config`.
        """
        return SamplingParams(**self._sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts.

        A prompt is a text or {"prompt_token_ids": [...]}. sampling_params: one for all prompts, or
        one for each; by default `get_default_sampling_params()`.
        Raises `RequestError` before anything is computed if one of them is refused.
        """
        prompts = _listed(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(
                "sampling_params must be one for all prompts or one for each: got "
                f"{len(sampling_params)} for {len(prompts)} prompts",
                param="sampling_params",
            )
        return self._answer(list(zip(prompts, sampling_params, strict=True)), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to each of several, put in the model's chat template."""
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = cast(Sequence[Conversation], [messages] if is_one else messages)
        prompts = [
            chat_prompt(self.tokenizer, list(each), max_model_len=self.max_model_len)
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The best answers to each prompt, best first, as `BeamSearchParams` says."""
        return self._answer([(prompt, params) for prompt in _listed(prompts)], use_tqdm=use_tqdm)

    def _answer(
        self, works: Sequence[tuple[Prompt, Params]], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        generations = [
            self.engine.make_request(str(next(self._request_ids)), prompt, params)
            for prompt, params in works
        ]
        with held_interrupts() as handle_interrupt:
            try:
                self._run(generations, handle_interrupt, use_tqdm=use_tqdm)
            except BaseException:
                # Leave nothing behind that a later call would run.
                for generation in generations:
                    self.engine.abort(generation)
                raise
        return [generation.output() for generation in generations]

    def _run(
        self,
        generations: Sequence[Generation],
        handle_interrupt: Callable[[], None],
        *,
        use_tqdm: bool,
    ) -> None:
        for generation in generations:
            self.engine.add_request(generation)
        with progress_bar(
            len(generations), "generating", unit=" requests", shown=use_tqdm
        ) as advance:
            while self.engine.has_unfinished:
                advance(sum(generation.is_finished for generation in self.engine.step()))
                handle_interrupt()


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    return [prompts] if isinstance(prompts, str | dict) else prompts


def engine_config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    """Unknown options are refused by name."""
    known = EngineConfig.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; options are: {', '.join(known)}")
    return EngineConfig(**options) if model is None else EngineConfig(model=model, **options)
