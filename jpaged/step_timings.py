"""Where the host's time goes while an engine runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StepTimings:
    """Seconds that the host spent, added up over `num_steps` steps.

    scheduling: choosing requests and blocks. packing: making the device's inputs. launching:
    handing them over, which may include computing on a CPU. waiting: reading the tokens of the
    step before, the device's time included. processing: taking in those tokens, text included.
    """

    num_steps: int = 0
    scheduling: float = 0.0
    packing: float = 0.0
    launching: float = 0.0
    waiting: float = 0.0
    processing: float = 0.0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds that the context takes to the field `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)
