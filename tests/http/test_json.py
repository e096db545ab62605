"""All that the server sends is JSON that any parser reads, in UTF-8."""

import json
import math
from typing import Any, NoReturn

import pytest

from jpaged.outputs import TokenLogprobs
from jpaged.server.json_response import json_bytes
from tests.http.conftest import RunningServer

COMPLETIONS = "/v1/completions"


def refuse_constant(name: str) -> NoReturn:
    pytest.fail(f"{name} is no JSON")


def test_numbers_that_json_has_not_become_null() -> None:
    value = {"a": [math.nan, math.inf, -math.inf, 0.5], "b": "é漢🔥"}
    assert json_bytes(value) == '{"a":[null,null,null,0.5],"b":"é漢🔥"}'.encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_answers(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, logprob: float, stream: bool
) -> None:
    """O-24: whatever the device reports; text is not escaped, which would make it twice as long."""
    entry = TokenLogprobs(logprob=logprob, top=((5, logprob),))
    monkeypatch.setattr(server.engine, "_logprobs", lambda *_: entry)
    body: dict[str, Any] = {"prompt": "é漢", "logprobs": 1, "echo": True, "stream": stream}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200
    for line in response.text.removesuffix("data: [DONE]\n\n").strip().split("\n\n"):
        json.loads(line.removeprefix("data: "), parse_constant=refuse_constant)
    assert '"text":"é漢' in response.content.decode()


def test_errors(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "a", "model": "é漢"})
    assert response.status_code == 404
    assert "é漢" in response.content.decode()
