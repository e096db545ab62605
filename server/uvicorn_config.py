"""Configures uvicorn, the HTTP server below the application."""

import uvicorn
from fastapi import FastAPI

from jpaged.errors import ConfigError
from jpaged.server.head_timeout import protocol_with
from jpaged.server.listening import BACKLOG
from jpaged.server.options import ServerOptions

# After the engine has stopped, answers have only their last bytes to send.
LAST_BYTES_TIMEOUT_S = 2
# Of the request line and the headers; proxies and gateways add tokens of some kilobytes.
MAX_HEAD_BYTES = 64 * 1024


def uvicorn_config(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    """Return a loaded config. Raises `ConfigError` for a certificate that cannot be used."""
    config = uvicorn.Config(
        app,
        # Not uvicorn's choice of what is installed: these are tested.
        http=protocol_with(options.head_timeout),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=LAST_BYTES_TIMEOUT_S,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    try:
        config.load()
    except OSError as error:  # SSLError is one
        key = options.ssl_keyfile or options.ssl_certfile
        raise ConfigError(
            f"ssl_certfile {options.ssl_certfile} with the key of {key} cannot be used: "
            f"{error.strerror or error}"
        ) from None
    return config
