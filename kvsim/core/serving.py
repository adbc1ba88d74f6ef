"""The contracts of what a replay and an engine can play requests against."""

from abc import ABCMeta, abstractmethod
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvsim.core.edge import Edge
from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.residency import Counts, Residency
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import NO_TRANSFERS, Begin, Transfers
from kvsim.core.tree import RadixTree

if TYPE_CHECKING:
    from kvsim.core.cache import View


class Claim(NamedTuple):
    """What became of promised slots: the request has them, they are lost, or ``waits`` have to end before it asks again."""

    waits: list[Transfer]
    is_lost: bool = False


CLAIMED = Claim(NO_TRANSFERS)
LOST = Claim(NO_TRANSFERS, is_lost=True)


class Growth(NamedTuple):
    """Whether requests get more slots, and the write-downs that make room for them."""

    has_room: bool
    transfers: list[Transfer]


class Fetch(NamedTuple):
    """What is to be carried out, in order, and the read ahead itself; None if there was no room for a single page."""

    transfers: list[Transfer]
    fetch: Transfer | None


class Load(NamedTuple):
    """What is to be carried out, in order, and those of it that bring pages to the GPU."""

    transfers: list[Transfer]
    loads: list[Transfer]


NO_LOAD = Load(NO_TRANSFERS, NO_TRANSFERS)


class ServedCache(metaclass=ABCMeta):
    """What an engine serves requests from, call by call; ``now`` is in seconds.

    A request is matched, admitted, claims its slots, loads, inserts what it has computed, and finishes or is released.
    """

    residency: Residency
    transfers: Transfers
    tiers: list[Tier]
    edges: list[Edge]
    gpu: Tier
    """The GPU tier, or the first of them."""
    views: "dict[int, View]"
    """The tiers as each GPU tier sees them, by its index."""
    rules: Rules
    page_tokens: int
    leases: dict[Lease, None]
    """Of running requests."""

    @property
    def tree(self) -> RadixTree:
        """Where pages are."""
        return self.residency.tree

    @property
    def counts(self) -> Counts:
        """What became of pages that were moved."""
        return self.residency.counts

    @property
    def now(self) -> float:
        """When the cache was last used."""
        return self.residency.now

    @property
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers of pages handed out and not yet ended, the oldest first."""
        return self.transfers.in_flight

    @abstractmethod
    def match(self, request: Request, gpu: Tier | None = None) -> Lease:
        """The longest reusable prefix as seen from a GPU tier. Changes nothing but the cut that it needs."""

    @abstractmethod
    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        """Let a request run that needs ``pages`` GPU pages in all, of which ``load_pages`` are to come from tiers below.

        Pins what is reused and reserves slots for everything else, evicting as needed. False, and nothing changed, if that
        is not possible now. The slots are there once ``claim`` says so. The lease must be fresh from ``match``.
        """

    @abstractmethod
    def can_admit(self, lease: Lease, pages: int) -> bool:
        """Whether a request can have ``pages`` GPU pages in all now. The lease must be fresh from ``match``."""

    @abstractmethod
    def claim(self, lease: Lease, now: float) -> Claim:
        """Take the slots that were promised.

        They are lost if pages about to leave were used again: ``release``, and try later.
        """

    @abstractmethod
    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        """Promise more slots to requests of one GPU that decode: all get what they need, or none. ``claim`` gets those that are
        not free at once."""

    @abstractmethod
    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        """Start to read the first ``pages`` pages that only the disk has into the CPU tier, or as many as find room, for a
        request that still waits.

        Until the fetch ends, the path from which it goes on stays where it is; from then on it is as recent as if it had been
        used now. The lease is fresh from ``match`` and is used up.
        """

    @abstractmethod
    def load(self, lease: Lease, now: float) -> Load:
        """Start to bring the matched pages of tiers below to the GPU; the request must have claimed its slots.

        Pages that only the disk has pass through the CPU tier if the disk is below it. As many as find room there are read;
        what follows on the first that does not is computed.
        """

    @abstractmethod
    def arriving(self, lease: Lease) -> list[Transfer]:
        """The loads, its own and others', that a request's pinned path waits for."""

    @abstractmethod
    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """The whole prompt, or the answer, has been computed: its pages become nodes. Returns the write-downs that follow."""

    @abstractmethod
    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """The request has its answer: as ``release``, and policies are told. Without a clock, ``now`` is when it began.

        Returns the write-downs that follow.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """The request is over, or retracted: its path is unpinned, its slots and what it was promised are given back."""

    @abstractmethod
    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Give a transfer its target slots, or say what has to end first."""

    @abstractmethod
    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        """A transfer has brought everything. Returns the write-downs that follow."""

    @abstractmethod
    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """A transfer has brought its first ``pages_arrived`` pages only. Returns the write-downs that follow."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every page (the model's weights changed). Slots in use by requests and transfers return when these end."""

    @abstractmethod
    def check(self) -> None:
        """Recount everything; raises AssertionError where a count or an invariant does not hold."""


Hits = tuple[int, int, int]
"""Hit pages by the tier that they came from: gpu, cpu, disk."""


class ReplayLease(Protocol):
    """What a served request keeps until it is finished."""

    hits: Hits


class Server(Protocol):
    """Serves requests without a clock: all that a request brings about has happened when ``serve`` returns.

    Replay keeps what ``serve`` returns and hands it to ``finish_request`` later, oldest first.
    """

    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request that takes ``pages`` pages in all. Returns what it holds, a ``ReplayLease``; None if there is no room.

        After None the same request is asked for again when another one has finished, or rejected if none runs.
        """

    def finish_request(self, lease: Any) -> None:
        """The request has its answer: what it holds is given back."""


class ServingCache(Server, Protocol):
    """A cache that is its own server, by the rules of one engine."""

    tiers: list[Tier]
    counts: Any
    """A dataclass of numbers: what became of pages that were moved."""
    page_tokens: int
