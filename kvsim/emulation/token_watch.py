"""When the tokens of answers appear, one by one, though an engine may take many decode steps in one event."""

from collections.abc import Callable

from simpy import Environment, Event

from kvsim.engine.job import Job
from kvsim.engine.substrate import Work
from kvsim.engine.watch import EngineWatch


class TokenWatch(EngineWatch):
    """Calls ``on_tokens`` with the numbers of the requests that get their next token, at the end of each decode step."""

    def __init__(self, env: Environment, leap_s: Callable[[Work, int], float], on_tokens: Callable[[list[int]], None]) -> None:
        """``leap_s`` tells how long the first steps of a leap take."""
        self._env = env
        self._leap_s = leap_s
        self._on_tokens = on_tokens

    def computes(self, work: Work, done: Event) -> None:
        requests = [job.request.index for job in work.decoding if isinstance(job, Job)]
        if not requests:
            return
        seen = 0

        def step(_: Event) -> None:
            nonlocal seen
            if not done.processed:
                seen += 1
                self._on_tokens(requests)

        def end(event: Event) -> None:
            for _ in range(int(event.value or 0) - seen):
                self._on_tokens(requests)

        for steps in range(1, work.max_steps):
            self._env.timeout(self._leap_s(work, steps)).callbacks.append(step)
        done.callbacks.append(end)
