"""Sockets that wait for clients, and the URL under which those reach them."""

import errno
import socket
from collections.abc import Sequence
from typing import Any

from jpaged.errors import ConfigError

# Connections that the system holds while the event loop is busy; Linux' own limit is 4096.
BACKLOG = 2048
# Addresses that stand for all of this machine's, and one of those for its own clients.
LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}

# A name may have addresses that this machine has not: IPv6 is often switched off.
_ADDRESS_IS_MISSING = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_FREE_PORT_TRIES = 20


def listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of the host, all on one port; 0 chooses a free one.

    `::` takes IPv4 connections, too, where the system can. A name such as `localhost` is served on
    all its addresses that this machine has. Raises `ConfigError` when there is none, or when the
    port is taken on one of them. Call it before weights are loaded, so that this is found early.
    """
    tries = _FREE_PORT_TRIES if port == 0 else 1
    while True:
        tries -= 1
        try:
            return _listen_on_all(_addresses(host, port), port)
        except UnicodeError as error:
            raise ConfigError(f"host {host!r:.100} is no host name: {error}") from None
        except OSError as error:
            # A port that is free on the first address may be taken on the second.
            if error.errno != errno.EADDRINUSE or tries == 0:
                raise ConfigError(_advice(host, port, error)) from None


def base_url(listeners: Sequence[socket.socket], host: str, *, scheme: str = "http") -> str:
    """The URL for clients on this machine. Names stay names, as certificates are for those."""
    address, port = listeners[0].getsockname()[:2]
    if address == "::" and not listeners[0].getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        address = "0.0.0.0"
    shown = LOOPBACK_OF_WILDCARD.get(address, _without_brackets(host))
    if ":" in shown:
        shown = f"[{shown.replace('%', '%25')}]"  # RFC 6874 for fe80::1%eth0
    return f"{scheme}://{shown}:{port}"


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Family and socket address of each address of the host, without repeats."""
    infos = socket.getaddrinfo(_without_brackets(host), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))


def _listen_on_all(
    addresses: Sequence[tuple[socket.AddressFamily, Any]], port: int
) -> list[socket.socket]:
    """Raises `OSError` when no address can be bound, or when the port is taken on one."""
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in addresses:
            try:
                listeners.append(_listen_on(family, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in _ADDRESS_IS_MISSING:
                    raise
                missing = error
            else:
                port = listeners[0].getsockname()[1]
    except BaseException:
        _close(listeners)
        raise
    if missing is not None and not listeners:
        raise missing
    return listeners


def _listen_on(family: socket.AddressFamily, address: Any) -> socket.socket:
    # With protocol 0 asyncio does not know accepted connections for TCP, and leaves Nagle's
    # algorithm on: the body of an answer then waits until its head is acknowledged, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_dual)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _close(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _without_brackets(host: str) -> str:
    """[::1], as in URLs, is ::1."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _advice(host: str, port: int, error: OSError) -> str:
    reason = error.strerror or error
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of host {host} is taken: {reason}. Choose another, or 0 for a free one."
        )
    if error.errno == errno.EACCES:
        return f"port {port} of host {host} is not allowed: {reason}. Choose one from 1024 on."
    return (
        f"host {host} is no address of this machine: {reason}. Choose 127.0.0.1 for clients on "
        "this machine only, or 0.0.0.0 or :: for all its addresses."
    )
