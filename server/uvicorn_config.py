"""What uvicorn, which speaks HTTP for us, is told."""

import uvicorn
from fastapi import FastAPI

# After the engine has stopped, answers have only their last bytes to send.
LAST_BYTES_TIMEOUT_S = 2


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # Never other ones that happen to be installed: these are tested.
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_BYTES_TIMEOUT_S,
    )
