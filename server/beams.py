"""Parameters of beam search in requests: vLLM's `use_beam_search` and its companions."""

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import RequestError
from jpaged.sampling_params import DRAWN_SEED
from jpaged.server.protocol import SamplingRequest

# Fields for beam search only, with the value that has no effect.
BEAM_FIELDS = {"beam_width": None, "length_penalty": 1.0, "early_stopping": False}
# Fields for sampling only, with the values besides null that have no effect.
SAMPLING_FIELDS: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "seed": (DRAWN_SEED,),
    "best_of": (1,),
}


def refuse_beam_fields(request: SamplingRequest) -> None:
    """Refuse parameters of beam search in other requests, where they would have no effect."""
    for name, neutral in BEAM_FIELDS.items():
        if getattr(request, name) != neutral:
            raise RequestError(
                f"{name} is for beam search: set use_beam_search to true or leave it out",
                param=name,
            )


def beam_params(
    request: SamplingRequest,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    has_text: bool,
) -> BeamSearchParams:
    """Convert the request. Without `beam_width`, there are as many beams as answers."""
    for name, neutral in SAMPLING_FIELDS.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise RequestError(
                f"{name} ({value}) has no effect in beam search, which draws nothing at random: "
                "leave it out",
                param=name,
            )
    return BeamSearchParams(
        beam_width=request.n if request.beam_width is None else request.beam_width,
        n=request.n,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        max_tokens=max_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        detokenize=has_text,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
