"""HTTPS, with a certificate for localhost and 127.0.0.1 that is valid for 100 years."""

import ssl
from pathlib import Path

import httpx
import pytest

from jpaged.errors import ConfigError
from jpaged.server.app import create_app
from jpaged.server.options import ServerOptions
from jpaged.server.uvicorn_config import uvicorn_config
from tests.http.conftest import running_server
from tests.http.scripted_engine import ScriptedEngine

CERTIFICATE = Path(__file__).parent / "localhost.pem"
KEY = Path(__file__).parent / "localhost.key"


def test_https(tmp_path: Path) -> None:
    options = ServerOptions(ssl_certfile=str(CERTIFICATE), ssl_keyfile=str(KEY))
    trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
    with running_server(ScriptedEngine(tmp_path), options) as server:
        url = f"https://127.0.0.1:{server.port}/v1/completions"
        answer = httpx.post(url, json={"prompt": "hi"}, verify=trusted, timeout=10)
        assert answer.json()["choices"][0]["text"] == "[hi]"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")


@pytest.mark.parametrize(
    ("certificate", "key"), [("none.pem", None), (CERTIFICATE, "none.key"), (CERTIFICATE, None)]
)
def test_certificates_that_cannot_be_used(tmp_path: Path, certificate: str, key: str) -> None:
    """The last one: the key is not in the file of the certificate."""
    options = ServerOptions(ssl_certfile=str(certificate), ssl_keyfile=key)
    with pytest.raises(ConfigError, match="^ssl_certfile .* cannot be used: "):
        uvicorn_config(create_app(ScriptedEngine(tmp_path)), options)
