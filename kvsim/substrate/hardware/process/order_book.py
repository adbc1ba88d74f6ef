"""The orders under way: who still has to answer them, and which event and which link's meter wait for that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any

from simpy import Event

from kvsim.substrate.hardware.memory.flight import Meter
from kvsim.substrate.hardware.wall_clock import WallClock


@dataclass(eq=False, kw_only=True)
class Order:
    """One order, to one or several parties."""

    done: Event
    parties: int
    combined: Callable[[list[int]], Any]
    """Makes the event's value of the answers of all parties, in their order."""
    meter: Meter | None
    page_bytes: int
    pages: int
    request: int = -1
    """Index of the request that the pages belong to, -1 for none."""
    values: dict[int, int] = field(default_factory=dict)
    """Answers by party."""
    start_s: float = float("inf")


class OrderBook:
    """Numbers orders and completes their events on the clock once all parties have answered. Any thread may answer."""

    def __init__(self, clock: WallClock) -> None:
        self.clock = clock
        self.on_lost: Callable[[int], None] | None = None
        """Called on the clock's thread with the number of a GPU that is lost, before what it was asked for ends."""
        self._orders: dict[int, Order] = {}
        self._numbers = count()
        self._lock = Lock()

    def enter(
        self,
        *,
        parties: int = 1,
        combined: Callable[[list[int]], Any] = min,
        meter: Meter | None = None,
        pages: int = 0,
        page_bytes: int = 0,
        request: int = -1,
    ) -> tuple[int, Event]:
        """Return the number and the event of a new order. For copies, ``meter`` counts the ``pages`` of ``page_bytes`` of a
        ``request``, if they belong to one."""
        number, done = next(self._numbers), self.clock.expect()
        if meter is not None:
            meter.ask(pages * page_bytes)
        self._orders[number] = Order(
            done=done, parties=parties, combined=combined, meter=meter, page_bytes=page_bytes, pages=pages, request=request
        )
        return number, done

    def is_open(self, number: int) -> bool:
        """Whether an order has not been answered by all parties."""
        return number in self._orders

    def ended(self, number: int, party: int, value: int, start_s: float, end_s: float) -> None:
        """Take a party's answer."""
        with self._lock:
            order = self._orders[number]
            order.values[party] = value
            order.start_s = min(order.start_s, start_s)
            if len(order.values) < order.parties:
                return
            del self._orders[number]
        values = [order.values[party] for party in sorted(order.values)]
        if order.meter is not None:
            began_s = self.clock.began_s
            start_s, end_s = max(0.0, order.start_s - began_s), max(0.0, end_s - began_s)
            order.meter.book(start_s, end_s, min(values) * order.page_bytes, order.pages * order.page_bytes, order.request)
        self.clock.complete(order.done, order.combined(values))

    def lose(self, party: int) -> None:
        """Take note that a party is lost."""
        event = self.clock.event()
        event.callbacks.append(lambda _: self.on_lost(party) if self.on_lost else None)
        self.clock.notify(event)


class Party:
    """Takes the answers of one party, a GPU or a disk, as ``Answers``."""

    def __init__(self, book: OrderBook, number: int) -> None:
        self.book, self.number = book, number

    def ended(self, number: int, value: int, start_s: float, end_s: float) -> None:
        self.book.ended(number, self.number, value, start_s, end_s)

    def failed(self, error: BaseException) -> None:
        self.book.clock.fail(error)

    def lost(self) -> None:
        self.book.lose(self.number)
