"""A cache that passes every call on to another one; subclasses watch some of the calls."""

from math import inf

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.serving import Claim, Fetch, Growth, Load, ServedCache
from kvsim.core.tier import Tier
from kvsim.core.transfer import Hold, Transfer
from kvsim.core.transfers import Begin


class PassingCache(ServedCache):
    """Another cache under a second name: its state is the other one's, and so is every answer."""

    def __init__(self, cache: ServedCache) -> None:
        self.cache = cache
        self.residency = cache.residency
        self.transfers = cache.transfers
        self.tiers = cache.tiers
        self.edges = cache.edges
        self.gpu = cache.gpu
        self.views = cache.views
        self.page_tokens = cache.page_tokens
        self.leases = cache.leases
        self.takes_pages_late = cache.takes_pages_late
        self.pauses_after_retraction = cache.pauses_after_retraction

    @property
    def version(self) -> int:
        return self.cache.version

    @property
    def in_flight(self) -> dict[Transfer, None]:
        return self.cache.in_flight

    def cached_pages(self, request: Request, gpu: Tier | None = None) -> tuple[int, int]:
        return self.cache.cached_pages(request, gpu)

    def match(self, request: Request, gpu: Tier | None = None) -> Lease:
        return self.cache.match(request, gpu)

    def resume(self, request: Request, tokens: int, gpu: Tier | None = None) -> Lease:
        return self.cache.resume(request, tokens, gpu)

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        return self.cache.admit(lease, pages, now, load_pages)

    def can_admit(self, lease: Lease, pages: int) -> bool:
        return self.cache.can_admit(lease, pages)

    def kept_pages(self, lease: Lease) -> int:
        return self.cache.kept_pages(lease)

    def claim(self, lease: Lease, now: float) -> Claim:
        return self.cache.claim(lease, now)

    def begin_chunk(self, lease: Lease, tokens: int, now: float) -> bool:
        return self.cache.begin_chunk(lease, tokens, now)

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        return self.cache.grow(needs, now)

    def room_to_fetch(self, lease: Lease) -> int:
        return self.cache.room_to_fetch(lease)

    def fetch(self, lease: Lease, pages: int, now: float) -> Fetch:
        return self.cache.fetch(lease, pages, now)

    def hold(self, fetch: Transfer) -> Hold:
        return self.cache.hold(fetch)

    def let_go(self, hold: Hold) -> None:
        self.cache.let_go(hold)

    def load(self, lease: Lease, now: float) -> Load:
        return self.cache.load(lease, now)

    def shorten_hit(self, lease: Lease, load: Transfer | None, now: float) -> int:
        return self.cache.shorten_hit(lease, load, now)

    def arriving(self, lease: Lease) -> list[Transfer]:
        return self.cache.arriving(lease)

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        return self.cache.insert(lease, now)

    def finish_request(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        return self.cache.finish_request(lease, now)

    def retract(self, lease: Lease, tokens: int, now: float) -> None:
        self.cache.retract(lease, tokens, now)

    def release(self, lease: Lease) -> None:
        self.cache.release(lease)

    def end_prefill(self, lease: Lease, now: float) -> list[Transfer]:
        return self.cache.end_prefill(lease, now)

    def lose(self, gpu: Tier, now: float) -> None:
        self.cache.lose(gpu, now)

    def begin(self, transfer: Transfer, now: float) -> Begin:
        return self.cache.begin(transfer, now)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        return self.cache.finish(transfer, now)

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        return self.cache.abort(transfer, pages_arrived, now)

    def reset(self) -> None:
        self.cache.reset()

    def describe_checkpoints(self) -> dict[str, int]:
        return self.cache.describe_checkpoints()

    def pages_known(self) -> dict[int, int] | None:
        return self.cache.pages_known()

    def check(self) -> None:
        self.cache.check()
