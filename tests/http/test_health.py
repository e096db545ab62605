"""What the server says about itself while it starts, serves, drains and after a failure."""

from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from jpaged.errors import EngineDeadError
from jpaged.server.errors import ERROR_KINDS, error_body, error_kind
from tests.http.conftest import RunningServer
from tests.http.scripted_engine import MODEL_NAME

COMPLETIONS = "/v1/completions"


def statuses(server: RunningServer) -> dict[str, int]:
    with server.client() as client:
        found = {path: client.get(path).status_code for path in ("/health", "/v1/models")}
        found[COMPLETIONS] = client.post(COMPLETIONS, json={"prompt": "a"}).status_code
        chat = {"messages": [{"role": "user", "content": "a"}]}
        found["chat"] = client.post("/v1/chat/completions", json=chat).status_code
        return found


def test_ready(server: RunningServer) -> None:
    assert set(statuses(server).values()) == {200}
    with server.client() as client:
        assert client.get("/version").json().keys() == {"version"}


def test_starting(server: RunningServer) -> None:
    server.engine.is_ready = False
    assert set(statuses(server).values()) == {503}
    assert server.engine.num_started == 0
    with server.client() as client:
        error = client.get("/health").json()["error"]
        assert "starting" in error["message"]
        assert client.get("/version").status_code == 200


def test_draining(server: RunningServer) -> None:
    server.app.state.is_draining = True
    assert set(statuses(server).values()) == {503}
    with server.client() as client:
        assert "shutting down" in client.get("/health").json()["error"]["message"]
        assert client.get("/metrics").status_code == 200


def test_dead_engine(server: RunningServer) -> None:
    """O-60: health tells, new requests fail at once, metrics can still be read."""
    server.engine.dead = EngineDeadError("the step raised ValueError")
    assert set(statuses(server).values()) == {503}
    with server.client() as client:
        error = client.get("/health").json()["error"]
        assert (error["code"], error["message"]) == ("engine_dead", "the step raised ValueError")
        assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_an_engine_that_dies_answers_running_requests(
    server: RunningServer, openai_client: OpenAI, prompt: Any
) -> None:
    """O-60: not streamed; nothing hangs."""
    server.engine.failure = EngineDeadError("the step raised ValueError")
    response = server.post(COMPLETIONS, {"prompt": prompt})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
    with pytest.raises(InternalServerError, match="the step raised"):
        openai_client.completions.create(model=MODEL_NAME, prompt="a")


def test_unexpected_errors_tell_clients_nothing(server: RunningServer) -> None:
    server.engine.failure = ValueError("a secret")
    response = server.post(COMPLETIONS, {"prompt": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"


def test_every_error_class_has_its_own_kind() -> None:
    """A class that comes after its base in the table would never be reached."""
    for error_class, kind in ERROR_KINDS:
        error = error_class("text")
        assert error_kind(error) is kind, error_class
        body = error_body(error)["error"]
        assert (body["message"], body["type"], body["code"]) == ("text", kind.type, kind.code)
