"""From the sources to the shadow: jobs in a queue, done one after another by a thread of their own.

The sources' loop stays free to pass bytes on while prompts are tokenized, hashed and served by ghosts.
"""

import queue
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from threading import Event, Thread

from kvsim.errors import TraceError, UsageError
from kvsim.kv_events.messages import EventBatch
from kvsim.shadow.history import Observed
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.recording import Recording
from kvsim.shadow.shadow import Shadow

Job = Callable[[], None]
MOST_JOBS = 10_000
MOST_BYTES = 1 << 28
"""What may wait of requests that a proxy has seen. More are passed on without being seen."""
SWITCH_S = 0.0005
"""How long the thread keeps Python's lock while the loop wants it; 5 ms by default, which clients of a proxy would wait."""
QUOTED = re.compile(r", not |(?<=refuses this conversation)|(?<=content) of type ")
"""Where errors of the readers begin to quote."""


class Feed:
    """Takes jobs from the loop of the main thread; ``refresh`` is called from the thread that does them, at intervals."""

    def __init__(
        self, shadow: Shadow, recording: Recording | None, observed: Observed, refresh: Job, *, every_s: float, most: int | None
    ) -> None:
        self.problems: Counter[str] = Counter()
        """How often each kind of problem has come up."""
        self.first: dict[str, str] = {}
        """The first of each kind."""
        self.seen = 0
        """Requests that ghosts have served."""
        self.has_begun = False
        """Whether jobs are done, since all sources have begun."""
        self.error: Exception | None = None
        """What the thread has failed with."""
        self.lost_lines = 0
        """Requests that could not be recorded."""
        self.say: Callable[[str], None] = lambda line: print(f"kvsim: {line}", file=sys.stderr, flush=True)
        """Tells the user a line at once."""
        self.on_stop: Callable[[], object] = lambda: None
        """Called from any thread when there is enough, or no use to go on."""
        self._observed = observed
        self._shadow = shadow
        self._recording = recording
        self._refresh = refresh
        self._every_s = every_s
        self._most = most
        self._jobs: queue.Queue[tuple[Job, int] | None] = queue.Queue(MOST_JOBS)
        self._taken_bytes, self._done_bytes = 0, 0  # each is written by one thread
        self._has_enough = Event()
        shadow.on_request, shadow.wants_more = self.record, lambda: not self._has_enough.is_set()
        self._thread = Thread(target=self._work, name="kvsim shadow", daemon=True)

    # --- called by the loop --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to do jobs."""
        sys.setswitchinterval(SWITCH_S)
        self.has_begun = True
        self._thread.start()

    def put(self, job: Job, n_bytes: int = 0) -> bool:
        """Take a job that keeps ``n_bytes`` in memory, unless too much waits already. Returns whether it was taken.

        After the thread has failed, jobs are taken and forgotten.
        """
        if self.error is not None:
            return True
        if self._taken_bytes - self._done_bytes + n_bytes > MOST_BYTES:
            return False
        try:
            self._jobs.put_nowait((job, n_bytes))
        except queue.Full:
            return False
        self._taken_bytes += n_bytes
        return True

    def finish(self) -> None:
        """Wait until all jobs are done. Call it from another thread than the loop's."""
        if not self.has_begun:
            return
        while self._thread.is_alive():
            try:
                self._jobs.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join()

    def fail(self, error: Exception) -> None:
        """Take an error that nobody has foreseen: it ends the command."""
        self.error = self.error or error
        self.on_stop()

    def tell(self, kind: str, line: str) -> None:
        """Say what is wrong, if it is the first of its kind, and count it. Callable from any thread."""
        self.problems[kind] += 1
        if self.problems[kind] == 1:
            self.first[kind] = line
            self.say(line)

    # --- called by jobs ------------------------------------------------------------------------------------------------------

    def requests(self, requests: Iterable[LiveRequest]) -> None:
        """Let ghosts serve requests, and record them. What cannot be read is counted."""
        try:
            for request in requests:
                self.request(request)
        except TraceError as error:
            self.tell("unread", f"{_without_content(str(error))}; left out")

    def request(self, request: LiveRequest) -> None:
        """Let ghosts serve a request, and record it."""
        if self._has_enough.is_set():
            return
        self._shadow.request(request)
        self.record(request)

    def record(self, request: LiveRequest) -> None:
        """Record a request that ghosts have served."""
        self.seen += 1
        self._observed.add(request)
        if self._recording is not None:
            try:
                self._recording.write(request)
            except UsageError as error:
                self.lost_lines += 1
                self.tell("record", f"{error}; requests are not recorded as long as this lasts")
        if self._most is not None and self.seen >= self._most:
            self._has_enough.set()
            self.on_stop()

    def event(self, engine: str, batch: EventBatch) -> None:
        """Let the shadow take an engine's events."""
        if not self._has_enough.is_set():
            self._shadow.event(engine, batch)

    def lost(self, engine: str, batches: int, rank: int | None) -> None:
        """Let the shadow know that events are missing for good."""
        self._shadow.lost(engine, batches, rank)

    def restarted(self, engine: str, rank: int | None) -> None:
        """Let the shadow know that an engine has begun anew."""
        self._shadow.restarted(engine, rank)

    # --- the thread ----------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            due_s = time.monotonic()
            while self.error is None:
                now_s = time.monotonic()
                if now_s >= due_s:
                    self._refresh()
                    due_s = time.monotonic() + self._every_s
                try:
                    taken = self._jobs.get(timeout=max(0.0, due_s - now_s))
                except queue.Empty:
                    continue
                if taken is None:
                    break
                taken[0]()
                self._done_bytes += taken[1]
            self._shadow.flush()
            self._refresh()
        except Exception as error:
            self.fail(error)


def _without_content(problem: str) -> str:
    """Return an error without what it quotes, which may be text of a request."""
    return QUOTED.split(problem)[0]
