"""Requests of one engine, made from what it stores.

An event of stored blocks belongs to a request that has begun, or begins one:

    reports     blocks that are known, from the beginning of a prompt on (vLLM, ``kv_cache_report_mode: "full"``): a request has
                been looked up and has hit them. The same report again within ``RETRY_S`` is the same request, for which there
                was no room yet
    goes on     the event follows the last block of a request under way, in another batch, in the same session, and at most
                ``IDLE_S`` later: a further chunk of its prompt, or a page of its answer. Once a request has had a single block
                after its first event, it is at its answer, which grows by one block at a time: more blocks at once are another
                request, that has hit all of this one (the next turn of its conversation)
    answers     that is how vLLM tells of answers. SGLang tells of one as a whole, when it ends. Which of the two an engine does
                is seen from what follows the last blocks of its requests: mostly single blocks or mostly more. If it is more,
                what follows a prompt is its answer, for which it waits ``ANSWER_S``, and ends the request; but if the step before
                was full, it is a further chunk of the prompt
    again       the engine had dropped blocks that a request under way has stored, and stores them once more, up to what it had or
                one block further: the request was preempted, and computes again what it has lost
    begins      any other event: the blocks that it follows are what the request has hit, and its own are new

A request ends when nothing of it has been told for ``IDLE_S``. Requests are handed on in the order in which they began, once they
have ended, or ``HOLD_S`` after they began: what their answers grow after that is cut.

What no event tells: a request that stores nothing, because it hits all of its whole blocks, is seen only in a report. The partial
block at the end of a prompt is not seen: a prompt is taken to have one token in it, so that all its whole blocks can be hit,
unless its last whole block had to be computed again, which happens where there is no such token. A last chunk of one block
counts as an answer. A request that has ended and lost blocks within ``IDLE_S`` is not told from one that was preempted. Blocks of
other media that an event of the GPU
stores are taken as loaded from there.
"""

from collections import deque
from collections.abc import Callable

from kvsim.kv_events.messages import BlockStored
from kvsim.shadow.blocks import Block
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.mirror import Told

ANSWER_S = 60.0
"""How long the whole answer of a request is waited for, where answers are told when they end."""
LEAST_CHUNK_TOKENS = 512
"""Steps of engines compute no fewer tokens of prompts if they are full."""
LEAST_ANSWERS = 3
"""How many more whole answers than single blocks must have been seen until answers count as told when they end."""
FULL = 0.9
"""The part of the fullest step so far from which on a step may have been full, so that a prompt goes on in the next one."""
IDLE_S = 5.0
"""After which nothing more is expected of a request: longer than any step, and than 16 tokens of an answer take."""
RETRY_S = 1.0
HOLD_S = 120.0
MOST_OPEN = 4096
"""Requests that may wait for their end; beyond, the oldest is handed on."""
MOST_RECENT = 1 << 18
"""Events within ``IDLE_S``; beyond, requests end earlier."""


class OpenRequest:
    """A request about which more may be told."""

    __slots__ = (
        "answer", "batch", "began_s", "cached", "events", "filled", "is_closed", "is_exact", "is_given", "last_s", "prompt",
        "session", "stored", "tail",
    )  # fmt: skip

    def __init__(self, cached: int | None, tail: Block, session: str | None, at_s: float, batch: int) -> None:
        self.prompt = tail.path()
        """Keys of its prompt's blocks so far."""
        self.answer: list[bytes] = []
        self.stored: list[bytes] = []
        """Keys of the blocks that it has stored, until nothing more is expected of it."""
        self.cached = cached
        """Blocks that it has hit; None if that is not certain."""
        self.tail = tail
        """Its last block."""
        self.session = session
        self.began_s = self.last_s = at_s
        self.batch = batch
        """The batch that last told of it."""
        self.events = 0
        """Events that have stored new blocks of it."""
        self.filled = [0]
        """The blocks that the step which last told of it has stored in all."""
        self.is_exact = False
        """Whether its prompt ends with its last whole block."""
        self.is_closed = False
        self.is_given = False


class RequestsFromEvents:
    """Makes the requests of one engine and hands them to ``give``, in the order in which they began."""

    def __init__(self, engine: str, page_tokens: int, give: Callable[[LiveRequest], None]) -> None:
        self._engine = engine
        self._page_tokens = page_tokens
        self._give = give
        self._by_tail: dict[Block, list[OpenRequest]] = {}
        """Those that may go on, by their last block, the latest last."""
        self._by_stored: dict[bytes, OpenRequest] = {}
        """Those that may go on, by the key of each block that they were the last to store."""
        self._open: deque[OpenRequest] = deque()
        """Those that were not handed on, in the order in which they began."""
        self._recent: deque[tuple[float, OpenRequest]] = deque()
        """When which request was told of, in the order of time."""
        self._awaiting: deque[tuple[float, OpenRequest]] = deque()
        """Those that wait for a whole answer, and since when, in the order of time."""
        self._batch = 0
        self._filled = [0]
        """The blocks that this batch has stored so far."""
        self._fullest = LEAST_CHUNK_TOKENS // page_tokens
        self._grown_by_one = self._grown_by_more = 0
        """How often requests went on by one block, and how often by more where that was no chunk of their prompt."""
        self._after_reset = False
        self.open_blocks = 0
        """Blocks of the requests that were not handed on."""
        self.rootless = 0
        """Events whose blocks follow nothing that is known, so that no request could be made of them."""
        self.cut = 0
        """Blocks of answers that came after their request had been handed on."""

    # --- events --------------------------------------------------------------------------------------------------------------

    def next_batch(self, at_s: float) -> None:
        """Begin a batch of events, a step of the engine; time does not go back."""
        self._batch += 1
        self._fullest = max(self._fullest, self._filled[0])
        self._filled = [0]
        recent, awaiting = self._recent, self._awaiting
        while recent and (recent[0][0] < at_s - IDLE_S or recent[0][1].is_closed or len(recent) > MOST_RECENT):
            told_s, request = recent.popleft()
            if told_s == request.last_s and self._awaits_answer(request):
                awaiting.append((told_s, request))
            elif told_s == request.last_s:
                self._close(request)
        while awaiting and (awaiting[0][0] < at_s - ANSWER_S or awaiting[0][1].is_closed or len(awaiting) > MOST_RECENT):
            told_s, request = awaiting.popleft()
            if told_s == request.last_s:
                self._close(request)
        while self._open and (self._open[0].is_closed or self._open[0].began_s < at_s - HOLD_S):
            self._hand_on_first()

    def stored(self, event: BlockStored, told: Told, at_s: float, *, is_known: bool) -> None:
        """Take blocks that were stored on the GPU; ``is_known``: whether all is known that the engine has."""
        if not told.blocks:
            return
        tail = told.blocks[-1]
        if not tail.is_rooted:
            self.rootless += 1
            return
        new = len(told.blocks)
        self._filled[0] += new - told.known
        if told.is_report:
            if not self._is_repeated(event, told, at_s):
                self._begin(new, event, told, at_s)
            return
        if told.parent is not None:
            for request in reversed(self._by_tail.get(told.parent, ())):
                if self._goes_on(request, event, at_s):
                    self._go_on(request, [block.key for block in told.blocks], told, at_s)
                    return
        if self._is_again(event, told, at_s):
            return
        is_certain = told.parent is not None or is_known
        request = self._begin(tail.depth - new + told.known_below if is_certain else None, event, told, at_s)
        request.events, request.is_exact = 1, told.known == new
        self._has_stored(request, [block.key for block in told.blocks])

    def _is_repeated(self, event: BlockStored, told: Told, at_s: float) -> bool:
        """Whether a request has reported the same just before, and still waits for its turn."""
        for request in self._by_tail.get(told.blocks[-1], ()):
            if not request.events and request.session == event.session_id and at_s - request.last_s <= RETRY_S:
                self._touch(request, at_s)
                return True
        return False

    def _is_again(self, event: BlockStored, told: Told, at_s: float) -> bool:
        """Whether a request that was preempted stores blocks again; then it goes on from the last one."""
        if told.known == len(told.blocks):
            return False
        for beyond, block in enumerate(reversed(told.blocks[-2:])):
            request = self._by_stored.get(block.key)
            if request is None or beyond and block.key != request.tail.key:
                continue
            if request.batch == self._batch or request.session != event.session_id:
                return False
            if beyond:
                self._go_on(request, [told.blocks[-1].key], told, at_s)
            elif block.key == request.tail.key:
                self._move(request, block)
                self._touch(request, at_s)
            else:
                self._touch(request, at_s)
            return True
        return False

    def _begin(self, cached: int | None, event: BlockStored, told: Told, at_s: float) -> OpenRequest:
        """Begin a request that has hit ``cached`` blocks; its path so far ends with the event's last block."""
        request = OpenRequest(cached, told.blocks[-1], event.session_id, at_s, self._batch)
        request.filled = self._filled
        self.open_blocks += len(request.prompt)
        self._by_tail.setdefault(request.tail, []).append(request)
        self._open.append(request)
        self._recent.append((at_s, request))
        if len(self._open) > MOST_OPEN:
            self._hand_on_first()
        return request

    def _goes_on(self, request: OpenRequest, event: BlockStored, at_s: float) -> bool:
        """Whether an event that follows the last block of a request tells more of it."""
        if self._awaits_answer(request):
            return request.batch != self._batch and request.session == event.session_id and at_s - request.last_s <= ANSWER_S
        may_be_next = request.batch != self._batch or not request.events  # a report, and what is computed in the same step
        is_at_answer = bool(request.answer) or request.is_exact
        return (
            may_be_next
            and request.session == event.session_id
            and at_s - request.last_s <= IDLE_S
            and not (is_at_answer and len(event.block_hashes) > 1)
        )

    def _go_on(self, request: OpenRequest, keys: list[bytes], told: Told, at_s: float) -> None:
        """Let a request have more blocks: of its prompt, or of its answer."""
        self.open_blocks += 0 if request.is_given else len(keys)
        may_be_a_chunk = request.filled[0] >= FULL * self._fullest  # the step had no room for more of it
        is_whole_answer = self._awaits_answer(request) and not may_be_a_chunk
        if request.events and len(keys) == 1:
            self._grown_by_one += 1
        elif request.events and not request.answer and not may_be_a_chunk:
            self._grown_by_more += 1
        if request.is_given:
            self.cut += len(keys)
        elif is_whole_answer or request.answer or request.is_exact or request.events and len(keys) == 1:
            request.answer += keys
        else:
            request.prompt += keys
            request.is_exact = told.known == len(keys)
        request.events += 1
        self._has_stored(request, keys)
        self._move(request, told.blocks[-1])
        self._touch(request, at_s)
        if is_whole_answer:
            self._close(request)

    def _awaits_answer(self, request: OpenRequest) -> bool:
        """Whether a request has a prompt, and its answer is to come as a whole."""
        are_whole = self._grown_by_more >= self._grown_by_one + LEAST_ANSWERS
        return are_whole and request.events > 0 and not (request.answer or request.is_closed)

    def _has_stored(self, request: OpenRequest, keys: list[bytes]) -> None:
        request.stored += keys
        self._by_stored.update(dict.fromkeys(keys, request))

    def _move(self, request: OpenRequest, tail: Block) -> None:
        """Let a request end with another block."""
        self._leave(request)
        request.tail = tail
        self._by_tail.setdefault(tail, []).append(request)

    def _touch(self, request: OpenRequest, at_s: float) -> None:
        request.last_s, request.batch, request.filled = at_s, self._batch, self._filled
        self._recent.append((at_s, request))

    def _leave(self, request: OpenRequest) -> None:
        """Take a request from those that may go on after its last block."""
        others = self._by_tail[request.tail]
        others.remove(request)
        if not others:
            del self._by_tail[request.tail]

    # --- ends ----------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Take note that the engine's cache was emptied: requests that are under way end here."""
        self.end_all()
        self._after_reset = True

    def end_all(self) -> None:
        """End all requests, and hand them on."""
        for request in [request for requests in self._by_tail.values() for request in requests]:
            self._close(request)
        self._recent.clear()
        self._awaiting.clear()
        while self._open:
            self._hand_on_first()

    def hand_on_oldest(self) -> None:
        """End the older half of the requests, and hand them on, because memory is short."""
        for _ in range(-(-len(self._open) // 2)):
            self._close(self._open[0])
            self._hand_on_first()

    def _close(self, request: OpenRequest) -> None:
        """Expect nothing more of a request."""
        if not request.is_closed:
            request.is_closed = True
            self._leave(request)
            for key in request.stored:
                if self._by_stored.get(key) is request:
                    del self._by_stored[key]
            request.stored = []

    def _hand_on_first(self) -> None:
        request, size = self._open.popleft(), self._page_tokens
        request.is_given = True
        self.open_blocks -= len(request.prompt) + len(request.answer)
        prompt, answer, cached = request.prompt, request.answer, request.cached
        after_reset, self._after_reset = self._after_reset, False
        self._give(
            LiveRequest(
                arrival_s=request.began_s,
                keys=tuple(prompt),
                prompt_tokens=len(prompt) * size + (not request.is_exact),
                output_keys=tuple(answer),
                output_tokens=max(1, len(answer) * size + request.is_exact),
                session=request.session,
                engine=self._engine,
                cached_tokens=None if cached is None else cached * size,
                after_reset=after_reset,
            )
        )
        request.prompt, request.answer = [], []
