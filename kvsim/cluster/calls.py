"""Tells engines of the tool calls of the sessions that they have served: a router may send the next request elsewhere."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.engine.engine import Engine
from kvsim.pages.extents import pages_in_common


class CallsUnderWay:
    """The calls between a request that has ended and the one that continues it.

    Of the requests that wait for a request, the one that continues it is the one whose prompt shares the most pages with its
    prompt, the first of several. Without shared pages, nothing that it has left will be of use.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._began: dict[int, int] = {}
        """The engine of a call, by the index of the request that continues it."""

    def ended(self, request: Request, engine: int, waiting: Sequence[Request], *, is_answered: bool) -> None:
        """A request has ended on an engine; ``waiting`` are those that wait for it, and perhaps for others."""
        self.missed(request)
        calls = self._engines[engine].calls
        if calls is None or not is_answered:
            return
        shared = [pages_in_common(request.runs, other.runs) for other in waiting]
        most = max(shared, default=0)
        if most:
            follower = waiting[shared.index(most)]
            if follower.index not in self._began:
                self._began[follower.index] = engine
                calls.begin(request, follower)

    def returned(self, request: Request) -> None:
        """A request has arrived, and is about to be sent to an engine."""
        engine = self._began.get(request.index)
        calls = None if engine is None else self._engines[engine].calls
        if calls is not None:
            calls.returned(request.index)

    def sent(self, request: Request, engine: int) -> None:
        """A request has been sent to an engine."""
        if self._began.get(request.index, engine) != engine:
            self.missed(request)

    def missed(self, request: Request) -> None:
        """What the engine of a call keeps for this request is not needed any more."""
        engine = self._began.pop(request.index, None)
        calls = None if engine is None else self._engines[engine].calls
        if calls is not None:
            calls.missed(request.index)
