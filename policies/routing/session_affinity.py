"""Session affinity by rendezvous hashing (Thaler and Ravishankar, 1998)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SessionAffinity(RoutingPolicy):
    """Sends all requests of a conversation to one engine, so that each turn finds the turns before it, without any state.

    every request   the engine with the highest hash of session and engine; a request without a session counts as its own
    an engine fails its sessions are spread over the others, and come back with it; no other session moves
    """

    def bind(self, context: RoutingContext) -> None:
        self._hashes = {engine: mixed(engine + 1) for engine in context.engines}

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        key = mixed(request.session if request.session >= 0 else ~request.index)
        chosen, highest = -1, -1
        for status in engines:
            weight = mixed(key ^ self._hashes[status.engine])
            if weight > highest:
                chosen, highest = status.engine, weight
        return chosen


def mixed(number: int) -> int:
    """Return a hash of the last 32 bits of a number, 0 to 2**32 - 1: MurmurHash3's final mix (Appleby, 2011)."""
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
