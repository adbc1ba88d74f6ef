"""When policies hear of a request: as it arrives, as it is used, and as it ends, in simulated time."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from tests.engine.small import ask, seconds, small_engine


@dataclass(kw_only=True, eq=False)
class Diary(LRU):
    """LRU that writes down what it is told."""

    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        self.told: dict[tuple[str, int], float] = {}

    def on_arrival(self, request: Request, now: float) -> None:
        self.told["arrival", request.index] = now

    def on_request(self, request: Request, now: float) -> None:
        self.told.setdefault(("admission", request.index), now)

    def on_finish(self, request: Request, node: Node, now: float) -> None:
        self.told["finish", request.index] = now


def test_a_request_that_waits_for_room_shows_its_queueing_delay() -> None:
    """The second request arrives at 1 s and needs the pages of the first, which takes 17 s and 3 more of decoding."""
    diary = Diary()
    engine = small_engine(gpu=6, eviction=lambda: diary)
    outcome = engine.serve(ask("abcd", output=4), ask("efgh", 1))
    assert [diary.told["arrival", index] for index in (0, 1)] == [0, 1]
    assert [diary.told["finish", index] for index in (0, 1)] == seconds([20, 20 + 17])
    assert diary.told["admission", 0] == 0
    assert diary.told["admission", 1] == seconds(20)
    assert outcome.arrival_s.tolist() == [0, 1]


def test_a_request_that_never_runs_does_not_arrive() -> None:
    diary = Diary()
    outcome = small_engine(gpu=2, eviction=lambda: diary).serve(ask("abcd"), ask("a", 1))
    assert outcome.status.tolist() == [1, 0]
    assert ("arrival", 0) not in diary.told and ("arrival", 1) in diary.told
