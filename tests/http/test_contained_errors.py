"""An error that the engine contains: one client gets it, and the next request is served."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from jpaged.async_engine import AsyncEngine
from jpaged.config import EngineConfig
from jpaged.startup.load_engine import LoadedEngine
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import byte_tokenizer, save_tokenizer
from tests.engine.scripted_runner import ScriptedRunner
from tests.engine.test_engine_machine import MAX_MODEL_LEN, make_engine
from tests.http.conftest import RunningServer, running_server
from tests.http.scripted_engine import ScriptedEngine
from tests.http.sse import DONE, parse_events

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [1, 0, 1], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """The real engine and its thread, on a device without a model."""
    save_tokenizer(byte_tokenizer(), tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    runner = ScriptedRunner(num_blocks=60, block_size=4, num_slots=8, max_num_tokens=32)
    engine = make_engine(runner)
    engine.inputs.tokenizer = tokenizer
    loaded = LoadedEngine(
        engine.core, engine.inputs, "scripted", tokenizer, MAX_MODEL_LEN, sampling_defaults={}
    )

    async def load(config: EngineConfig) -> LoadedEngine:
        return loaded

    monkeypatch.setattr("jpaged.async_engine.load_engine_in_thread", load)
    front = AsyncEngine(EngineConfig(model="scripted"))
    asyncio.run(front.start())
    try:
        with running_server(cast(ScriptedEngine, front)) as running:
            yield running
    finally:
        asyncio.run(front.shutdown())


def raise_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their third token, so that a stream has begun."""
    append = Detokenizer.append
    counts: dict[int, int] = {}

    def fail(self: Detokenizer, *args: Any, **options: Any) -> str | None:
        counts[id(self)] = counts.get(id(self), 0) + 1
        if counts[id(self)] == 3:
            raise IndexError("the text of another client")
        return append(self, *args, **options)

    monkeypatch.setattr(Detokenizer, "append", fail)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_one_request(server: RunningServer, stream: bool) -> None:
    """Status 500, or the last event of the stream; the error's own message goes to the log only."""
    expected = server.post(COMPLETIONS, BODY).json()["choices"][0]["text"]
    with pytest.MonkeyPatch.context() as broken:
        raise_in_texts(broken)
        response = server.post(COMPLETIONS, {**BODY, "stream": stream})
    if stream:
        assert response.status_code == 200
        events = parse_events(response.content)
        assert DONE not in events, "it looks like a whole answer"
        error = events[-1]["error"]
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")
    assert error["param"] is None and "another client" not in error["message"]
    answer = server.post(COMPLETIONS, BODY)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == expected
