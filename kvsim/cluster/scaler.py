"""Starts and stops the engines of a cluster, as an autoscaling policy says."""

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final, cast

from simpy import Event

from kvsim.cluster.homeless import Homeless
from kvsim.cluster.observed_load import ObservedLoad, SeenCluster
from kvsim.cluster.router import Router
from kvsim.core.answers import refused, whole_number
from kvsim.core.pool import UNLIMITED
from kvsim.core.subclassing import mypyc_attr
from kvsim.engine.engine import Engine
from kvsim.engine.scaling import DRAINING, OFF, STARTING, UP, Scaling
from kvsim.policies.autoscaling.base import SHORTEST_S

if TYPE_CHECKING:
    from kvsim.policies.autoscaling.base import AutoscalingPolicy

IDLE_S: Final = 86_400.0
"""A policy is asked no more once nothing else has been due for a day of the clock: the requests that are left are stuck."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Scaler:
    """Asks the policy how many engines should serve, and brings that about.

    off        not there, and its cache is empty
    starting   for start_s seconds; taken back, it is off at once
    up         the router sends it requests
    draining   the router sends it none; it is off once its requests have ended, and its last step and its transfers
    """

    def __init__(
        self,
        policy: "AutoscalingPolicy",
        engines: Sequence[Engine],
        router: Router,
        *,
        least: int,
        first: int,
        start_s: float,
        loses_all: bool = False,
    ) -> None:
        """The first ``first`` engines are up at the start, and at least ``least`` are at any time. ``loses_all``: the tiers
        below the GPU of an engine are its own, and end with it; otherwise these stay."""
        self.policy = policy
        self.engines = engines
        self.env = engines[0].env
        self.router = router
        self.least = least
        self.load = ObservedLoad()
        self.scaling = Scaling(engines=len(engines), start_s=start_s)
        self.log: Callable[..., None] | None = None
        """Is told of each change: what it is, and the ``engine``."""
        self.loses_all = loses_all
        self._homeless: Homeless | None = None
        self._state = [UP if number < first else OFF for number in range(len(engines))]
        self._since = list(range(len(engines)))
        """The number of each engine's last start, of all starts: the higher, the later."""
        self._starts = len(engines)
        self._wanted = first
        self._idle_s = 0.0
        self._ask: Any = policy.engines
        """Typed so that its answers may be anything."""
        self._name = f"the autoscaling policy {type(policy).__name__}"
        self._interval_s = inf
        """Seconds from one question to the next."""

    # --- the cluster tells ------------------------------------------------------------------------------------------------

    def start(self, homeless: Homeless) -> None:
        """Begin a run: engines that are not up at the start are off. ``homeless`` are the requests without an engine."""
        self._homeless = homeless
        for engine in self.engines:
            if self._state[engine.number] == OFF:
                engine.is_up = False
                self.router.down(engine.number, self.env.now)
        self._note()
        self._interval_s = asked_every_s(self.policy, self._name)
        if self._interval_s < inf:
            self._wait()

    def left(self, number: int) -> None:
        """A request has left an engine; if that drains, it may have been the last one."""
        if self._state[number] == DRAINING:
            self._stop_if_empty(number)

    # --- the policy is asked ----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        self.env.timeout(self._interval_s).callbacks.append(self._tick)

    def _tick(self, _: Event) -> None:
        """Ask the policy, and again after the interval."""
        now = float(self.env.now)
        if self.engines[0].frontend.is_done:
            return
        self._idle_s = 0.0 if self.env.peek() < inf else self._idle_s + self._interval_s
        if self._idle_s > IDLE_S:
            return
        most = len(self.engines)
        serving = [engine for engine in self.engines if self._state[engine.number] == UP]
        counts = self._count(STARTING), self._count(DRAINING)
        kept = len(self._homeless) if self._homeless is not None else 0
        seen = SeenCluster(self.load, now, serving, counts, (self.least, most), kept)
        answer = whole_number(self._name, "engines()", self._ask(seen), UNLIMITED)
        self._wanted = min(max(answer, self.least), most)
        self.load.begin(now)
        self._adapt()
        self._wait()

    def _adapt(self) -> None:
        """Start and stop engines until as many as are wanted are up or starting, as far as others have stopped."""
        there = self._count(UP) + self._count(STARTING)
        while there > self._wanted:
            starting = [number for number in range(len(self.engines)) if self._state[number] == STARTING]
            candidates = starting or [number for number in range(len(self.engines)) if self._state[number] == UP]
            number = max(candidates, key=self._since.__getitem__)
            if starting:
                self._set(number, OFF, "stop")
            else:
                self._drain(number)
            there -= 1
        for number in range(len(self.engines)):
            if there >= self._wanted:
                break
            if self._state[number] == OFF:
                self._begin(number)
                there += 1

    def _count(self, state: str) -> int:
        return self._state.count(state)

    # --- engines come -----------------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        self._starts += 1
        self._since[number] = self._starts
        self.scaling.starts += 1
        self._set(number, STARTING, "start")
        started = self.env.timeout(self.scaling.start_s, (number, self._starts))
        started.callbacks.append(self._started)

    def _started(self, event: Event) -> None:
        """Let an engine serve, unless its start was taken back."""
        number, start = cast(tuple[int, int], event.value)
        if self._state[number] != STARTING or self._since[number] != start or self.engines[0].frontend.is_done:
            return
        engine = self.engines[number]
        engine.is_up = True
        self._set(number, UP, "up")
        self.router.up(number, self.env.now)
        engine.start()
        if self._homeless is not None:
            self._homeless.offer()

    # --- engines go -------------------------------------------------------------------------------------------------------

    def _drain(self, number: int) -> None:
        self._set(number, DRAINING, "drain")
        self.router.drain(number, self.env.now)
        self._stop_if_empty(number)

    def _stop_if_empty(self, number: int) -> None:
        if not self.router.under_way(number):
            self.env.process(self._stop(number))

    def _stop(self, number: int) -> Any:
        """Take an engine away whose requests have ended, after its step and its transfers. To be yielded from."""
        engine = self.engines[number]
        yield self.env.timeout(0.0)
        while not engine.frontend.is_done:
            last = engine.last_step
            if last is None:
                transfers = engine.transfers()
                if not transfers:
                    break
                last = engine.mover.end_of(transfers[0])
            yield last
            yield self.env.timeout(0.0)
        if engine.frontend.is_done or self._state[number] != DRAINING:
            return
        engine.rest()
        if self.loses_all:
            engine.cache.reset()
        else:
            engine.cache.reset(engine.gpu, self.env.now)
        self._set(number, OFF, "stop")
        self.router.down(number, self.env.now)
        self._adapt()

    # --- notes ------------------------------------------------------------------------------------------------------------

    def _set(self, number: int, state: str, event: str) -> None:
        self._state[number] = state
        if state == OFF:
            self.scaling.stops += 1
        self._note()
        if self.log is not None:
            self.log(event, engine=number)

    def _note(self) -> None:
        self.scaling.note(float(self.env.now), self._count(UP), self._count(STARTING), self._count(DRAINING))

    def check(self) -> None:
        """Recount: engines that are up get requests, and only those; there are neither too few nor too many."""
        for engine in self.engines:
            state = self._state[engine.number]
            assert engine.is_up == (state in (UP, DRAINING)), f"engine {engine.number} is {state}"
            assert self.router.is_offered(engine.number) == (state == UP), f"engine {engine.number} is {state}"
            if state in (OFF, STARTING):
                assert engine.is_idle and not self.router.engines[engine.number].outstanding_requests
                assert not engine.gpu.held_pages and engine.gpu.pool.free == engine.gpu.pool.capacity
        there = self._count(UP) + self._count(STARTING)
        assert self.least <= there and self._count(UP) >= min(self.least, there), (self.least, self._state)


def asked_every_s(policy: Any, name: str) -> float:
    """Return the seconds from one question to an autoscaling policy to the next, which may answer anything. Raises PolicyError,
    with its ``name``."""
    seconds: Any = policy.asked_every_s
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= SHORTEST_S:
        raise refused(name, "asked_every_s", seconds, f"a number of at least {SHORTEST_S}")
    return float(seconds)
