"""Tensor-parallel ranks that do not agree: a page counts if every rank has it, and what only some have is lost.

With two GPUs the round numbers of small.py hold for both together: a page takes 1 s on the host links, half on each, and 2 s
from disk.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy import Event

from kvsim.core.transfer import Transfer
from kvsim.engine.outcome import Disagreement, Outcome
from kvsim.hardware.spec import RankFault
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import STOP_RULES
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.drawn import SETTINGS, asks
from tests.engine.small import (
    HARDWARE,
    PAGE_BYTES,
    Ask,
    SmallEngine,
    ask,
    counted,
    eager,
    hits,
    same_outcome,
    seconds,
    small_engine,
)

A, B = "abcdefgh", "ijklmnop"
"""Prompts of eight pages and a token."""
A_IS_BELOW = (ask(A, 0), ask(B, 200))
"""In a GPU of nine pages, the second request pushes out what the first one left."""
ON_CPU: dict[str, Any] = {"gpu": 9, "cpu": 80, "overlap": "none"}
ON_DISK: dict[str, Any] = {"gpu": 9, "cpu": 8, "disk": 80, "overlap": "none"}
"""Write-through: after A and B, only the disk has A."""


def ranks(gpus: int = 2, *faults: RankFault, jitter: float = 0.0) -> dict[str, Any]:
    """Hardware of as many GPUs, together as fast as the one of small.py."""
    each = {name: HARDWARE[name] / gpus for name in HARDWARE if name.startswith(("flops", "host_to", "device_to", "both"))}
    own = {"attention_data_parallel": True}  # small.py's model has one KV head, of which the GPUs would have copies
    return each | own | {"gpus": gpus, "rank_jitter": jitter, "rank_faults": list(faults)}


def slow(link: str, speed: float = 0.5) -> dict[str, Any]:
    """Two GPUs, the second slow on a link."""
    return ranks(2, RankFault(rank=1, link=link, speed=speed))


def served(*asks: Ask, **settings: Any) -> Outcome:
    engine = small_engine(**settings)
    engine.is_checked = True
    return engine.serve(*asks)


def lost(outcome: Outcome) -> tuple[int, int]:
    return outcome.lost_to_disagreement.pages, outcome.lost_to_disagreement.transfers


# --- reads ---


def test_ranks_that_are_alike_are_one() -> None:
    one = served(*A_IS_BELOW, ask(A, 400), **ON_DISK, prefetch=eager(stop="timeout", base_s=13.0))
    two = served(*A_IS_BELOW, ask(A, 400), **ON_DISK, prefetch=eager(stop="timeout", base_s=13.0), hardware=ranks(2))
    assert same_outcome(one, two) and lost(two) == (0, 0)
    assert hits(one, 2) == (0, 0, 13 // 2)


def test_a_prefetch_that_is_stopped_has_brought_what_its_slowest_rank_has() -> None:
    """After 13 s one rank has 6 pages and the other, at 4 s a page, has 3."""
    stopped = eager(stop="timeout", base_s=13.0)
    outcome = served(*A_IS_BELOW, ask(A, 400), **ON_DISK, prefetch=stopped, hardware=slow("disk-cpu"))
    assert hits(outcome, 2) == (0, 0, 3) and lost(outcome) == (6 - 3, 1)
    assert outcome.ttft_s[2] == seconds(13 + 3 + (8 - 3) * 4 + 1)
    assert counted(outcome) == {"fetched": 3, "used": 3}
    assert outcome.links["disk-cpu"].bytes == (13 / 2 + 13 / 4) / 2 * PAGE_BYTES


def test_a_best_effort_prefetch_ends_when_its_requests_turn_comes() -> None:
    """The engine is busy until 250 + 17 + 23 = 290: 10 s after the request's arrival, the ranks have 5 pages and 2."""
    busy, late = ask("qrst", 250, output=24), ask(A, 280)
    settings = ON_DISK | {"gpu": 14, "cpu": 12, "max_running_requests": 1}
    outcome = served(ask(A, 0), ask(B, 100), ask("uvwxyz", 200), busy, late, **settings, prefetch=eager(stop="best_effort"),
                     hardware=slow("disk-cpu"))  # fmt: skip
    assert hits(outcome, 4) == (0, 0, 2) and lost(outcome) == (5 - 2, 1)
    assert outcome.ttft_s[4] == seconds(10 + 2 + (8 - 2) * 4 + 1)


def test_a_prefetch_that_is_waited_for_takes_as_long_as_its_slowest_rank() -> None:
    outcome = served(*A_IS_BELOW, ask(A, 400), **ON_DISK, prefetch=eager(stop="wait_complete"), hardware=slow("disk-cpu"))
    assert outcome.ttft_s[2] == seconds(8 * 4 + 8 + 1)
    assert hits(outcome, 2) == (0, 0, 8) and lost(outcome) == (0, 0)


@pytest.mark.parametrize(("overlap", "expected"), [("none", 16 + 1), ("layerwise", 16 + 1 / 4)])
def test_a_step_waits_for_the_slowest_rank_of_its_loads(overlap: str, expected: float) -> None:
    outcome = served(*A_IS_BELOW, ask(A, 400), **ON_CPU | {"overlap": overlap}, hardware=slow("cpu-gpu"))
    assert hits(outcome, 2) == (0, 8, 0) and outcome.ttft_s[2] == seconds(expected)


def test_a_slow_rank_on_another_link_changes_nothing() -> None:
    even = served(*A_IS_BELOW, ask(A, 400), **ON_CPU, hardware=ranks(2))
    other = served(*A_IS_BELOW, ask(A, 400), **ON_CPU, hardware=slow("cpu-disk"))
    assert same_outcome(even, other)


def test_a_page_that_one_rank_cannot_read_is_lost_on_the_disk_with_what_depends_on_it() -> None:
    """The second rank reads nothing: the first page and all below it leave the disk, and the request computes them."""
    fault = ranks(2, RankFault(rank=1, link="disk-cpu", share=1.0))
    settings = ON_DISK | {"placement": [WriteThrough, WriteBack]}
    outcome = served(*A_IS_BELOW, ask(A, 400), **settings, prefetch=eager(stop="wait_complete"), hardware=fault)
    assert hits(outcome, 2) == (0, 0, 0) and lost(outcome) == (8, 1)
    assert outcome.placement["unreadable_pages"] == 1
    assert outcome.ttft_s[2] == seconds(8 * 2 + 8 * 4 + 1)


def test_a_prefetch_that_is_stopped_before_its_turn_on_the_disk_has_not_failed() -> None:
    """The prefetch of z waits behind that of A and is stopped after 2 s, that of A after 9 s: one rank has 4 pages of it."""
    fault = ranks(2, RankFault(rank=1, link="disk-cpu", share=1.0))
    stopped = eager(stop="timeout", base_s=1.0, per_1024_tokens_s=1024 / 4)
    asks = ask("z", 0), ask(A, 100), ask(B, 200), ask("qr", 300), ask(A, 400), ask("z", 400.5)
    outcome = served(*asks, **ON_DISK | {"cpu": 10}, prefetch=stopped, hardware=fault)
    assert lost(outcome) == (4, 1) and outcome.links["disk-cpu"].transfers == 1
    assert outcome.placement["unreadable_pages"] == 1
    assert not outcome.hit_pages.any()


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
def test_requests_that_share_a_load_compute_what_not_every_rank_has_brought(overlap: str) -> None:
    """The GPU still has two pages of A, and a rank brings only four of the other six; two requests wait for them."""
    settings = ON_CPU | {"gpu": 11, "overlap": overlap}
    whole = served(*A_IS_BELOW, ask(A, 400), ask(A, 400), **settings)
    assert [hits(whole, index) for index in (2, 3)] == [(2, 6, 0), (8, 0, 0)]
    part = served(*A_IS_BELOW, ask(A, 400), ask(A, 400), **settings, make_substrate=answering(cpu_gpu=[4, 6]))
    assert [hits(part, index) for index in (2, 3)] == [(2, 4, 0), (6, 0, 0)]
    assert part.ttft_s[2] == part.ttft_s[3] > whole.ttft_s[3]


@pytest.mark.parametrize(("more", "arrival_s"), [(B, 410), (B[:4], 411)])
def test_a_request_computes_what_a_load_has_not_brought_while_it_waited_for_its_slots(more: str, arrival_s: float) -> None:
    """The second prompt is written down for both of the last ones. A's load ends at 416: before the last one has its slots at
    419, or at the same moment."""
    settings = ON_CPU | {"gpu": 18, "placement": WriteBack}
    asks = ask(A, 0), ask("qrstuvwxyzQRSTUVW", 100), ask(A, 400), ask(A + more, arrival_s)
    whole = served(*asks, **settings)
    assert [hits(whole, index) for index in (2, 3)] == [(0, 8, 0), (8, 0, 0)]
    part = served(*asks, **settings, make_substrate=answering(cpu_gpu=[4, 6]))
    assert [hits(part, index) for index in (2, 3)] == [(0, 4, 0), (4, 0, 0)]
    assert part.ttft_s[3] > whole.ttft_s[3]


# --- write-downs ---


class Answers(SimulatedSubstrate):
    """Lets the ranks of some links answer with the pages that a test gives."""

    by_link: ClassVar[dict[str, list[int]]] = {}

    def copy(self, transfer: Transfer) -> Event:
        event = super().copy(transfer)
        if answers := self.by_link.get(transfer.name):
            pages = transfer.pages
            event.callbacks.insert(0, lambda event: setattr(event, "_value", [min(pages, answer) for answer in answers]))
        return event


def answering(**by_link: list[int]) -> type[SimulatedSubstrate]:
    return type("Answers", (Answers,), {"by_link": {name.replace("_", "-"): some for name, some in by_link.items()}})


def test_a_page_is_below_only_if_every_rank_wrote_it() -> None:
    """Of A's 8 pages one rank has written 7 and the other 5; of B's too."""
    outcome = served(*A_IS_BELOW, ask(A, 400), **ON_CPU, make_substrate=answering(gpu_cpu=[7, 5]))
    assert hits(outcome, 2) == (0, 5, 0)
    assert lost(outcome)[0] % 2 == 0 and lost(outcome)[1] >= 2
    assert outcome.placement["written_pages"] >= 10


def test_a_page_that_one_rank_has_not_written_back_is_gone() -> None:
    settings = ON_CPU | {"placement": WriteBack}
    outcome = served(*A_IS_BELOW, ask(A, 400), **settings, make_substrate=answering(gpu_cpu=[8, 6]))
    assert hits(outcome, 2) == (0, 6, 0)
    assert outcome.placement["dropped_pages"] == lost(outcome)[0] == 2 * lost(outcome)[1]


def test_nothing_is_on_disk_if_one_rank_cannot_write() -> None:
    fault = ranks(2, RankFault(rank=0, link="cpu-disk", share=1.0))
    outcome = served(*A_IS_BELOW, ask(A, 400), **ON_DISK, prefetch=eager(), hardware=fault)
    assert hits(outcome, 2) == (0, 0, 0) and outcome.tiers["disk"].inserted_pages == 0
    assert lost(outcome)[0] == 8 * 3 and outcome.placement["unreadable_pages"] == 0


# --- any run ---


class Watched(SimulatedSubstrate):
    """Keeps what the ranks of every transfer answered."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.answers: list[tuple[Transfer, Any, bool]] = []

    def copy(self, transfer: Transfer) -> Event:
        event, pages = super().copy(transfer), transfer.pages
        event.callbacks.append(lambda event: self.answers.append((transfer, event.value, transfer.has_fault and pages > 0)))
        return event


LINKS = ("cpu-gpu", "gpu-cpu", "disk-cpu", "cpu-disk")


@st.composite
def engines(draw: st.DrawFn) -> SmallEngine:
    gpus = draw(st.integers(2, 4))
    faults = []
    for rank, link in draw(st.lists(st.tuples(st.integers(0, gpus - 1), st.sampled_from(LINKS)), max_size=4, unique=True)):
        share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) if "disk" in link else 0.0
        faults.append(RankFault(rank=rank, link=link, speed=draw(st.sampled_from([0.2, 0.7])), share=share))
    stop = draw(st.sampled_from([None, *STOP_RULES]))
    return small_engine(
        gpu=draw(st.integers(2, 14)),
        cpu=draw(st.integers(2, 10)),
        disk=draw(st.integers(2, 20)),
        placement=draw(st.lists(st.sampled_from([WriteThrough, WriteBack]), min_size=2, max_size=2)),
        prefetch=NoPrefetch() if stop is None else eager(stop=stop, base_s=draw(st.sampled_from([1.0, 3.0, 9.0]))),
        hardware=ranks(gpus, *faults, jitter=draw(st.sampled_from([0.0, 0.1, 0.8]))),
        make_substrate=Watched,
        overlap=draw(st.sampled_from(["none", "layerwise"])),
        links=draw(st.sampled_from(["fifo", "shared"])),
        max_running_requests=draw(st.sampled_from([1, 100])),
    )


@SETTINGS
@given(engine=engines(), asks=asks())
def test_what_arrives_is_what_all_ranks_have_and_the_rest_is_counted(engine: SmallEngine, asks: Sequence[Ask]) -> None:
    engine.is_checked = True
    outcome = engine.serve(*asks)
    assert (outcome.hit_pages >= 0).all()
    expected = Disagreement()
    assert isinstance(engine.substrate, Watched)
    for transfer, answer, has_fault in engine.substrate.answers:
        some = [answer] if isinstance(answer, int) else answer
        assert transfer.arrived_pages == min(some)
        assert not (has_fault and transfer.goes_down)
        if len(set(some)) > 1:
            expected.pages += max(some) - min(some)
            expected.transfers += 1
    assert outcome.lost_to_disagreement == expected
