"""Fixtures of the tests of whole engines."""

from contextlib import contextmanager
from typing import Any

import jax
import pytest


@pytest.fixture
def count_compilations():
    """A context that counts how often XLA compiles, or reads a program from its cache."""

    @contextmanager
    def counting():
        events = []

        def listen(event: str, duration: float, **_: Any) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                events.append(duration)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield lambda: len(events)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counting
