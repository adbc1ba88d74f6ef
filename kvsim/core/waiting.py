"""A waiting request, as a scheduling policy sees it."""

from kvsim.core.request import Request


class Waiting:
    """A request that waits to be admitted, for the first time or again."""

    __slots__ = ("arrival_s", "generated", "place", "request", "was_running")

    def __init__(self, request: Request, arrival_s: float) -> None:
        self.request = request
        self.place = request.index, request.sample
        """Its place among all requests, in order of arrival."""
        self.arrival_s = arrival_s
        self.was_running = False
        """Whether it was retracted."""
        self.generated = 0
        """Output tokens generated before it was retracted: they are computed again, with the prompt."""
