"""The queue of requests that wait to run. Host side only: imports no JAX."""

from collections import OrderedDict
from collections.abc import Iterator

from jpaged.scheduling.request import Request


class WaitingQueue:
    """Requests in order of arrival. Every operation takes constant time, however many wait."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()

    @property
    def first(self) -> Request:
        return next(iter(self._requests))

    def append(self, request: Request) -> None:
        self._requests[request] = None

    def append_first(self, request: Request) -> None:
        """Put a preempted request before all that arrived later."""
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
