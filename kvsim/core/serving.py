"""The contracts of the caches that a replay or a serving engine can run on."""

from abc import ABCMeta, abstractmethod
from math import inf
from typing import Any, Final, NamedTuple

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.residency import Counts, Residency
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import Hold, Transfer
from kvsim.core.transfers import NO_TRANSFERS, Begin, Transfers
from kvsim.core.tree import RadixTree
from kvsim.core.view import View


class Claim(NamedTuple):
    """What became of promised slots: the request has them, they are lost, or ``waits`` must end before it asks again."""

    waits: list[Transfer]
    is_lost: bool = False


CLAIMED = Claim(NO_TRANSFERS)
LOST = Claim(NO_TRANSFERS, is_lost=True)


class Growth(NamedTuple):
    """Whether the requests get more slots, and the write-downs that make room for them."""

    has_room: bool
    transfers: list[Transfer]


class Fetch(NamedTuple):
    """The transfers to carry out, in order, and among them the fetch itself; None if there was no room for a single page."""

    transfers: list[Transfer]
    fetch: Transfer | None


class Load(NamedTuple):
    """The transfers to carry out, in order, and the loads to the GPU that shorten the request's hit if they fail."""

    transfers: list[Transfer]
    loads: list[Transfer]


NO_LOAD = Load(NO_TRANSFERS, NO_TRANSFERS)


@mypyc_attr(allow_interpreted_subclasses=True)
class Reported(metaclass=ABCMeta):
    """What a run reports of a cache in the end, besides its tiers and its counts."""

    tiers: list[Tier]
    page_tokens: int

    @property
    def tree(self) -> RadixTree:
        """The radix tree of stored pages; a bound has none."""
        raise AssertionError(f"{type(self).__name__} has no tree")

    def describe_checkpoints(self) -> dict[str, int]:
        """Return the counts of recurrent states, by name; empty for a model without recurrent layers."""
        return {}

    def pages_known(self) -> dict[int, int] | None:
        """Return, by request index, the pages that a model without recurrent layers could have reused; None for such a model."""
        return None

    def held_pages(self, name: str) -> tuple[int, int] | None:
        """Return the pages that the tiers of this name have, and how many of them no tier above has; None if it is not known."""
        return None


class ServedCache(Reported):
    """A cache that an engine serves requests from, call by call; ``now`` is in seconds.

    A request is matched and admitted, claims its slots, loads, inserts what it has computed, and is finished or released.
    """

    residency: Residency
    transfers: Transfers
    tiers: list[Tier]
    edges: list[Edge]
    gpu: Tier
    """The GPU tier, or the first of them."""
    views: dict[int, View]
    """The tiers as each GPU tier sees them, by the index of that GPU tier."""
    page_tokens: int
    leases: dict[Lease, None]
    """Leases of running requests."""
    takes_pages_late: bool = False
    """Whether the pages of a leap are taken after it, when it is known how many steps it had. Requires that making room for
    them starts no transfers."""
    pauses_after_retraction: bool = True
    """Whether, after a retraction, no request is admitted until one has finished; otherwise, none is in the same step."""

    @property
    def tree(self) -> RadixTree:
        """The radix tree of stored pages."""
        return self.residency.tree

    @property
    def counts(self) -> Counts:
        """Pages moved and lost so far."""
        return self.residency.counts

    @property
    def version(self) -> int:
        """A number that changes whenever ``cached_pages`` may answer differently."""
        return self.residency.version

    @property
    def now(self) -> float:
        """Time of the last use of the cache, in seconds."""
        return self.residency.now

    @property
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers of pages handed out but not yet ended, oldest first."""
        return self.transfers.in_flight

    @abstractmethod
    def match(self, request: Request, gpu: Tier | None = None) -> Lease:
        """Find the longest prefix that a request can reuse on a GPU tier. May cut a node; changes nothing else."""

    def cached_pages(self, request: Request, gpu: Tier | None = None) -> tuple[int, int]:
        """Return how many pages of a prompt a GPU tier has, as ``match`` would find them, and how many after them a CPU tier has.

        Changes nothing, and cuts no node unless a cache says so.
        """
        lease = self.match(request, gpu)
        return lease.gpu_pages, lease.leading_cpu_pages

    def resume(self, request: Request, tokens: int, gpu: Tier | None = None) -> Lease:
        """Match a request again that was retracted when it had ``tokens`` tokens, its prompt included."""
        return self.match(request, gpu)

    @abstractmethod
    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        """Admit a request that needs ``pages`` GPU pages in all, ``load_pages`` of them from tiers below.

        Pins what is reused and reserves slots for everything else, evicting as needed; ``claim`` then obtains the slots.
        Returns False, with nothing changed, if there is not enough room now. The lease must be fresh from ``match``.
        """

    @abstractmethod
    def can_admit(self, lease: Lease, pages: int) -> bool:
        """Whether a request could get ``pages`` GPU pages in all now. The lease must be fresh from ``match``."""

    def kept_pages(self, lease: Lease) -> int:
        """Return how many pages of the GPU a request can never have: persistent prompts keep them, and it does not reuse them.

        The lease must be fresh from ``match``.
        """
        return 0

    @abstractmethod
    def claim(self, lease: Lease, now: float) -> Claim:
        """Take the promised slots.

        They are lost if pages that were leaving have been used again: release the lease and try again later.
        """

    def begin_chunk(self, lease: Lease, tokens: int, now: float) -> bool:
        """Prepare a step that computes a prompt up to its first ``tokens`` tokens.

        Returns False if there is no room for them now; a cache that takes all slots at admission always has room.
        """
        return True

    @abstractmethod
    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        """Give more slots to decoding requests of one GPU tier: all get what they need, or none does.

        Slots that are not free yet are promised, and ``claim`` obtains them.
        """

    @abstractmethod
    def room_to_fetch(self, lease: Lease) -> int:
        """Return how many pages ``fetch`` could read now: what the CPU tier can take after evicting everything evictable but
        the copies there of the lease's own path. The lease must be fresh from ``match``."""

    @abstractmethod
    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        """Start reading the first ``pages`` pages that only the disk has into the CPU tier, for a request that still waits.

        Fewer are read if fewer fit. The path down to them stays in place until the fetch ends, and counts as used now. The
        lease must be fresh from ``match`` and cannot be used afterwards.
        """

    @abstractmethod
    def hold(self, fetch: Transfer) -> Hold:
        """Keep what a fetch brings, and the path above it, in the CPU tier after its end, until ``let_go`` or ``reset``.

        The fetch must have just been started.
        """

    @abstractmethod
    def let_go(self, hold: Hold) -> None:
        """Take back a ``hold``; nothing happens if ``reset`` has done so."""

    @abstractmethod
    def load(self, lease: Lease, now: float) -> Load:
        """Start loading the matched pages of tiers below to the GPU; the request must have claimed its slots.

        Pages that only the disk has pass through the CPU tier if the disk is below it. The first page that finds no room
        there, and all pages after it, are computed instead.
        """

    @abstractmethod
    def shorten_hit(self, lease: Lease, load: Transfer | None, now: float) -> int:
        """Shorten what a request reuses by the pages that a load failed to bring; the request computes them instead.

        The load is the request's own, or another's that fills its pinned path (``arriving``). Without ``load``, it is by what
        others' loads failed to bring before the request had its slots. Returns the number of pages no longer reused.
        """

    @abstractmethod
    def arriving(self, lease: Lease) -> list[Transfer]:
        """Return the loads, its own and those of other requests, that still fill a request's pinned path."""

    @abstractmethod
    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """Add the pages of the computed prompt, or answer, to the tree. Returns the write-downs that follow."""

    @abstractmethod
    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """End a request whose answer is complete: notify policies, then release it.

        Without a clock, leave out ``now``: the cache's last use gives the time. Returns the write-downs that follow.
        """

    def retract(self, lease: Lease, tokens: int, now: float) -> None:
        """Give back what a retracted request holds, whose first ``tokens`` tokens have been computed."""
        self.release(lease)

    def end_prefill(self, lease: Lease, now: float) -> list[Transfer]:
        """Give back what a request holds whose answer is decoded on another GPU. Returns the write-downs that follow."""
        self.release(lease)
        return NO_TRANSFERS

    def lose(self, gpu: Tier, now: float) -> None:
        """Drop everything that a GPU tier has, since its engine has failed; no request or transfer uses the tier any more.

        What other tiers have stays.
        """
        assert len(self.tiers) == 1, "a cache of this kind cannot lose one of several tiers"
        self.reset()

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Give back what a finished or retracted request holds: its pins, its slots and the slots promised to it."""

    @abstractmethod
    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Give a transfer its target slots, or return the transfers that must end first."""

    @abstractmethod
    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        """End a transfer whose pages have all arrived. Returns the write-downs that follow."""

    @abstractmethod
    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """End a transfer after only its first ``pages_arrived`` pages arrived. Returns the write-downs that follow."""

    @abstractmethod
    def reset(self) -> None:
        """Drop every page (the model's weights have changed). Slots in use are freed when their requests and transfers end."""

    def held_pages(self, name: str) -> tuple[int, int] | None:
        tiers = [tier for tier in self.tiers if tier.name == name]
        above = [tier.index for tier in self.tiers if tiers and tier.level < tiers[0].level]
        held = own = 0
        for node in self.tree.root.descendants():
            pages = node.pages * any(node.state[tier.index] for tier in tiers)
            held += pages
            own += pages * (not any(node.state[index] for index in above))
        return held, own

    @abstractmethod
    def check(self) -> None:
        """Recount everything; raise AssertionError if a count or an invariant is wrong."""


Hits = tuple[int, int, int]
"""Hit pages by source tier: gpu, cpu, disk."""


NEVER_FITS: Final = object()
"""Returned by a server for a request that could not run even alone."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Server(Reported):
    """Serves requests without a clock: all effects of a request have happened when ``serve`` returns.

    Replay keeps the result of ``serve`` and passes it to ``finish_request`` later, oldest first.
    """

    counts: Any
    """A dataclass of numbers: pages moved and lost."""

    @abstractmethod
    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request that needs ``pages`` pages in all. Returns its lease, which has ``hits``, or None if there is no room.

        After None, replay tries the same request again once another one has finished, or rejects it if none is running. If the
        result is ``NEVER_FITS``, replay rejects the request at once and the others stay running.
        """

    @abstractmethod
    def finish_request(self, lease: Any) -> None:
        """End a request whose answer is complete, and give back what it holds."""

    def reset(self) -> None:
        """Drop every page, because the model's weights have changed."""
        raise AssertionError(f"{type(self).__name__} cannot be reset")

    def prefetched(self) -> dict[str, int]:
        """Return the counts of prefetches, by name; empty if there are none."""
        return {}


class RulesError(Exception):
    """The rules of an engine cannot play this run; the message says which setting to change, and how."""
