"""What ``ttl_s: learned`` learns about sessions: their pauses, their lengths and their queueing delays.

The rules are those of Continuum (arXiv:2511.02230, 2025); ttl.py states them.
"""

from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from math import inf, sqrt

from kvsim.core.request import Request

ENOUGH_PAUSES = 100
FIRST_TTL_S = 2.0
QUEUEING_WINDOW = 100


class Pauses:
    """Observed pauses, and the time to live that pays best.

    Sorting them again after each pause would cost too much, so a choice may ignore up to a tenth of them, the latest ones.
    """

    def __init__(self) -> None:
        self._pauses_s: list[float] = []
        self._considered = 0
        self._taus_s = [0.0]
        self._prices_s: list[float] = []

    def __len__(self) -> int:
        return len(self._pauses_s)

    def add(self, pause_s: float) -> None:
        self._pauses_s.append(pause_s)

    def best_s(self, gain_s: float) -> float:
        """Return the tau among 0 and the pauses with the highest ``P(pause <= tau) * gain_s - tau``; the least of equals."""
        if len(self) > 1.1 * self._considered:
            self._consider()
        return self._taus_s[bisect_left(self._prices_s, gain_s)]

    def _consider(self) -> None:
        """Keep the taus that are best for some gain (the upper hull of the distribution) and the gain from which each is best.

        That gain, the price of a tau, is the additional waiting since the previous tau per additional pause that ends in time.
        """
        self._pauses_s.sort()
        self._considered = count = len(self)
        taus_s, ranks, prices_s = [0.0], [0], [-inf]
        for rank, pause_s in enumerate(self._pauses_s, 1):
            while prices_s[-1] >= (price_s := (pause_s - taus_s[-1]) / (rank - ranks[-1])):
                del taus_s[-1], ranks[-1], prices_s[-1]
            taus_s.append(pause_s)
            ranks.append(rank)
            prices_s.append(price_s)
        self._taus_s = taus_s
        self._prices_s = [count * price_s for price_s in prices_s[1:]]


class Memory:
    """Correlation of turns done and turns left over ended sessions: whether a long session is near its end."""

    def __init__(self) -> None:
        self._pairs = self._done = self._left = self._done_squares = self._left_squares = self._products = 0

    def add(self, turns: int) -> None:
        """Add a session that ended after ``turns`` turns: the pairs (1, turns - 1) ... (turns, 0)."""
        done, done_squares = turns * (turns + 1) // 2, turns * (turns + 1) * (2 * turns + 1) // 6
        self._pairs += turns
        self._done += done
        self._left += done - turns
        self._done_squares += done_squares
        self._left_squares += done_squares - turns * turns
        self._products += turns * done - done_squares

    @property
    def eta(self) -> float:
        """The negated correlation, -1 to 1; 1 while it is undefined."""
        pairs = self._pairs
        spread = pairs * self._done_squares - self._done**2, pairs * self._left_squares - self._left**2
        if not all(spread):
            return 1.0
        together = pairs * self._products - self._done * self._left
        return min(1.0, max(-1.0, -together / sqrt(spread[0]) / sqrt(spread[1])))


class Continuum:
    """Observes the requests of sessions, and decides how long to keep what a request has used."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._tools: defaultdict[str, Pauses] = defaultdict(Pauses)
        self._all = Pauses()
        self._longest_pause_s = 0.0
        self._delays_s: deque[float] = deque(maxlen=QUEUEING_WINDOW)
        self._arrived_s: dict[int, float] = {}
        """Arrival times of waiting requests, by index."""
        self._running: set[int] = set()
        self._turns: dict[int, int] = {}
        self._idle: OrderedDict[int, tuple[float, str]] = OrderedDict()
        """Paused sessions, longest pause first: when the last request finished, and its kind."""

    def observe_arrival(self, request: Request, now: float) -> None:
        """Record that a request has arrived and waits."""
        self._arrived_s[request.index] = now
        self._note_return(request, now)

    def observe_admission(self, request: Request, now: float) -> None:
        """Record an admission; a request that did not wait arrives now. Repeated calls have no effect."""
        if request.index in self._arrived_s:
            self._delays_s.append(now - self._arrived_s.pop(request.index))
        elif request.index not in self._running:
            self._note_return(request, now)

    def observe_finish(self, request: Request, now: float) -> None:
        """Record that a request has finished. Sessions that have been silent for too long count as ended."""
        session, idle = request.session, self._idle
        self._running.discard(request.index)
        self._turns[session] = self._turns.get(session, 0) + 1
        idle[session] = now, request.kind
        idle.move_to_end(session)
        while len(self._all) > ENOUGH_PAUSES and now - next(iter(idle.values()))[0] > self._longest_pause_s:
            ended, _ = idle.popitem(last=False)
            self.memory.add(self._turns.pop(ended))

    def ttl_s(self, kind: str, reload_s: float) -> float:
        """Return how long to keep what takes ``reload_s`` seconds to get back, after a request of this kind."""
        pauses = self._tools[kind]
        if len(pauses) <= ENOUGH_PAUSES:
            pauses = self._all
        if len(pauses) <= ENOUGH_PAUSES:
            return FIRST_TTL_S
        queueing_s = sum(self._delays_s) / len(self._delays_s) if self._delays_s else 0.0
        return pauses.best_s(self.memory.eta * queueing_s + reload_s)

    def _note_return(self, request: Request, now: float) -> None:
        """Record the pause of a session that has returned."""
        self._running.add(request.index)
        finished_s, kind = self._idle.pop(request.session, (inf, ""))
        if finished_s <= now:
            pause_s = now - finished_s
            self._tools[kind].add(pause_s)
            self._all.add(pause_s)
            self._longest_pause_s = max(self._longest_pause_s, pause_s)
