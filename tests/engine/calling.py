"""A policy whose offloads and uploads a test decides."""

from dataclasses import dataclass
from typing import Any

from kvsim.core.request import Request
from kvsim.policies.prefetch.base import ToolCall, Upload
from kvsim.policies.prefetch.none import NoPrefetch
from tests.engine.small import SmallEngine


@dataclass(kw_only=True, eq=False)
class Planned(NoPrefetch):
    """Offloads always or never, and uploads at given times after the beginning of each call; keeps what it is told."""

    offloads: bool = True
    begin_s: float | None = None
    until_s: float = 1000.0

    def __post_init__(self) -> None:
        self.offered: list[ToolCall] = []
        self.ended: list[tuple[int, float]] = []

    def offload(self, call: ToolCall) -> bool:
        self.offered.append(call)
        return self.offloads

    def upload(self, call: ToolCall) -> Upload | None:
        return None if self.begin_s is None else Upload(self.begin_s, self.until_s)

    def on_call_end(self, call: Request, duration_s: float) -> None:
        self.ended.append((call.index, duration_s))


def calls_of(engine: Any) -> dict[str, int]:
    """What pages have done during calls on an engine: the counts that are not 0."""
    assert isinstance(engine, SmallEngine) and engine.calls is not None
    assert not engine.calls._calls, "calls are forgotten once their requests have come"
    return {name.removesuffix("_pages"): count for name, count in engine.calls.result().items() if count}
