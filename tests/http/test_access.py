"""Who may use the server: API keys, web pages of other sites, and what probes and browsers ask."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from jpaged.errors import ConfigError
from jpaged.server.api_keys import ApiKeys, Secret, read_api_keys
from jpaged.server.options import ServerOptions
from jpaged.server.run import greeting
from tests.http.conftest import RunningServer, running_server
from tests.http.scripted_engine import MODEL_NAME, ScriptedEngine

SITE = "https://chat.example.com"
COMPLETIONS = "/v1/completions"
PATHS = ["/version", "/metrics", "/v1/models", f"/v1/models/{MODEL_NAME}", COMPLETIONS, "/nothing"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two keys, one allowed site, and a path under which a proxy serves it."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("tokenizer"))
    options = ServerOptions(allowed_origins=(SITE,), root_path="/llm")
    with running_server(engine, options, ApiKeys(["first", "second"])) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("third"),
        bearer("firs"),
        {"Authorization": "Bearer"},
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer f\u00fcr"},
        {"X-Api-Key": "first"},
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_without_a_key(guarded: RunningServer, path: str, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    with guarded.client() as client:
        response = client.request("POST" if path == COMPLETIONS else "GET", path, headers=encoded)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key"
    assert "first" not in response.text and "third" not in response.text


@pytest.mark.parametrize("key", ["first", "second"])
def test_with_a_key(guarded: RunningServer, key: str) -> None:
    with guarded.client() as client:
        statuses = {path: client.get(path, headers=bearer(key)).status_code for path in PATHS}
        assert statuses == dict(zip(PATHS, (200, 200, 200, 200, 405, 404), strict=True))
        body = {"prompt": "a"}
        assert client.post(COMPLETIONS, json=body, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_probes_need_no_key(guarded: RunningServer, prefix: str) -> None:
    """Also when a proxy leaves its prefix in front."""
    with guarded.client() as client:
        for method, path in [("GET", "/health"), ("HEAD", "/ping"), ("POST", "/ping")]:
            assert client.request(method, prefix + path).status_code == 200
        assert client.get(prefix + "/version").status_code == 401
        assert client.get(prefix + "/version", headers=bearer("first")).status_code == 200
        assert client.get("/llm/llm/health").status_code == 401


def test_the_openai_package_raises_its_own_error(guarded: RunningServer) -> None:
    base_url = f"{guarded.url}/v1"
    with OpenAI(base_url=base_url, api_key="wrong", max_retries=0, timeout=10) as client:
        with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
            client.models.list()
        assert client.with_options(api_key="second").models.list().data[0].id == MODEL_NAME


@pytest.mark.parametrize("origin", ["https://evil.example", "null", SITE + ".evil.example"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
def test_pages_of_other_sites_are_refused(
    server: RunningServer, guarded: RunningServer, method: str, origin: str
) -> None:
    """With and without keys, whatever they ask for; nothing of the answer is for them."""
    for each in (server, guarded):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST", **bearer("first")}
        with each.client() as client:
            response = client.request(method, "/v1/models", headers=headers)
        assert response.status_code == 403
        assert not any(name.startswith("access-control") for name in response.headers)
        if method != "HEAD":
            assert "--allowed-origins" in response.json()["error"]["message"]


def test_pages_are_refused_where_they_call_the_server_their_own_site(server: RunningServer) -> None:
    """DNS rebinding: the page's own name leads here, so `Origin` and `Host` agree."""
    with server.client() as client:
        headers = {"Origin": "http://evil.example:8000", "Host": "evil.example:8000"}
        assert client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers).status_code == 403
        # A reverse proxy may send any Host.
        headers = {"Host": "llm.example.com"}
        assert client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers).status_code == 200


def test_pages_of_an_allowed_site(guarded: RunningServer) -> None:
    """Browsers ask first, without a key; a page can read answers and refusals."""
    wanted = "authorization,content-type,x-stainless-os"
    asking = {
        "Origin": SITE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": wanted,
    }
    with guarded.client() as client:
        preflight = client.options(COMPLETIONS, headers=asking)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == SITE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == wanted
        for headers, status in [(bearer("first"), 200), ({}, 401)]:
            headers = {**headers, "Origin": SITE}
            body = {"prompt": "a", "stream": True}
            answer = client.post(COMPLETIONS, json=body, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == SITE
            assert "origin" in answer.headers["vary"].lower()


def test_all_sites_may_be_allowed(tmp_path: Path) -> None:
    options = ServerOptions(allowed_origins=("*",))
    with running_server(ScriptedEngine(tmp_path), options) as server, server.client() as client:
        response = client.get("/v1/models", headers={"Origin": "https://any.example"})
        assert response.headers["access-control-allow-origin"] == "*"


def test_keys_of_all_sources(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n  in-file  \n\nalso-in-file\n")
    environment = {"JPAGED_API_KEY": "in-environment"}
    keys = read_api_keys([Secret("given"), Secret("given")], str(file), environment)
    assert len(keys) == 4
    for key in (b"given", b"in-file", b"also-in-file", b"in-environment"):
        assert keys.accepts(key) and not keys.accepts(key + b"x")
    assert not keys.accepts(b"")
    assert not read_api_keys([], None, {})


@pytest.mark.parametrize(
    ("given", "content", "environment", "named"),
    [
        ("", None, {}, "api_key must"),
        ("has space", None, {}, "api_key must"),
        ("sch\u00f6n", None, {}, "api_key must"),
        (None, " \n", {}, "has no keys"),
        (None, "two words", {}, "keys must"),
        (None, None, {"JPAGED_API_KEY": ""}, "JPAGED_API_KEY must"),
    ],
)
def test_bad_keys_are_refused_unseen(
    tmp_path: Path, given: str | None, content: str | None, environment: Any, named: str
) -> None:
    """An empty one would let everybody in."""
    file = tmp_path / "keys"
    file.write_text(content or "")
    options = [] if given is None else [Secret(given)]
    with pytest.raises(ConfigError, match=named) as raised:
        read_api_keys(options, None if content is None else str(file), environment)
    assert not given or given not in str(raised.value)
    with pytest.raises(ConfigError, match="api_key_file .* cannot be read: No such file"):
        read_api_keys([], str(tmp_path / "none"), {})


def test_keys_are_never_printed(
    guarded: RunningServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ServerOptions(api_key=(Secret("first"),))
    assert "first" not in repr(options) + str(options) + repr(vars(options))
    assert "first" not in repr(ApiKeys(["first"])) + repr(vars(ApiKeys(["first"])))
    with caplog.at_level(logging.DEBUG), guarded.client() as client:
        client.get("/v1/models", headers=bearer("first"))
    captured = capsys.readouterr()
    logged = [record.getMessage() for record in caplog.records if record.name != "httpx"]
    assert "first" not in captured.out + captured.err + "".join(logged)


def test_one_model_by_name(server: RunningServer, openai_client: OpenAI) -> None:
    """O-65: the card of the list, or an error that is not that of an unknown path."""
    assert openai_client.models.retrieve(MODEL_NAME) == openai_client.models.list().data[0]
    with pytest.raises(openai.NotFoundError) as raised:
        openai_client.models.retrieve("nope")
    assert raised.value.code == "model_not_found"
    server.engine.model_name = "org/name-1.5"
    try:
        with server.client() as client:
            for name in ("org/name-1.5", "org%2Fname-1.5"):
                assert client.get(f"/v1/models/{name}").json()["id"] == "org/name-1.5"
        assert openai_client.models.retrieve("org/name-1.5").id == "org/name-1.5"
        server.engine.is_ready = False
        with server.client() as client:
            assert client.get("/v1/models/org/name-1.5").status_code == 503
    finally:
        server.engine.model_name = MODEL_NAME


@pytest.mark.parametrize("state", ["ready", "starting", "draining"])
def test_head_is_get_without_a_body(server: RunningServer, state: str) -> None:
    """O-66: on one connection, which stays usable; O-71: but for that of a draining server."""
    server.engine.is_ready = state != "starting"
    server.app.state.is_draining = state == "draining"

    def headers_of(response: httpx.Response) -> dict[str, str]:
        return {name: value for name, value in response.headers.items() if name != "date"}

    with server.client() as client:
        for path in ("/health", "/ping", "/version", "/metrics", "/v1/models"):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert path == "/metrics" or headers_of(head) == headers_of(get)
            assert (get.headers.get("connection") == "close") == (state == "draining")
        for path in (COMPLETIONS, "/v1/chat/completions"):
            refused = client.head(path)
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_idle_connections_are_kept_longer_than_clients_keep_them(server: RunningServer) -> None:
    """O-71: nginx keeps them 60 s, Go 90 s; a server that closes first breaks a request."""
    assert server.uvicorn.config.timeout_keep_alive == ServerOptions().keep_alive_timeout > 90


def test_the_command_to_try_says_where_a_key_goes(server: RunningServer) -> None:
    assert "Authorization" not in greeting(server.engine, server.url)
    assert "-H 'Authorization: Bearer KEY'" in greeting(server.engine, server.url, needs_key=True)
