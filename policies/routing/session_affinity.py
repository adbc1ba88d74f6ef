"""Session affinity by rendezvous hashing (Thaler and Ravishankar, 1998)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext

WORD: Final = np.uint64(0xFFFFFFFF)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class SessionAffinity(RoutingPolicy):
    """Sends all requests of a conversation to one engine, so that each turn finds the turns before it, without any state.

    every request   the engine with the highest hash of session and engine; a request without a session counts as its own
    an engine fails its sessions are spread over the others, and come back with it; no other session moves
    """

    @property
    def chooses_by(self) -> str:
        return "request"

    def bind(self, context: RoutingContext) -> None:
        self._hashes = {engine: int(mixed(np.array([engine + 1]))[0]) for engine in context.engines}
        self._offered: Sequence[EngineStatus] = ()
        self._keys = np.zeros(0, np.uint64)
        """Hashes of those that were offered last."""
        self._known: dict[int, int] = {}
        """The engine of each session, among those."""

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        if engines is not self._offered:
            self._offered, self._known = engines, {}
            self._keys = np.array([self._hashes[status.engine] for status in engines], np.uint64)
        session = request.session
        chosen = self._known.get(session, -1) if session >= 0 else -1
        if chosen < 0:
            key = mixed(np.array([session if session >= 0 else ~request.index]))
            chosen = engines[int(mixed(key ^ self._keys).argmax())].engine
            if session >= 0:
                self._known[session] = chosen
        return chosen


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return hashes of the last 32 bits of whole numbers, 0 to 2**32 - 1: MurmurHash3's final mix (Appleby, 2011)."""
    last = numbers.astype(np.uint64) & WORD
    last = (last ^ last >> np.uint64(16)) * np.uint64(0x85EBCA6B) & WORD
    last = (last ^ last >> np.uint64(13)) * np.uint64(0xC2B2AE35) & WORD
    return last ^ last >> np.uint64(16)
