"""Hit rates over time, in bounded memory."""

from collections import deque

from kvsim.report.shadow.drawing import Line
from kvsim.results.statistics import mean_of
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.snapshot import Snapshot

MOST_POINTS = 600
"""Points kept of each line; at that number, every second one is dropped and half as many are taken from then on."""
LEAST_STRETCHES = 3
ENGINE = "the engine"


class Observed:
    """What the engine itself says of the last ``window`` requests."""

    def __init__(self, window: int) -> None:
        self._last: deque[tuple[int, int]] = deque(maxlen=window)
        self._cached = self._prompts = 0

    def add(self, request: LiveRequest) -> None:
        """Count a request whose engine has said how much it had cached."""
        if request.cached_tokens is None:
            return
        if len(self._last) == self._last.maxlen:
            cached, prompt = self._last[0]
            self._cached -= cached
            self._prompts -= prompt
        self._last.append((request.cached_tokens, request.prompt_tokens))
        self._cached += request.cached_tokens
        self._prompts += request.prompt_tokens

    @property
    def hit_rate(self) -> float | None:
        """Cached tokens per prompt token; None if it says nothing."""
        return self._cached / self._prompts if self._prompts else None


class Stretches:
    """How much the ghosts' gains vary from one stretch of ``window`` requests to the next; stretches do not overlap."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._next = window
        self._gains: dict[str, deque[float]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Take the gains over the last ``window`` requests, if no earlier stretch has any of them."""
        if snapshot.requests < self._next:
            return
        self._next = snapshot.requests + self._window
        first = snapshot.ghosts[0].recent_hit_rate
        for ghost in snapshot.ghosts[1:]:
            if first is not None and ghost.recent_hit_rate is not None:
                gains = self._gains.setdefault(ghost.name, deque(maxlen=MOST_POINTS))
                gains.append(100 * (ghost.recent_hit_rate - first))

    def noise(self) -> dict[str, float]:
        """Return half of the 95 % interval of each ghost's mean gain, in points, from three stretches on."""
        means = {name: mean_of(gains) for name, gains in self._gains.items() if len(gains) >= LEAST_STRETCHES}
        return {name: mean.half_width for name, mean in means.items() if mean is not None and mean.half_width is not None}


class History:
    """Recent hit rates of the engine and the ghosts at the moments at which they were looked at."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._rates: list[dict[str, float | None]] = []
        self._every = 1
        self._looks = 0
        self._requests = -1

    def add(self, snapshot: Snapshot, engine: float | None) -> None:
        """Take the rates of this moment, unless nothing has come since the last one."""
        if snapshot.requests == self._requests or not snapshot.requests:
            return
        self._requests = snapshot.requests
        self._looks += 1
        if self._looks % self._every:
            return
        self._times.append(snapshot.at_s)
        self._rates.append({ENGINE: engine} | {ghost.name: ghost.recent_hit_rate for ghost in snapshot.ghosts})
        if len(self._times) > MOST_POINTS:
            del self._times[::2], self._rates[::2]
            self._every *= 2

    def points(self) -> list[dict[str, float]]:
        """Return the rates at each moment, by ``shadow/NAME``, with the moment as ``shadow/at_s``."""
        return [
            {"shadow/at_s": at_s} | {f"shadow/{name}": rate for name, rate in rates.items() if rate is not None}
            for at_s, rates in zip(self._times, self._rates, strict=True)
        ]

    def lines(self) -> list[Line]:
        """Return a line for the engine, if it says anything, and for each ghost."""
        names = list(dict.fromkeys(name for rates in self._rates for name in rates))
        lines = [
            Line(name, [(at_s, rates.get(name)) for at_s, rates in zip(self._times, self._rates, strict=True)]) for name in names
        ]
        return [line for line in lines if any(rate is not None for _, rate in line.points)]
