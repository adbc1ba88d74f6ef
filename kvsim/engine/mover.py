"""Carries the core's transfers to the substrate and tells the core when they have ended."""

from collections.abc import Callable, Iterable

from simpy import Event

from kvsim.core.cache import TieredCache
from kvsim.core.transfer import Transfer
from kvsim.engine.substrate import Substrate


class Mover:
    """Begins each transfer as soon as the core lets it, and submits what follows from its end."""

    def __init__(self, substrate: Substrate, cache: TieredCache, on_change: Callable[[], None]) -> None:
        self.env = substrate.env
        self.substrate = substrate
        self.cache = cache
        self.on_change = on_change

    def submit(self, transfers: Iterable[Transfer]) -> None:
        """See transfers through to their end, which is the event ``transfer.ended``. Those already submitted are left alone."""
        for transfer in transfers:
            if transfer.ended is None:
                transfer.ended = self.env.event()
                self._begin(transfer)

    def _begin(self, transfer: Transfer) -> None:
        waits = self.cache.begin(transfer, self.env.now)
        if not waits:
            self.substrate.copy(transfer).callbacks.append(lambda event: self._land(transfer, event))
            if transfer.after:
                self.on_change()
            return
        self.submit(waits)
        waits[0].ended.callbacks.append(lambda _: self._begin(transfer))

    def _land(self, transfer: Transfer, event: Event) -> None:
        arrived, now = event.value, self.env.now
        if arrived < transfer.pages:
            follow_ups = self.cache.abort(transfer, arrived, now)
        else:
            follow_ups = self.cache.finish(transfer, now)
        transfer.ended.succeed()
        self.submit(follow_ups)
        self.on_change()
