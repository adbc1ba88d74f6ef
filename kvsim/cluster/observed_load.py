"""What an autoscaler knows of a cluster: counts since it was asked last, and the state of the engines now."""

from collections.abc import Sequence

from kvsim.core.pool import UNLIMITED
from kvsim.core.request import Request
from kvsim.engine.engine import Engine


class ObservedLoad:
    """Counts requests, tokens and times of an interval. Requests under way are counted at all times."""

    def __init__(self) -> None:
        self._began_s = self._last_s = 0.0
        self._under_way = 0
        self._request_s = 0.0
        """Sum of the times, in the interval, that requests were under way."""
        self.arrived_requests = self.arrived_tokens = 0
        self.begun_tokens = self.hit_tokens = 0
        self.ended_requests = self.ended_tokens = 0
        self.ttft_s: list[float] = []
        self.tpot_s: list[float] = []

    def begin(self, now: float) -> None:
        """Begin an interval."""
        self._count(now, 0)
        self._began_s, self._request_s = now, 0.0
        self.arrived_requests = self.arrived_tokens = 0
        self.begun_tokens = self.hit_tokens = 0
        self.ended_requests = self.ended_tokens = 0
        self.ttft_s, self.tpot_s = [], []

    def arrived(self, request: Request, now: float) -> None:
        """A request has arrived."""
        self._count(now, 1)
        self.arrived_requests += 1
        self.arrived_tokens += request.prompt_tokens

    def begun(self, request: Request, hit_tokens: int, ttft_s: float) -> None:
        """The first token of a request has been generated; ``hit_tokens`` are those of all pages that it has hit."""
        self.begun_tokens += request.prompt_tokens
        self.hit_tokens += min(hit_tokens, request.prompt_tokens)
        self.ttft_s.append(ttft_s)

    def ended(self, request: Request, tpot_s: float, now: float, *, is_answered: bool) -> None:
        """A request has ended; ``tpot_s`` is nan if it was rejected, or has one token."""
        self._count(now, -1)
        if is_answered:
            self.ended_requests += 1
            self.ended_tokens += request.output_tokens * request.samples
            if tpot_s == tpot_s:
                self.tpot_s.append(tpot_s)

    def _count(self, now: float, more: int) -> None:
        self._request_s += self._under_way * (now - self._last_s)
        self._last_s = now
        self._under_way += more

    def mean_requests(self, now: float) -> float:
        """Return the mean number of requests under way in the interval so far."""
        length_s = now - self._began_s
        if length_s <= 0.0:
            return float(self._under_way)
        return (self._request_s + self._under_way * (now - self._last_s)) / length_s

    def interval_s(self, now: float) -> float:
        """Return the length of the interval so far."""
        return now - self._began_s


class SeenCluster:
    """The ``ClusterStatus`` of one question."""

    def __init__(
        self,
        load: ObservedLoad,
        now: float,
        serving: Sequence[Engine],
        counts: tuple[int, int],
        bounds: tuple[int, int],
        kept: int,
    ) -> None:
        """``serving`` are the engines that are up, ``counts`` the numbers of those that start and drain, ``bounds`` the fewest
        and the most engines, ``kept`` the requests before the router."""
        self._load = load
        self._now = now
        self._up = len(serving)
        self._starting, self._draining = counts
        self._least, self._most = bounds
        self._waiting = kept + sum([len(engine.waiting.queue) for engine in serving])
        self._running = sum([len(engine.schedule) for engine in serving])
        self._kv_use = sum([kv_use(engine) for engine in serving], 0.0) / len(serving) if serving else 0.0

    @property
    def now(self) -> float:
        return self._now

    @property
    def interval_s(self) -> float:
        return self._load.interval_s(self._now)

    @property
    def up(self) -> int:
        return self._up

    @property
    def starting(self) -> int:
        return self._starting

    @property
    def draining(self) -> int:
        return self._draining

    @property
    def least_engines(self) -> int:
        return self._least

    @property
    def most_engines(self) -> int:
        return self._most

    @property
    def waiting_requests(self) -> int:
        return self._waiting

    @property
    def running_requests(self) -> int:
        return self._running

    @property
    def kv_use(self) -> float:
        return self._kv_use

    @property
    def mean_requests(self) -> float:
        return self._load.mean_requests(self._now)

    @property
    def arrived_requests(self) -> int:
        return self._load.arrived_requests

    @property
    def arrived_tokens(self) -> int:
        return self._load.arrived_tokens

    @property
    def begun_tokens(self) -> int:
        return self._load.begun_tokens

    @property
    def hit_tokens(self) -> int:
        return self._load.hit_tokens

    @property
    def ended_requests(self) -> int:
        return self._load.ended_requests

    @property
    def ended_tokens(self) -> int:
        return self._load.ended_tokens

    @property
    def ttft_s(self) -> tuple[float, ...]:
        return tuple(self._load.ttft_s)

    @property
    def tpot_s(self) -> tuple[float, ...]:
        return tuple(self._load.tpot_s)


def kv_use(engine: Engine) -> float:
    """Return the share of an engine's KV capacity that requests use: without free slots, idle cached pages and leaving ones."""
    gpu = engine.gpu
    if gpu.pool.capacity >= UNLIMITED or not gpu.pool.capacity:
        return 0.0
    return (gpu.pool.capacity - free_pages(engine)) / gpu.pool.capacity


def free_pages(engine: Engine) -> int:
    """Return the slots of an engine's GPU that no request uses: free ones, idle cached pages and leaving ones."""
    gpu = engine.gpu
    return gpu.pool.free + gpu.evictable_pages + gpu.leaving_pages
