"""The contracts of the caches that a replay or a serving engine can run on."""

from abc import ABCMeta, abstractmethod
from math import inf
from typing import Any, Final, NamedTuple

from kvsim.core.at_rest import check_at_rest, check_places
from kvsim.core.copies import Counts
from kvsim.core.lease import FIRST, LOST, Lease
from kvsim.core.prompt_index import PromptIndex
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.subclassing import mypyc_attr, trait
from kvsim.core.tier import Tier
from kvsim.core.transfer import NO_TRANSFERS, Begin, FetchPin, Transfer
from kvsim.core.tree import Node, RadixTree
from kvsim.core.view import View
from kvsim.core.watch import Watch
from kvsim.pages.extents import Extent

NOTHING_IN_FLIGHT: Final[dict[Transfer, None]] = {}


class Claim(NamedTuple):
    """What became of reserved slots: the request has them, they are lost, or ``waits`` must end before it asks again."""

    waits: list[Transfer]
    is_lost: bool = False


CLAIMED: Final = Claim(NO_TRANSFERS)
LOST_SLOTS: Final = Claim(NO_TRANSFERS, is_lost=True)


class Growth:
    """Whether the requests get more slots, and the write-downs that make room for them."""

    __slots__ = ("has_room", "transfers")

    def __init__(self, has_room: bool, transfers: list[Transfer]) -> None:
        self.has_room = has_room
        self.transfers = transfers


ROOM: Final = Growth(True, NO_TRANSFERS)
NO_ROOM: Final = Growth(False, NO_TRANSFERS)


class Fetch(NamedTuple):
    """The transfers to carry out, in order, and among them the fetch itself, whose pages ``pin`` keeps.

    Both are None if there was no room for a single page.
    """

    transfers: list[Transfer]
    fetch: Transfer | None
    pin: FetchPin | None


class Load:
    """The transfers to carry out, in order; among them the loads to the GPU, which may bring fewer pages than they carry; and the
    pages that are no longer reused."""

    __slots__ = ("loads", "lost_pages", "transfers")

    def __init__(self, transfers: list[Transfer], loads: list[Transfer], lost_pages: int) -> None:
        self.transfers = transfers
        self.loads = loads
        self.lost_pages = lost_pages


NO_LOAD: Final = Load(NO_TRANSFERS, NO_TRANSFERS, 0)


@trait
class Lower(metaclass=ABCMeta):
    """What lies below the GPU tiers of a cache: reads from there, and all transfers. ``now`` is in seconds."""

    views: dict[int, View]
    """The tiers as each GPU tier sees them, by the index of that GPU tier."""

    @property
    @abstractmethod
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers handed out but not yet ended, oldest first."""

    @abstractmethod
    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        """Start reading the first ``pages`` pages that no tier next to the GPU has into one that is, for a waiting request.

        Fewer are read if fewer fit, or if others have those after them. The path down to them stays in place until the fetch
        ends, and counts as used now. The pin keeps what it brings, and the path above that, until it lets go or the cache is
        reset. The lease must be fresh from ``match`` and cannot be used afterwards.
        """

    @abstractmethod
    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        """Bring what a request reuses of tiers below to the GPU, as far as possible; it must have claimed its slots.

        The first call starts the loads. Pages that no tier next to the GPU has pass through one that is; the first page that
        finds no room there, and all pages after it, are computed instead. So is what loads of other requests have failed to bring
        before the request had its slots. ``short`` is a load that has ended with fewer pages than it carried, the request's own
        or another's on its path (``Lease.arriving``): the request computes what it has not brought.
        """

    @abstractmethod
    def begin(self, transfer: Transfer, now: float) -> Begin:
        """Give a transfer its target slots, or return the transfers that must end first."""

    @abstractmethod
    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        """End a transfer whose pages have all arrived. Returns the write-downs that follow."""

    @abstractmethod
    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        """End a transfer of which only the first ``pages_arrived`` pages arrived, in the order of ``transfer.nodes``.

        Of a recurrent state, all pages must have arrived. If the next page cannot be read (``transfer.has_fault``), its copy in
        the source is dropped too. Returns the write-downs that follow.
        """


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

    def held_extents(self) -> list[Extent]:
        """Return page ids, as extents in any order, among which are all that a later request may hit.

        By default those of the tree. A cache that also finds pages or states elsewhere adds theirs.
        """
        extents: list[Extent] = []
        for node in self.tree.root.descendants():
            extents += node.runs
        return extents


class ServedCache(Reported):
    """A cache that an engine serves requests from, call by call; ``now`` is in seconds.

    A request is matched and admitted, claims its slots, loads, inserts what it has computed, and is finished or released.
    """

    residency: Residency
    tiers: list[Tier]
    gpu: Tier
    """The GPU tier, or the first of them."""
    page_tokens: int
    lower: Lower | None
    """None where nothing lies below."""
    leases: dict[Lease, None]
    """Leases of running requests."""
    watches: list[Watch]
    """Are told of requests, transfers and states; ``watch`` adds one."""
    takes_pages_late: bool = False
    """Whether the pages of a leap are taken after it, when it is known how many steps it had. Requires that making room for
    them starts no transfers."""
    names_answers: bool = False
    """Whether others can find pages of an answer, if it has no ``own_path``, from when its next page is taken."""
    slots_per_page: int = 1
    """Slots that the next page of an answer takes, at most."""
    slides_at: int = -1
    """A growing answer leaves pages behind its window (``slide``) whenever its tokens are so many more than whole pages; -1: it
    never does."""
    step_tokens: int = 0
    """Tokens left in the step that is being formed, when a request is admitted to it."""
    finds_by_pages: bool = False
    """Whether what ``match`` finds with LOOK depends on nothing but pages of the request (``looked_up``)."""
    pauses_after_retraction: bool = True
    """Whether, after a retraction, no request is admitted until one has finished; otherwise, none is in the same step."""
    counts_last_admission: bool = False
    """Whether a request's hits are those of its last admission before its first token, not those of its first one."""

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
        """A number that changes whenever ``match`` may find something else."""
        return self.residency.version

    @property
    def in_flight(self) -> dict[Transfer, None]:
        """Transfers handed out but not yet ended, oldest first."""
        return NOTHING_IN_FLIGHT if self.lower is None else self.lower.in_flight

    def watch(self, watch: Watch) -> None:
        """Tell a watch of requests, transfers and states from now on."""
        self.watches.append(watch)

    def _tell_admission(self, lease: Lease, pages: int, load_pages: int, *, is_admitted: bool) -> None:
        for watch in self.watches:
            if is_admitted:
                watch.admitted(lease, pages, load_pages)
            else:
                watch.refused(lease)

    def index_prompts(self) -> PromptIndex | None:
        """Return an index that is told, from now on, of all that changes what ``match`` finds with LOOK.

        None if only ``version`` tells of changes.
        """
        return self.residency.index_prompts() if self.finds_by_pages else None

    def looked_up(self, request: Request) -> tuple[Extent, ...]:
        """Return the pages that determine what ``match`` finds of a request with LOOK: by default those of its prompt."""
        return request.runs

    def arrives(self, request: Request, now: float) -> None:
        """Take note that a request begins to wait; it is matched when its turn comes.

        A hook of caches that look requests up as soon as they arrive, and hold what they find.
        """

    @abstractmethod
    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        """Find the longest prefix that a request can reuse on a GPU tier, by default the first.

        ``tokens`` is how many a request had that was admitted before, its prompt included; 0: those of its prompt. Changes
        nothing, but may cut a node, unless ``why`` is LOOK; some caches do even then. With LOOK, only ``gpu_pages`` and
        ``leading_pages`` of the result are meant to be read.
        """

    @abstractmethod
    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        """Admit a request that needs ``pages`` GPU pages for now, ``load_pages`` of them from tiers below.

        Pins what is reused and reserves slots for everything else, evicting as needed; ``claim`` then obtains the slots.
        Returns False, with nothing changed, if there is not enough room now, or not enough for the ``in_all`` pages that it will
        need later. The lease must be fresh from ``match``.
        """

    def kept_pages(self, lease: Lease) -> int:
        """Return how many pages of the GPU a request can never have: persistent prompts keep them, and it does not reuse them.

        A hook of caches that keep persistent prompts, without which such a request would wait for ever. The lease must be fresh
        from ``match``.
        """
        return 0

    @abstractmethod
    def claim(self, lease: Lease, now: float) -> Claim:
        """Take the reserved slots.

        They are lost if pages that were leaving have been used again: release the lease and try again later.
        """

    def is_waiting(self, lease: Lease) -> bool:
        """Return whether ``claim`` would only say again that a request waits, for transfers that are under way.

        A hook of caches that can tell this at less cost.
        """
        return False

    def begin_chunk(self, lease: Lease, tokens: int, now: float) -> bool:
        """Prepare a step that computes a prompt up to its first ``tokens`` tokens. Returns False if there is no room for them.

        A hook of caches that take slots step by step and let others find them at once; one that takes all of them at admission
        always has room.
        """
        return True

    def end_chunk(self, lease: Lease, tokens: int, now: float) -> None:
        """Take note that a step has computed a prompt up to its first ``tokens`` tokens, and that others will compute the rest.

        A hook of caches that let others find what is computed before the whole prompt is.
        """

    def slide(self, leaving: list[tuple[Lease, int]], *, in_turn: bool) -> None:
        """Give back what decoding requests do not attend to once so many tokens have been computed, as (lease, tokens).

        ``in_turn``: not yet, but as ``grow`` comes to a request that was admitted no earlier, or with the next call. A hook of
        caches with ``slides_at``.
        """

    def fork(self, lease: Lease, now: float) -> list[Lease]:
        """Let the samples of a request share its prompt, which has been computed, and return the leases of those after the first.

        A hook of caches whose samples share all of a prompt. Without it, the others are admitted, and compute its last token.
        """
        return []

    @abstractmethod
    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        """Give more slots to decoding requests of one GPU tier: all get what they need, or none does.

        Slots that are not free yet are reserved, and ``claim`` obtains them.
        """

    @abstractmethod
    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """Add the pages of the computed prompt, or answer, to the tree. Returns the write-downs that follow."""

    @abstractmethod
    def finish(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        """End a request whose answer is complete: notify policies, then give back all that it holds.

        Without a clock, leave out ``now``: the cache's last use gives the time. Returns the write-downs that follow.
        """

    @abstractmethod
    def release(self, lease: Lease, why: str = LOST, now: float = -inf, tokens: int = 0) -> list[Transfer]:
        """Give back what a request holds whose answer is not complete: its pins, its slots and the slots reserved for it.

        ``why`` is RETRACTED, HANDED_OVER or LOST; the first ``tokens`` tokens of a retracted request have been computed. Returns
        the write-downs that follow.
        """

    @abstractmethod
    def reset(self, gpu: Tier | None = None, now: float = -inf) -> None:
        """Drop every page (the model's weights have changed). Slots in use are freed when their requests and transfers end.

        With ``gpu``, drop only what that GPU tier has, since its engine has failed: no request or transfer uses it any more.
        """

    def adopt_state(self, state: Node, end: Node | None) -> None:
        """Take over a recurrent state that was added to the tree of an empty cache.

        ``end`` is the node that ends where it was saved, if the cache has it. A hook of caches of hybrid models.
        """
        raise AssertionError(f"{type(self).__name__} has no recurrent states")

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
        """Recount everything; raise AssertionError if a count or an invariant is wrong. For tests and runs that verify."""

    def verify(self) -> None:
        """As ``check``, in a run whose policies may have changed anything."""
        check_places(self.tree)
        self.check()


Hits = tuple[int, ...]
"""Hit pages by the level that they come from, from the GPU down."""


NEVER_FITS: Final = object()
"""Returned by a server for a request that could not run even alone."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Server(Reported):
    """Serves requests without a clock: all effects of a request have happened when ``serve`` returns.

    Replay keeps the result of ``serve`` and passes it to ``finish_request`` later, oldest first.
    """

    counts: Any
    """A dataclass of numbers: pages moved and lost."""
    counts_last_admission: bool = False
    """As of ``ServedCache``."""
    preempts_all: bool = False
    """Whether, without room for a request, every request admitted after it is preempted, and it itself, since their blocks are
    free only when the step in flight has ended."""
    loads_first: bool = False
    """Whether a request that loads pages waits for them, while others behind it are admitted."""
    takes_by_step: bool = False
    """Whether the tokens of answers take memory when a step of them is formed (``decode``), not page by page (``grow``)."""
    decodes_past_end: bool = False
    """Whether a request whose last token is being computed takes part in the next step of answers."""
    tries_waiting: bool = False
    """Whether the first one of the queue is looked up in vain in the first step after a request has ended."""

    @abstractmethod
    def serve(self, request: Request, pages: int, now: float) -> Any:
        """Serve a request that needs ``pages`` pages in all. Returns its lease, which has ``hits``, or None if there is no room.

        After None, replay tries the same request again once another one has finished, or rejects it if none is running. If the
        result is ``NEVER_FITS``, replay rejects the request at once and the others stay running.
        """

    @abstractmethod
    def finish_request(self, lease: Any) -> None:
        """End a request whose answer is complete, and give back what it holds."""

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> Any:
        """Admit a request with ``tokens`` known tokens, which takes ``in_all`` pages with its answer, as its first moment.

        The tokens are those of its prompt and, after ``preempt``, of its answer so far. For requests that overlap as it was
        observed: chunks and ``grow`` follow, and ``finish_request``. Otherwise as ``serve``, and a server without moments of its
        own does everything now.
        """
        return self.serve(request, in_all, now)

    def end_pass(self, *, is_step: bool) -> None:
        """Take note that all requests have begun which do so at one time; ``is_step``: which compute in one step."""

    def look_up_waiting(self, request: Request, tokens: int) -> bool:
        """Take note that a waiting request with ``tokens`` known tokens is looked up. Returns False if it has to ask again, since
        pages that it finds are being copied.

        A hook of servers to which each look-up matters, or whose loads take time.
        """
        return True

    def is_loading(self, lease: Any) -> bool:
        """Whether what a request loads is still being copied."""
        return False

    def begin_chunk(self, lease: Any, tokens: int) -> bool:
        """Take note that a step begins which computes a request up to its first ``tokens`` tokens.

        A hook of servers that take pages chunk by chunk, or whose pages can be found from then on. Returns False, with nothing
        changed, if there is no room.
        """
        return True

    def end_chunk(self, lease: Any, tokens: int) -> None:
        """Take note that a prompt has been computed up to its first ``tokens`` tokens.

        A hook of servers whose pages can only be found then.
        """

    def grow(self, lease: Any, pages: int, full_pages: int) -> bool:
        """Give a request that has begun so many pages in all. Returns False, with nothing changed, if there is no room.

        A hook of servers that take pages for answers as these grow. All tokens of the first ``full_pages`` pages are known.
        """
        return True

    def decode(self, lease: Any, tokens: int) -> bool:
        """Take note that a step is formed which computes an answer, so that the request has so many tokens with memory.

        A hook of servers with ``takes_by_step``. Returns False, with nothing changed, if there is no room.
        """
        return True

    def step_tokens(self, tokens: int, *, is_answer: bool) -> int:
        """Return what so many tokens of one request, of its answer or else of its prompt, take of those that a step computes."""
        return tokens

    def preempt(self, lease: Any) -> bool:
        """Take everything back that a request holds, which begins again later.

        A hook of servers of engines that preempt. Returns False, with nothing changed, without moments of its own.
        """
        return False

    def reset(self) -> None:
        """Drop every page, because the model's weights have changed."""
        raise AssertionError(f"{type(self).__name__} cannot be reset")

    def prefetched(self) -> dict[str, int]:
        """Return the counts of prefetches, by name; empty if there are none."""
        return {}

    def verify(self) -> None:
        """Recount what is stored once all requests have ended; raise AssertionError if something is wrong."""
        check_at_rest(self.tree, self.tiers)


class RulesError(Exception):
    """The rules of an engine cannot play this run; the message says which setting to change, and how."""
