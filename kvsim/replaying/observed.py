"""Replay of requests in the order in which a real engine admitted them, with the overlaps that they had there."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

import numpy as np

from kvsim.core.request import Request
from kvsim.core.serving import NEVER_FITS, Hits, Server
from kvsim.engine.outcome import Outcome, tier_names
from kvsim.replaying.moments import Moments
from kvsim.replaying.replay import Replay, Rows
from kvsim.replaying.settings import ReplaySettings

ENDED, COMPUTED, GROWN, FORMED, PREEMPTED, RESUMED, LOOKED_UP, ADMITTED = range(8)
"""What happens to a request, in the order in which it takes effect if several things happen at the same time."""
SAME_STEP_S = 0.003
"""Tokens of a step reach clients within this time, and steps take longer."""
Event = tuple[float, int, int, int, int]
"""Time, what happens, the request, how often it had been preempted when that was noted, and a number of tokens or pages."""


class ObservedReplay(Replay):
    """Plays requests by the moments of a real run. Transfers take no time.

    looked up   if its server lets a request wait for what it loads: not later than the first one behind it is admitted. It then
                takes its pages, unless it finds pages that are being copied; then, it asks again in the next step
    admitted    it is looked up, if it has not been, and the first chunk of its prompt begins
    formed      running requests get their tokens of the step, and pages for these, in the order of admission: a chunk of a
                prompt, or one token of an answer. Where steps were not seen, chunks take the time until the first token evenly
    grown       its answer takes the next page, when the token before that page is there; vLLM then finds the pages before it
    preempted   it gives its pages back
    resumed     it is looked up again, with its answer so far, all of which is computed until its next token
    ended       all of its answer can be found, if answers are cached, and its pages can be evicted

    Who has no room must have found some: the engine knows of an end before its client does, so the running request that ends next
    ends early. But nobody sees that a request is preempted before its first token. So if the last one to be admitted is without
    one, it is preempted, and resumes when there is room for all its tokens, at its first one at the latest.

    A request's hits are those of its first admission or, if its server counts so, of the last one before its first token.
    """

    def __init__(self, server: Server, settings: ReplaySettings, chunk_tokens: int) -> None:
        """``chunk_tokens`` are those of a prompt that one step computes."""
        super().__init__(server, settings)
        self.chunk_tokens = chunk_tokens
        self.now_s = 0.0
        """The time of what happens now."""

    def run_observed(self, requests: Sequence[Request], moments: Moments) -> Outcome:
        """Play the requests; those that are not played, or can never fit, are rejected."""
        began = perf_counter()
        self._requests, self._moments = requests, moments
        self._rows: list[Hits | None] = [None] * len(requests)
        self._running: dict[int, Any] = {}
        """Leases, in the order of admission."""
        self._computed: dict[int, int] = {}
        """By running request, how many of its known tokens have been computed."""
        self._chunk_ends: dict[int, int] = {}
        """By running request, where the chunk ends that is being computed."""
        self._known: dict[int, int] = {}
        """By running request, its tokens when it was admitted: those of its prompt, and of its answer so far."""
        self._results = set[int]()
        """Running requests whose last chunk has been computed, as the steps say, before its result is known."""
        self._waiting: list[int] = []
        """Requests that were preempted unseen, the next to resume first."""
        self._paused: list[int] = []
        """Requests that were preempted as has been seen, the next to resume first."""
        self._preemptions = [0] * len(requests)
        self._budget = 0
        """Tokens left of the step that is being formed."""
        self._loading: dict[int, Any] = {}
        """Leases of requests that have been looked up, and are not admitted yet."""
        self._asking: list[int] = []
        """Requests that ask again."""
        self._takes_by_step = self.server.takes_by_step and len(moments.formed_s) > 0
        """Whether steps were seen, and the server takes memory by them."""
        self._admits = True
        """Whether requests may be admitted to the step that is being formed."""
        self._may_try, self._has_formed = True, False
        """Whether the first one in line may be admitted, since another has ended, and whether a step is formed now."""
        self._line = self._in_line() if self.server.loads_first or self.server.tries_waiting else []
        """Requests that have not been looked up, the next one last."""
        self._events: list[Event] = []
        for number, at_s in enumerate(moments.admitted_s.tolist()):
            if at_s == at_s:
                self._note(at_s, ADMITTED, number)
        for number, at_s in self._looked_up_s() if self.server.loads_first else ():
            self._note(at_s, LOOKED_UP, number)
        self._pauses_s = _merged(moments.pauses_s, moments.brief_s if self.server.preempts_all else {})
        for number, pauses_s in self._pauses_s.items():
            for at_s, _ in pauses_s:
                self._note(at_s, PREEMPTED, number)
        for at_s in moments.formed_s.tolist():
            heappush(self._events, (at_s, FORMED, 0, 0, 0))
        while self._events:
            if self._events[0][0] > self.now_s:
                self._end_pass()
            self._happen(heappop(self._events))
        self._end_pass()
        rows = Rows(len(tier_names(self.server.tiers)))
        rows.add(self._rows)
        return self._outcome(requests, rows, perf_counter() - began)

    def _end_pass(self) -> None:
        """All that happens at a time has happened."""
        self._look_up_waiting()
        self._has_formed = False
        self.server.end_pass(is_step=len(self._moments.formed_s) > 0)

    def _note(self, at_s: float, what: int, number: int, amount: int = 0) -> None:
        heappush(self._events, (at_s, what, number, self._preemptions[number], amount))

    def _happen(self, event: Event) -> None:
        now, what, number, preemptions, amount = event
        self.now_s = now
        if what == FORMED:
            self._form()
            return
        if what == PREEMPTED:
            if number in self._running and self._pause_s(number) is not None:
                self._preempt_down_to(number)
            return
        if what == RESUMED and number in self._paused:
            for paused in self._paused.copy():  # those ahead of it in the queue first
                if self._pause_s(paused) is None:
                    self._admit(paused)
            return
        if what == LOOKED_UP:
            self._look_up(number)
            return
        if what == ADMITTED:
            for waiting in self._waiting.copy():  # the first ones of the queue
                self._admit(waiting)
        if preemptions != self._preemptions[number]:
            return
        if what == ADMITTED or what == RESUMED and number not in self._running:
            self._admit(number)
        elif number in self._running:
            if what == ENDED:
                self._end(number)
            elif what == COMPUTED:
                self._compute(number, amount)
            elif what == GROWN:
                self._grow(number, amount, amount - 1)

    # --- before the admission ------------------------------------------------------------------------------------------------

    def _in_line(self) -> list[int]:
        """Return the requests that joined the queue at known times and are played, the last one first."""
        joined_s, admitted_s, room = self._moments.joined_s, self._moments.admitted_s, self.server.tiers[0].pool.capacity
        order = [at for at in np.argsort(joined_s, kind="stable")[::-1].tolist() if not np.isnan(joined_s[at] + admitted_s[at])]
        return [number for number in order if self._pages_in_all(number) <= room]

    def _looked_up_s(self) -> list[tuple[int, float]]:
        """Return which requests are looked up before they are admitted, and when: others behind them are admitted by then."""
        found, next_s = [], np.inf
        for number in self._line:
            admitted_s = float(self._moments.admitted_s[number])
            if next_s < admitted_s:
                found.append((number, next_s))
            next_s = min(next_s, admitted_s)
        return found

    def _look_up(self, number: int) -> None:
        """Look up a request before its admission. It takes its pages, or asks again."""
        if number in self._line:
            self._line.remove(number)
        self._asking = [other for other in self._asking if other != number]
        request, pages = self._requests[number], self._pages_in_all(number)
        if not self.server.look_up_waiting(request, request.prompt_tokens):
            self._asking.append(number)
            return
        lease = self.server.begin(request, request.prompt_tokens, pages, self.now_s)
        if lease is None or lease is NEVER_FITS:
            self._asking.append(number)
        else:
            self._loading[number] = lease

    def _look_up_waiting(self) -> None:
        """Look up those that ask again and, unless preempted ones wait, the first request in line, which finds no room.

        If one that has loaded its pages is not admitted, there is no room for the rest of it, and nobody behind it is looked up.
        """
        if self.server.tries_waiting:
            self._try_first()
            return
        if not self._admits or self._budget <= 0 or not all(self.server.is_loading(lease) for lease in self._loading.values()):
            return
        for number in self._asking.copy():
            self._look_up(number)
        if preempted := [*self._paused, *self._waiting]:
            self.server.look_up_waiting(self._requests[preempted[0]], self._known_tokens(preempted[0]))
        elif self._line:
            first = self._line[-1]
            if self._moments.joined_s[first] < self.now_s < self._moments.admitted_s[first]:
                self.server.look_up_waiting(self._requests[first], self._requests[first].prompt_tokens)

    def _try_first(self) -> None:
        """Look up the first request in line, which finds no room, in the first step that has room for it since one has ended."""
        if not self._may_try or not self._has_formed or self._budget <= 0 or not self._line:
            return
        first, joined_s, admitted_s = self._line[-1], self._moments.joined_s, self._moments.admitted_s
        if joined_s[first] < self.now_s < admitted_s[first]:
            self._may_try = not self.server.look_up_waiting(self._requests[first], self._requests[first].prompt_tokens)

    # --- admission -----------------------------------------------------------------------------------------------------------

    def _admit(self, number: int) -> None:
        """Admit a request that must have found room by now. It is left out if it can never fit."""
        pages = self._pages_in_all(number)
        if pages > self.server.tiers[0].pool.capacity:
            return
        while not self._try(number, pages) and self._end_next():
            pass

    def _pages_in_all(self, number: int) -> int:
        request, tokens = self._requests[number], len(self._moments.tokens_s[number])
        return request.pages_for(request.prompt_tokens + tokens - 1, self.server.page_tokens)

    def _try(self, number: int, pages: int) -> bool:
        """Admit a request, for the first time or again, if there is room, and note what will happen to it."""
        request, now = self._requests[number], self.now_s
        known = self._known_tokens(number)
        generated = known - request.prompt_tokens
        lease = self._loading.pop(number, None) or self.server.begin(request, known, pages, now)
        if lease is None or lease is NEVER_FITS:
            return False
        for numbers in (self._waiting, self._paused, self._asking, self._line):
            if number in numbers:
                numbers.remove(number)
        if self._rows[number] is None or not generated and self.server.counts_last_admission:
            self._rows[number] = lease.hits
        self._running[number], self._known[number] = lease, known
        self._computed[number] = min(sum(lease.hits) * self.server.page_tokens, known - 1)
        self._expect(number, generated)
        if not len(self._moments.formed_s):
            self._grow(number, request.pages_for(known, self.server.page_tokens), 0)
        if len(self._running) == 1 or self._budget <= 0:
            self._budget = self.chunk_tokens
        self._begin_chunk(number)
        return True

    def _known_tokens(self, number: int) -> int:
        """Return the tokens of a request's prompt and, if it was preempted, of its answer so far."""
        tokens_s = self._moments.tokens_s[number]
        generated = int(np.searchsorted(tokens_s, self.now_s, side="right")) if self._preemptions[number] else 0
        return self._requests[number].prompt_tokens + generated

    def _resume_waiting(self) -> None:
        """Admit again those that were preempted unseen, as long as there is room."""
        while self._waiting and self._try(self._waiting[0], self._pages_in_all(self._waiting[0])):
            pass

    def _expect(self, number: int, generated: int) -> None:
        """Note what will happen to a request that is admitted now. The KV of an answer's last token is never computed."""
        now, page_tokens, tokens_s = self.now_s, self.server.page_tokens, self._moments.tokens_s[number]
        known, done, prompt = self._known[number], self._computed[number], self._requests[number].prompt_tokens
        next_s = max(now, float(tokens_s[min(generated, len(tokens_s) - 1)]))
        if not self._is_seen(now, next_s):
            for end in range(done + self.chunk_tokens, known, self.chunk_tokens):
                self._note(now + (next_s - now) * (end - done) / (known - done), COMPUTED, number, end)
        self._note(next_s, COMPUTED, number, known)
        first = -(-known // page_tokens) * page_tokens
        if not self._takes_by_step:
            for position in range(first, prompt + len(tokens_s) - 1, page_tokens):
                at_s = max(now, float(tokens_s[position - prompt]))
                self._note(at_s, GROWN, number, position // page_tokens + 1)
        self._note(max(now, float(tokens_s[-1])), ENDED, number)

    # --- what running requests do --------------------------------------------------------------------------------------------

    def _is_seen(self, begin_s: float, end_s: float) -> bool:
        """Whether steps were seen to be formed between these times."""
        formed_s = self._moments.formed_s
        return bool(((formed_s > begin_s) & (formed_s < end_s - SAME_STEP_S)).any())

    def _form(self) -> None:
        """Form a step of running requests: those with a prompt compute its next chunk, the others a token.

        Unless one is preempted, those that wait are admitted again.
        """
        self._budget, waiting, self._admits, self._has_formed = self.chunk_tokens, len(self._waiting), True, True
        for number in list(self._running):
            if number in self._running:
                if self._computed[number] < self._known[number]:
                    self._end_chunk(number, is_ahead=self._moments.steps_ahead > 0)
                if self._computed[number] < self._known[number]:
                    self._begin_chunk(number)
                else:
                    self._decode(number)
        if len(self._waiting) == waiting:
            self._resume_waiting()

    def _decode(self, number: int) -> None:
        """Take the page for the next token of an answer that a step computes, if any is left."""
        tokens_s = self._moments.tokens_s[number]
        request, ahead = self._requests[number], self._moments.steps_ahead
        tokens = int(np.searchsorted(tokens_s, self.now_s, side="right")) + ahead
        if not 0 < tokens < len(tokens_s) + (self._takes_by_step and self.server.decodes_past_end):
            return
        self._budget -= self.server.step_tokens(1, is_answer=True)
        if self._takes_by_step:
            while not self.server.decode(self._running[number], request.prompt_tokens + tokens) and self._find_room(number):
                pass
            return
        pages = request.pages_for(request.prompt_tokens + tokens, self.server.page_tokens)
        self._grow(number, pages, pages - 1 - ahead)

    def _begin_chunk(self, number: int) -> None:
        """Begin the next chunk of a request, unless the step is full, or it is preempted for lack of room."""
        self._chunk_ends[number] = begin = self._computed[number]
        tokens = max(0, min(self._budget, self._known[number] - begin))
        while not self.server.begin_chunk(self._running[number], begin + tokens):
            if not self._find_room(number):
                return
        self._chunk_ends[number] = begin + tokens
        self._budget -= self.server.step_tokens(tokens, is_answer=False)

    def _end_chunk(self, number: int, *, is_ahead: bool = False) -> None:
        """End a chunk. ``is_ahead``: the step of the last one still runs, and its result is known with the first token."""
        self._computed[number] = end = self._chunk_ends[number]
        if is_ahead and end == self._known[number]:
            self._results.add(number)
        else:
            self.server.end_chunk(self._running[number], end)

    def _compute(self, number: int, tokens: int) -> None:
        """Compute a request up to its first ``tokens`` known tokens, and begin the chunk after them."""
        if number in self._results:
            self._results.remove(number)
            self.server.end_chunk(self._running[number], self._computed[number])
        while number in self._running and self._computed[number] < tokens:
            self._end_chunk(number)
            if self._computed[number] < self._known[number]:
                self._budget = self.chunk_tokens
                self._begin_chunk(number)

    def _grow(self, number: int, pages: int, full_pages: int) -> None:
        while not self.server.grow(self._running[number], pages, full_pages) and self._find_room(number):
            pass

    def _find_room(self, number: int) -> bool:
        """Make room for a running request. Returns False if it is preempted itself, or no other one is running."""
        last: int = next(reversed(self._running))
        if self._pause_s(last) is not None and self._preempt(last):
            return last != number
        again_s = self._resumes_by(last)
        if again_s is not None and self._preempt(last):
            self._waiting.insert(0, last)
            self._note(again_s, RESUMED, last)
            return last != number
        return self._end_next(but=number)

    def _pause_s(self, number: int) -> float | None:
        """Return when a request resumes that was seen to be preempted by now and to resume later; None for others."""
        return next((end_s for begin_s, end_s in self._pauses_s.get(number, ()) if begin_s <= self.now_s < end_s), None)

    def _resumes_by(self, number: int) -> float | None:
        """Return when a request runs again at the latest if it is preempted now unseen; None if it cannot be, since it goes on.

        If the step that runs computes its last known token, it gets the next one from that, and misses a step after it.
        """
        if sum(self._preemptions) >= self._moments.preemptions:
            return None
        tokens_s = self._moments.tokens_s[number]
        next_at = int(np.searchsorted(tokens_s, self.now_s, side="right"))
        if self._chunk_ends[number] < self._known[number]:
            return float(np.nextafter(tokens_s[0], -np.inf)) if not next_at else None
        if next_at + 1 >= len(tokens_s):
            return None
        next_s, after_s = (float(at_s) for at_s in tokens_s[next_at : next_at + 2])
        return after_s if self._is_seen(next_s + SAME_STEP_S, after_s) else None

    def _preempt(self, number: int) -> bool:
        """Take back what a request holds, where engines do that. It resumes when that has been seen."""
        again_s = self._pause_s(number)
        if not self.server.preempt(self._running[number]):
            return False
        del self._running[number], self._computed[number], self._known[number], self._chunk_ends[number]
        self._results.discard(number)
        self._preemptions[number] += 1
        self._may_try = True
        if again_s is not None:
            self._paused.insert(0, number)
            self._note(again_s, RESUMED, number)
        self._admits = False
        return True

    def _preempt_down_to(self, number: int) -> None:
        """Preempt a request as has been seen, after those admitted after it: these, too, or nobody has seen it yet."""
        for last in reversed(list(self._running)):
            if self._pause_s(last) is not None:
                self._preempt(last)
            elif self.server.preempts_all and self.now_s < self._moments.tokens_s[last][0] and self._preempt(last):
                self._waiting.insert(0, last)
            if last == number:
                return

    def _end_next(self, but: int = -1) -> bool:
        """End the running request that ends next, other than ``but``. Returns False if there is none."""
        others = [number for number in self._running if number != but]
        if others:
            self._end(min(others, key=lambda number: float(self._moments.tokens_s[number][-1])))
        return bool(others)

    def _end(self, number: int) -> None:
        """End a request, and what is left of its prompt before."""
        self._compute(number, self._known[number])
        if number in self._running:
            del self._computed[number], self._known[number], self._chunk_ends[number]
            self.server.finish_request(self._running.pop(number))
            self._may_try = True


def _merged(
    one: Mapping[int, Sequence[tuple[float, float]]], other: Mapping[int, Sequence[tuple[float, float]]]
) -> Mapping[int, Sequence[tuple[float, float]]]:
    """Return the pauses of both, in the order of their times."""
    return {number: sorted([*one.get(number, ()), *other.get(number, ())]) for number in {**one, **other}}
