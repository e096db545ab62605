"""The routes. What surrounds them (start, signals, shutdown) is in `run.py`."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from jpaged.async_engine import AsyncEngine
from jpaged.inputs import Params, Prompt
from jpaged.server.access import (
    CloseWhileDraining,
    RefuseOtherSites,
    RequireApiKey,
    ServeUnderPrefix,
)
from jpaged.server.answers import AnswerFormat, ChatFormat, CompletionFormat
from jpaged.server.api_keys import ApiKeys
from jpaged.server.body import read_request
from jpaged.server.body_limits import LimitBodies
from jpaged.server.convert import (
    chat_messages,
    chat_params,
    check_model,
    check_num_answers,
    completion_params,
    completion_prompts,
    includes_usage,
    salted,
)
from jpaged.server.echo import echo_of
from jpaged.server.errors import ModelNotFoundError, UnavailableError, add_error_handlers
from jpaged.server.json_response import JsonResponse
from jpaged.server.logprob_limit import check_num_logprobs
from jpaged.server.options import ServerOptions
from jpaged.server.protocol import ChatCompletionRequest, CompletionRequest, ModelCard, ModelList
from jpaged.server.request_queue import RequestQueue
from jpaged.server.request_threads import RequestThreads
from jpaged.server.streaming import EventStream, collect, events, generate, unless_disconnected
from jpaged.text.length_limit import num_characters
from jpaged.version import version

STARTING = "the server is starting: it loads the model or compiles programs"

router = APIRouter()


def create_app(
    engine: AsyncEngine,
    options: ServerOptions = ServerOptions(),  # noqa: B008  (it is frozen)
    api_keys: ApiKeys = ApiKeys(),  # noqa: B008
) -> FastAPI:
    """Return the API of an engine. While that still starts, all routes but /version answer 503."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.engine = engine
    app.state.created = int(time.time())
    app.state.is_draining = False
    app.state.threads = RequestThreads()
    app.state.queue = RequestQueue(options.max_queued_requests)
    app.include_router(router)
    add_error_handlers(app)
    _add_middleware(app, options, api_keys)
    return app


def _add_middleware(app: FastAPI, options: ServerOptions, api_keys: ApiKeys) -> None:
    """Add the middleware, from the innermost to the outermost."""
    app.add_middleware(
        LimitBodies, max_bytes=options.max_body_bytes_in_flight, timeout=options.body_timeout
    )
    if api_keys:
        app.add_middleware(RequireApiKey, keys=api_keys)
    if options.allowed_origins:
        # Outside of the keys: browsers ask first without one, and pages may read refusals.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(RefuseOtherSites, allowed=options.allowed_origins)
    app.add_middleware(CloseWhileDraining)
    if options.root_path:
        app.add_middleware(ServeUnderPrefix, prefix=options.root_path)


# Probes of load balancers use any of these.
@router.api_route("/health", methods=["GET", "HEAD"])
@router.api_route("/ping", methods=["GET", "HEAD", "POST"])
async def health(request: Request) -> Response:
    _serving_engine(request)
    return JsonResponse({"status": "ok"})


@router.api_route("/version", methods=["GET", "HEAD"])
async def show_version() -> Response:
    return JsonResponse({"version": version()})


@router.api_route("/metrics", methods=["GET", "HEAD"])
async def metrics(request: Request) -> Response:
    """Served while draining and after a failure too: that is when they are looked at."""
    engine: AsyncEngine = request.app.state.engine
    if not engine.is_ready:
        raise UnavailableError(STARTING)
    content, content_type = engine.metrics.render()
    return Response(content, headers={"Content-Type": content_type})


@router.api_route("/v1/models", methods=["GET", "HEAD"])
async def models(request: Request) -> Response:
    listed: ModelList = {"object": "list", "data": [_model_card(request)]}
    return JsonResponse(listed)


@router.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
async def model(request: Request, name: str) -> Response:
    card = _model_card(request)
    if name != card["id"]:
        raise ModelNotFoundError(f"model {name!r:.200} is not served here; use {card['id']!r}")
    return JsonResponse(card)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    request.state.arrival_time = time.monotonic()
    engine = _serving_engine(request)
    request.app.state.queue.check_room()
    body = await read_request(request, CompletionRequest)
    check_model(body, engine.model_name)
    answer_format = CompletionFormat(
        model=engine.model_name,
        num_answers=body.n,
        includes_usage=includes_usage(body),
        returns_token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        tokenizer=engine.tokenizer,
        skip_special_tokens=body.skip_special_tokens,
        echo=echo_of(body, engine.tokenizer),
    )
    params = completion_params(
        body, engine.sampling_defaults, has_text=engine.tokenizer is not None
    )
    prompts = [salted(prompt, body.cache_salt) for prompt in completion_prompts(body)]
    check_num_answers(prompts, params)
    return await _answer(request, body, prompts, params, answer_format)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    request.state.arrival_time = time.monotonic()
    engine = _serving_engine(request)
    request.app.state.queue.check_room()
    body = await read_request(request, ChatCompletionRequest)
    check_model(body, engine.model_name)
    answer_format = ChatFormat(
        model=engine.model_name,
        num_answers=body.n,
        includes_usage=includes_usage(body),
        returns_token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        tokenizer=engine.tokenizer,
    )
    params = chat_params(body, engine.sampling_defaults, has_text=engine.tokenizer is not None)
    messages = chat_messages(body)
    prompt = await request.app.state.threads.run(
        num_characters(messages),
        partial(engine.chat_prompt, messages, add_generation_prompt=body.add_generation_prompt),
    )
    prompts = [salted(prompt, body.cache_salt)]
    return await _answer(request, body, prompts, params, answer_format)


async def _answer(
    request: Request,
    body: CompletionRequest | ChatCompletionRequest,
    prompts: Sequence[Prompt],
    params: Params,
    answer_format: AnswerFormat,
) -> Response:
    """Answer a request. Generates nothing before all prompts were checked."""
    engine = _serving_engine(request)
    queue: RequestQueue = request.app.state.queue
    with queue.waiting(len(prompts)):
        requests = [
            await engine.prepare(
                prompt,
                params,
                request_id=f"{answer_format.id}-{index}",
                arrival_time=request.state.arrival_time,
            )
            for index, prompt in enumerate(prompts)
        ]
    check_num_logprobs(body, [each.num_prompt_tokens for each in requests], params)
    outputs = generate(engine, requests, skip_middle=not body.stream)
    outputs = queue.until_first(outputs, len(requests))
    if body.stream:
        return EventStream(events(outputs, answer_format))
    finals = await unless_disconnected(request.receive, collect(outputs))
    if params.logprobs is None and not answer_format.shows_prompt:
        return JsonResponse(answer_format.answer(finals))
    # In a thread, as log-probabilities of long texts are megabytes.
    return await asyncio.to_thread(lambda: JsonResponse(answer_format.answer(finals)))


def _model_card(request: Request) -> ModelCard:
    engine = _serving_engine(request)
    return {
        "id": engine.model_name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "jpaged",
        "max_model_len": engine.max_model_len,
    }


def _serving_engine(request: Request) -> AsyncEngine:
    """The engine, if it takes requests. Raises `UnavailableError` or `EngineDeadError`."""
    engine: AsyncEngine = request.app.state.engine
    engine.check_health()
    if request.app.state.is_draining:
        raise UnavailableError("the server is shutting down")
    if not engine.is_ready:
        raise UnavailableError(STARTING)
    return engine
