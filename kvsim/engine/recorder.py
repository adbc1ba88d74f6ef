"""Records the timeline of a run, if one is wanted: the recorder stands between the engine and its substrate."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from simpy import Event

from kvsim.core.edge import Edge
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.job import Send
from kvsim.engine.outcome import LinkUse
from kvsim.engine.substrate import Substrate, Work


class Batch(NamedTuple):
    """One step of a batch, or several decode steps in one leap. Times in seconds."""

    start_s: float
    end_s: float
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_context_tokens: int
    """Cached tokens that the decoding requests attend over in the first step."""
    steps: int
    engine: int = 0


class Recorder:
    """A substrate that records the calls to another one.

    Pages are evicted when requests are admitted or grow and when transfers begin, just before the engine calls ``compute`` or
    ``copy``. So these calls inspect the tiers.
    """

    def __init__(self, substrate: Substrate, tiers: Sequence[Tier]) -> None:
        self.env = substrate.env
        self.tiers = tiers
        self.batches: list[Batch] = []
        self.evictions: list[tuple[float, str, int]] = []
        """(time in s, tier, pages); with several engines, a tier's name is followed by the number of its engine or host."""
        self.usage: list[tuple[float, str, int]] = []
        """(time in s, tier, pages in use), at each change"""
        self.labels = labels(tiers)
        self._substrate = substrate
        self._evicted = [0] * len(tiers)
        self._used = [0] * len(tiers)

    def copy(self, transfer: Transfer) -> Event:
        self._look()
        return self._substrate.copy(transfer)

    def cancel(self, transfer: Transfer) -> None:
        self._substrate.cancel(transfer)

    def queued_s(self, edge: Edge) -> float:
        return self._substrate.queued_s(edge)

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        self._look()
        start_s = self.env.now
        done = self._substrate.compute(work, loads)
        tokens = sum(tokens for tokens, _ in work.chunks)

        def end(event: Event) -> None:
            decoding = work.decode_requests, work.decode_context_tokens
            self.batches.append(
                Batch(start_s, self.env.now, len(work.chunks), tokens, *decoding, int(event.value or 0), work.engine)
            )

        done.callbacks.append(end)
        return done

    def hand_over(self, send: Send) -> Event:
        self._look()
        return self._substrate.hand_over(send)

    def withdraw(self, send: Send) -> None:
        self._substrate.withdraw(send)

    def link_use(self) -> list[LinkUse]:
        self._look()
        return self._substrate.link_use()

    def findings(self) -> dict[str, Any]:
        return self._substrate.findings()

    def close(self) -> None:
        self._substrate.close()

    def _look(self) -> None:
        """Record what each tier has evicted since the last call, and its pages in use."""
        now = self.env.now
        for index, tier in enumerate(self.tiers):
            evicted, used = tier.evicted_pages, tier.pool.capacity - tier.pool.free
            if evicted != self._evicted[index]:
                self.evictions.append((now, self.labels[index], evicted - self._evicted[index]))
                self._evicted[index] = evicted
            if used != self._used[index]:
                self.usage.append((now, self.labels[index], used))
                self._used[index] = used


def labels(tiers: Sequence[Tier]) -> list[str]:
    """Return the name of each tier, with the number of its engine or host if several tiers have the same name."""
    names = [tier.name for tier in tiers]
    return [f"{tier.name} {tier.owner}" if names.count(tier.name) > 1 else tier.name for tier in tiers]
