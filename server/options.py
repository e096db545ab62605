"""Server options: the only place that holds their defaults and help texts. Imports stay light:
the command line needs this to print its help."""

import math
from dataclasses import dataclass

from jpaged.config import option
from jpaged.errors import ConfigError

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server, checked once when they are made. Raises `ConfigError`."""

    host: str = option(
        "127.0.0.1",
        "address or name to listen on; :: is all of this machine's addresses, 0.0.0.0 all of IPv4",
    )
    port: int = option(8000, "port to listen on; 0 chooses a free one")
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get to finish after Ctrl-C or SIGTERM"
    )

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must not be empty; 0.0.0.0 or :: is all addresses")
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port must be from 0 to {MAX_PORT}, got {self.port}")
        if not (self.shutdown_timeout >= 0 and math.isfinite(self.shutdown_timeout)):
            raise ConfigError(
                f"shutdown_timeout must be a number of seconds, got {self.shutdown_timeout}"
            )
