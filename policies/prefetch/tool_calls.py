"""Offload and upload of idle KV during tool calls (Bian et al.: Tokencake: A KV-cache-centric serving framework for LLM-based
multi-agent applications, arXiv:2510.18586, 2025)."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, nan

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import SECONDS, Real, Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.prefetch.base import ToolCall, Upload
from kvsim.policies.prefetch.none import NoPrefetch


class Durations:
    """The latest durations of calls of one kind."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_turn: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, duration_s: float) -> None:
        """Add one, and forget the oldest if there are too many."""
        self._in_turn.append(duration_s)
        insort(self._sorted, duration_s)
        if len(self._in_turn) > self._most:
            del self._sorted[bisect_left(self._sorted, self._in_turn.popleft())]

    def quantile_s(self, share: float) -> float:
        """Return the shortest duration that at least this share of them do not exceed."""
        return self._sorted[max(0, ceil(share * len(self._sorted)) - 1)]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ToolCallPrefetch(NoPrefetch):
    """Tokencake: while a tool runs, what its session has on the GPU leaves for others, and comes back just before the tool ends.

    predicted    the `quantile` of the last `window_calls` calls of the same kind on this engine: the kind of the request that
                 has ended. Without any, nothing is predicted, offloaded or uploaded
    offload      if offloads, and predicted > margin * (write the unwritten pages + load all of them again), and requests wait
                 that need more pages than are free, or only_for_waiting is false
    upload       from predicted - lead_s - (load the whole path) on, unless requests wait then; evicted last until predicted +
                 keep_s
    while waiting, at admission    as none

    With `foresight`, the call's true duration is its prediction: a bound for better predictions, not a policy to deploy.
    """

    offloads: bool = True
    margin: float = 1.0
    only_for_waiting: bool = True
    uploads: bool = True
    quantile: float = 0.5
    window_calls: int = 100
    lead_s: float = 0.0
    keep_s: float = 2.0
    foresight: bool = False

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0), "margin")
        check_settings(self, Real(above=0, most=1), "quantile")
        check_settings(self, Whole(1), "window_calls")
        check_settings(self, SECONDS, "lead_s", "keep_s")
        if not (self.offloads or self.uploads):
            raise ValueError("offloads and uploads are both false, so that nothing moves during calls: choose prefetch=none")

    @property
    def reads_hardware(self) -> bool:
        return True

    @property
    def needs_future(self) -> bool:
        return self.foresight

    def without_effect(self) -> Sequence[str]:
        if not self.offloads:
            return "margin", "only_for_waiting"
        return () if self.uploads else ("lead_s", "keep_s")

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.require("after", "requests that arrive when others have ended (trace.arrivals=closed_loop)")
        self._context = context
        self._durations: dict[str, Durations] = {}

    def predicted_s(self, call: ToolCall) -> float:
        """Return how long a call is expected to last; nan if nothing is known."""
        if call.duration_s == call.duration_s:
            return call.duration_s
        known = self._durations.get(call.request.kind)
        return nan if known is None else known.quantile_s(self.quantile)

    def offload(self, call: ToolCall) -> bool:
        if not self.offloads:
            return False
        context = self._context
        moves_s = context.host_load_s(call.idle_pages)
        if call.unwritten_pages:
            moves_s += context.host_write_s(call.unwritten_pages)
        if not self.predicted_s(call) > self.margin * moves_s:
            return False
        return not self.only_for_waiting or call.waiting_pages > call.free_pages

    def upload(self, call: ToolCall) -> Upload | None:
        predicted_s = self.predicted_s(call)
        if not self.uploads or predicted_s != predicted_s:
            return None
        begin_s = predicted_s - self.lead_s - self._context.host_load_s(call.path_pages)
        return Upload(max(0.0, begin_s), predicted_s + self.keep_s)

    def on_call_end(self, call: Request, duration_s: float) -> None:
        known = self._durations.get(call.kind)
        if known is None:
            known = self._durations[call.kind] = Durations(self.window_calls)
        known.add(duration_s)
