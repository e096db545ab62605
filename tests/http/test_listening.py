"""Where the server listens, and the URL that it prints."""

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from jpaged.errors import ConfigError
from jpaged.server import listening
from jpaged.server.listening import base_url, listen
from tests.http.conftest import RunningServer


@contextmanager
def listening_on(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(each) for each in listen(host, port)]


def can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def port_of(listeners: Sequence[socket.socket]) -> int:
    [port] = {listener.getsockname()[1] for listener in listeners}
    return port


def test_accepted_connections_send_at_once(server: RunningServer) -> None:
    """O-88: Nagle's algorithm is off, so a body does not wait for the receipt of its head."""
    with server.client() as client:
        client.get("/health")
        [connection] = server.uvicorn.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Makes the name "twin" one of all the addresses, in this order."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **options: Any) -> list[Any]:
        hosts = addresses if host == "twin" else [host]
        return [info for each in hosts for info in resolve(each, *args, **options)]

    monkeypatch.setattr(listening.socket, "getaddrinfo", getaddrinfo)


needs_ipv6 = pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="the machine has no sockets for both families"
)


@pytest.mark.parametrize(
    ("host", "families", "url_host"),
    [
        ("127.0.0.1", "4", "127.0.0.1"),
        ("0.0.0.0", "4", "127.0.0.1"),
        ("localhost", "4", "localhost"),
        pytest.param("::", "46", "127.0.0.1", marks=needs_ipv6),
        pytest.param("::0", "46", "127.0.0.1", marks=needs_ipv6),
        pytest.param("::1", "6", "[::1]", marks=needs_ipv6),
        pytest.param("[::1]", "6", "[::1]", marks=needs_ipv6),
    ],
)
def test_hosts(host: str, families: str, url_host: str) -> None:
    """O-84: both families behind ::, and a URL that can be used."""
    with listening_on(host) as listeners:
        port = port_of(listeners)
        assert base_url(listeners, host) == f"http://{url_host}:{port}"
        assert ("4" in families) == can_connect("127.0.0.1", port) or host == "localhost"
        assert ("6" not in families) or can_connect("::1", port)
        assert can_connect(urlsplit(base_url(listeners, host)).hostname or "", port)


@needs_ipv6
def test_every_address_of_a_name_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-84: IPv6 first, as most systems have it, does not leave IPv4 without an answer."""
    resolving(monkeypatch, "::1", "127.0.0.1")
    with listening_on("twin") as listeners:
        port = port_of(listeners)
        assert can_connect("127.0.0.1", port) and can_connect("::1", port)
        assert base_url(listeners, "twin", scheme="https") == f"https://twin:{port}"


def test_an_address_that_is_missing_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-84: as ::1 is where IPv6 is switched off; 192.0.2.1 is nobody's (RFC 5737)."""
    resolving(monkeypatch, "192.0.2.1", "127.0.0.1")
    with listening_on("twin") as listeners:
        assert can_connect("127.0.0.1", port_of(listeners))


def test_a_port_that_is_taken_on_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-84: refused as a whole, and nothing stays open."""
    resolving(monkeypatch, "127.0.0.2", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of host twin is taken.*or 0"):
            listen("twin", port)
        assert not can_connect("127.0.0.2", port)


def test_a_free_port_is_free_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is free on the first address and taken on the second is tried no more."""
    resolving(monkeypatch, "127.0.0.2", "127.0.0.1")
    listen_on, ports = listening._listen_on, []

    def taken_once(family: Any, address: Any) -> socket.socket:
        ports.append(address[1])
        if len(ports) == 2:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return listen_on(family, address)

    monkeypatch.setattr(listening, "_listen_on", taken_once)
    with listening_on("twin") as listeners:
        assert len(listeners) == 2
    assert ports[0] == 0 and ports[2] == 0 and len(ports) == 4


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a..b", "x" * 300, "[::1"])
def test_hopeless_hosts(host: str) -> None:
    """O-84: the advice is about the host, and not about the port."""
    with pytest.raises(ConfigError, match=r"^host .*"):
        listen(host, 8000)


def test_scoped_addresses_can_be_pasted() -> None:
    """O-84: the % before a zone is escaped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = base_url([listener], "fe80::1%eth0")
    assert unquote(url).startswith("http://[fe80::1%eth0]:") and "%25" in url
