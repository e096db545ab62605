"""Server options: the only place that holds their defaults and help texts. Imports stay light:
the command line needs this to print its help."""

import re
from dataclasses import dataclass
from typing import NoReturn

from jpaged.config import check_types, option
from jpaged.errors import ConfigError
from jpaged.server.api_keys import Secret

MAX_PORT = 65535

# As browsers write it: no path, not even a slash.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")
_ROOT_PATH = re.compile(r"(/[^/\s]+)+")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server, checked once when they are made. Raises `ConfigError`."""

    host: str = option(
        "127.0.0.1",
        "address or name to listen on; :: is all of this machine's addresses, 0.0.0.0 all of IPv4",
    )
    port: int = option(8000, "port to listen on; 0 chooses a free one")
    api_key: tuple[Secret, ...] = option(
        (),
        "a key that clients must send as `Authorization: Bearer KEY` to all paths but /health and "
        "/ping; repeat it for several. Other users of the machine can see it in the list of "
        "processes: prefer the file, or the environment variable JPAGED_API_KEY",
        is_secret=True,
    )
    api_key_file: str | None = option(None, "file with such keys, one a line")
    allowed_origins: tuple[str, ...] = option(
        (),
        "site whose web pages may use the server, such as https://chat.example.com; * allows all; "
        "repeat it for several (default: none, only programs may)",
    )
    ssl_certfile: str | None = option(
        None, "file with the certificate, and those above it; serves HTTPS instead of HTTP"
    )
    ssl_keyfile: str | None = option(
        None, "file with the certificate's key (default: it is in the file of the certificate)"
    )
    root_path: str = option("", "path under which a reverse proxy serves this server, such as /llm")
    keep_alive_timeout: int = option(
        120,
        "seconds that an idle connection stays open; should exceed those of clients and proxies",
    )
    head_timeout: float = option(
        60.0, "seconds that the request line and the headers may take to arrive"
    )
    body_timeout: float = option(60.0, "seconds that the body of a request may take to arrive")
    max_body_bytes_in_flight: int = option(
        512 * 2**20, "most bytes of the bodies of all requests that are being answered"
    )
    max_queued_requests: int = option(
        4096, "most requests that wait for their first token; others are told to try again later"
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get to finish after Ctrl-C or SIGTERM"
    )

    def __post_init__(self) -> None:
        check_types(self)
        if not self.host:
            _refuse("host", "must not be empty: 0.0.0.0 or :: is all addresses")
        if not 0 <= self.port <= MAX_PORT:
            _refuse("port", f"must be from 0 to {MAX_PORT}, got {self.port}")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                _refuse(
                    "allowed_origins",
                    "takes *, null or a scheme and a host in lower case, such as "
                    "https://chat.example.com, without a path or a slash at the end; "
                    f"got {origin!r}",
                )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            _refuse("ssl_keyfile", f"{self.ssl_keyfile} needs ssl_certfile, too")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            _refuse(
                "root_path",
                f"must begin and not end with a slash, such as /llm, got {self.root_path!r}",
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("keep_alive_timeout", "max_body_bytes_in_flight", "max_queued_requests"):
            if getattr(self, name) < 1:
                _refuse(name, f"must be at least 1, got {getattr(self, name)}")
        for name in ("head_timeout", "body_timeout"):
            if getattr(self, name) <= 0:
                _refuse(name, f"must be a number of seconds above 0, got {getattr(self, name)}")
        if self.shutdown_timeout < 0:
            _refuse(
                "shutdown_timeout",
                f"must be a number of seconds, 0 or more, got {self.shutdown_timeout}",
            )


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(f"{name} {why}", option=name)
