"""The order of waiting requests by what is cached of them, those of clients that have used up their share after the others."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvsim.core.queue_view import LookUps, Waiting
from kvsim.policies.scheduling.kept_order import KeptOrder

Entry = tuple[int, int, Waiting]
"""What orders requests, least first: minus the tokens cached, then when it began to wait; the request."""


class Client:
    """Whose requests are, and what it may still use."""

    def __init__(self) -> None:
        self.deficit = 0.0
        """In tokens; its requests are admitted while this is above 0."""
        self.held: list[Entry] = []
        """A heap of requests that wait for a refill; an entry no longer counts once the request has another."""
        self.waiting = 0


class Clients:
    """All clients that an engine has seen."""

    def __init__(self, quantum_tokens: float) -> None:
        self._quantum = quantum_tokens
        self._clients: dict[object, Client] = {}

    def of(self, name: object) -> Client:
        """Return the client of this name, which begins without a share."""
        return self._clients.setdefault(name, Client())

    def refill(self) -> list[Client]:
        """Give a quantum to each client that has nothing left, until one of those whose requests wait has something.

        At least one waits, and none of them has anything left. Returns those of them that have something now.
        """
        rounds = min([self._missing(client) for client in self._clients.values() if client.waiting])
        ready: list[Client] = []
        for client in self._clients.values():
            if client.deficit <= 0:
                client.deficit += self._quantum * min(rounds, self._missing(client))
                if client.waiting and client.deficit > 0:
                    ready.append(client)
        return ready

    def _missing(self, client: Client) -> int:
        """Return how many quanta a client needs until it has something left."""
        return int(-client.deficit // self._quantum) + 1


class DeficitOrder(KeptOrder):
    """Requests of clients that have something left, the longest cached prefix first; of equals, who began to wait first.

    A request that has begun to wait since the last round comes after the others of such clients.
    """

    def __init__(self, clients: Clients, client_of: Callable[[Waiting], Client]) -> None:
        self._clients = clients
        self._client_of = client_of
        self._line: list[Entry] = []
        """A heap of requests, as far as is known of clients that have something left."""
        self._entries: dict[Waiting, Entry] = {}
        """The entry of each request that counts."""

    def add(self, waiting: Waiting) -> None:
        self._client_of(waiting).waiting += 1
        self._put(waiting, 1)

    def remove(self, waiting: Waiting) -> None:
        del self._entries[waiting]
        self._client_of(waiting).waiting -= 1

    def update(self, changed: Sequence[Waiting], look_ups: LookUps) -> None:
        for waiting in changed:
            amount = -look_ups.cached_tokens(waiting)
            if amount != self._entries[waiting][0]:
                self._put(waiting, amount)

    def _put(self, waiting: Waiting, amount: int) -> None:
        entry = self._entries[waiting] = (amount, waiting.entry, waiting)
        heappush(self._line, entry)

    def first(self) -> Waiting:
        line = self._line
        while True:
            while line:
                entry = line[0]
                waiting = entry[2]
                if self._entries.get(waiting) != entry:
                    heappop(line)
                elif (client := self._client_of(waiting)).deficit > 0:
                    return waiting
                else:
                    heappush(client.held, heappop(line))
            for client in self._clients.refill():
                for entry in client.held:
                    heappush(line, entry)
                client.held = []

    def in_order(self) -> list[Waiting]:
        """Return all requests: without further refills, first those of clients that have something left."""
        return sorted(self._entries, key=lambda waiting: (self._client_of(waiting).deficit <= 0, *self._entries[waiting][:2]))
