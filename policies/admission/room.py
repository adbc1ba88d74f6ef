"""How long prompts wait for what answers hold, memory and places to run: an estimate from what a server knows of them."""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from kvsim.core.pool import UNLIMITED

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, less their whole parts, are spread evenly however many there are."""
LATEST = 1000
"""Answers whose lengths count."""

Prefills = Sequence[tuple[int, int]]
"""Prompts as (first token to compute, tokens)."""


class AnswerLengths:
    """The lengths of the latest answers, in tokens: what is to be expected of those that are being generated."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, tokens: int) -> None:
        """An answer is complete."""
        self._latest.append(tokens)
        insort(self._sorted, tokens)
        self._sum += tokens
        if len(self._latest) > LATEST:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._sum -= oldest

    @property
    def mean(self) -> float:
        """The mean of these lengths; there must be one."""
        return self._sum / len(self._sorted)

    def left(self, generated: int, quantile: float) -> float:
        """Return the tokens that an answer still has after ``generated`` ones, at a quantile, 0 to below 1, of what was left of
        those that were longer; the mean of all if none was."""
        first = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first
        if not longer:
            return self.mean
        return float(self._sorted[first + int(quantile * longer)] - generated)


class Memory:
    """The KV of an engine as its answers go on: each takes a token a step, and gives all of its own back when it ends."""

    def __init__(
        self,
        free_tokens: int,
        decoding: tuple[int, int],
        step_s: Callable[[int, int], float],
        most_requests: int = UNLIMITED,
    ) -> None:
        """``decoding`` are answers and the tokens of their prompts; ``step_s`` tells the seconds of a step of such answers. So
        many requests run at a time, at the most."""
        self.free = float(free_tokens)
        self.most_requests = most_requests
        self.requests, self.context = decoding
        self.steps = 0.0
        """Steps from now."""
        self._step_s = step_s
        self._ends: list[tuple[float, float, int]] = []
        """Step in which each answer ends, tokens that it then gives back, tokens of its prompt."""

    def hold(self, held: Sequence[tuple[int, int]], left: Sequence[float]) -> None:
        """Note the answers that are being generated now, as (prompt tokens, generated tokens), with the steps left of each."""
        self._ends = [(steps, prompt + done + steps, prompt) for (prompt, done), steps in zip(held, left, strict=True)]
        heapify(self._ends)

    def begin(self, prompt: int, taken: int, steps: float) -> None:
        """An answer begins, for which ``taken`` tokens have been taken, and ends after so many steps."""
        self.requests += 1
        self.context += prompt
        heappush(self._ends, (self.steps + steps, taken + steps, prompt))

    def pass_steps(self, steps: float) -> None:
        """Let steps pass."""
        until = self.steps + steps
        while self._ends and self._ends[0][0] <= until:
            self._end_next()
        self._grow(until)

    def takes(self, tokens: int, beside: int = 0) -> bool:
        """Whether a prompt of so many tokens may run now, beside the answers and so many other prompts."""
        return self.free >= tokens and len(self._ends) + beside < self.most_requests

    def wait(self, tokens: int) -> float:
        """Let steps pass until such a prompt may run, or no answer is left. Returns the seconds of these steps."""
        seconds = 0.0
        while self._ends and not self.takes(tokens):
            steps = max(0.0, self._ends[0][0] - self.steps)
            seconds += steps * self._step_s(max(1, self.requests), max(1, self.context))
            self._end_next()
        return seconds

    def _end_next(self) -> None:
        self._grow(max(self._ends[0][0], self.steps))
        _, held, prompt = heappop(self._ends)
        self.free += held
        self.requests -= 1
        self.context -= prompt

    def _grow(self, step: float) -> None:
        self.free -= (step - self.steps) * len(self._ends)
        self.steps = step


class Forecast:
    """What becomes of an engine until a prompt is computed: prompts take memory and are computed in turn, answers end."""

    def __init__(self, memory: Memory, prefill_s: Callable[[Prefills, int, int], float], batch_tokens: int, steps: float) -> None:
        """``prefill_s`` tells the seconds of prompts beside answers; a step has ``batch_tokens``, an answer takes ``steps``."""
        self.memory = memory
        self._prefill_s = prefill_s
        self._batch_tokens = batch_tokens
        self._steps = steps
        self._batch: list[tuple[int, int]] = []

    def seconds(self, begun: Prefills, queued: Prefills, computing_s: float) -> float:
        """Return the seconds until all prompts are computed: those that have memory, then the others, which wait for that and for
        a place to run, in turn. The step under way has begun ``computing_s`` ago."""
        memory, seconds = self.memory, -computing_s
        self._batch.extend(begun)
        for start, tokens in queued:
            if not memory.takes(tokens - start, len(self._batch)):
                seconds += self._compute()
                seconds = max(0.0, seconds) + memory.wait(tokens - start)
            memory.free -= tokens - start
            self._batch.append((start, tokens))
        return max(0.0, seconds + self._compute())

    def _compute(self) -> float:
        """Compute the prompts that have memory. Returns the seconds."""
        memory, batch = self.memory, self._batch
        if not batch:
            return 0.0
        seconds = self._prefill_s(batch, memory.requests, memory.context)
        tokens = sum([tokens - start for start, tokens in batch])
        memory.pass_steps(float(-(-tokens // max(1, self._batch_tokens - memory.requests))))
        for start, prompt in batch:
            memory.begin(prompt, prompt - start, self._steps)
        self._batch = []
        return seconds
