"""The search for the cheapest configuration, against trying all of them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import UsageError
from kvsim.sweeps.planning import Planned
from kvsim.sweeps.prices import read_prices
from kvsim.sweeps.purchase import DEARER, FAILS, HOLDS, REFUSED, SKIPPED, Candidate, Ended, cheapest, priced, search, why

KINDS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0]), st.integers(0, 30))
"""Price, pages of the GPU tier, attainment apart from rejected requests, milliseconds to the first token."""


def candidate(price: float, **more: Any) -> Candidate:
    return Candidate(
        **{"gpu": "a", "engines": 1, "gpus": 1, "cpu_bytes": 0, "drive": "none", "disk_bytes": 0, "policy": "", "lines": (),
           "price": price} | more
    )  # fmt: skip


def plan(pages: int, **config: Any) -> Any:
    return SimpleNamespace(tiers=[SimpleNamespace(capacity_pages=pages)], config=config, states=None)


def result(attainment: float, rejected: int = 0, ttft_s: float = 0.1, **diagnosis: Any) -> dict[str, Any]:
    return {
        "slo": {"attainment": attainment}, "rejected": rejected, "requests": 100, "ttft_s": {"p99": ttft_s},
        "diagnosis": {"bottleneck": "gpu", "busy": {"gpu": 0.9}, "text": "GPU, 90% busy"} | diagnosis,
    }  # fmt: skip


@given(st.lists(KINDS, min_size=1, max_size=8), st.sampled_from([0.0, 0.5, None]), st.sampled_from([0.9, 0.95, 1.0]))
def test_the_cheapest_is_that_of_trying_all(
    kinds: list[tuple[int, int, float, int]], beyond: float | None, target: float
) -> None:
    """A tier of 1 page rejects 20 of 100 requests, one of 2 pages 4, and one of 3 pages none."""
    kinds = sorted(kinds)
    found = [candidate(float(price), engines=at + 1) for at, (price, *_) in enumerate(kinds)]
    ran = []

    def attempt(number: int, one: Candidate, built: Any) -> Ended:
        ran.append(number)
        _, pages, attainment, ms = kinds[number]
        rejected = {1: 20, 2: 4, 3: 0}[pages]
        attained = min(attainment, 1 - rejected / 100)
        outcome = HOLDS if attained >= target else FAILS
        return Ended(candidate=one, outcome=outcome, result=result(attained, rejected, ms / 1000), plan=built)

    def searched(is_certain: bool, far: float | None) -> list[Ended]:
        plans = {one.engines: plan(pages) for one, (_, pages, *_) in zip(found, kinds, strict=True)}
        how: dict[str, Any] = {"refused": {}, "attainment": target, "beyond": far, "is_certain": is_certain}
        return search(found, lambda one: plans[one.engines], attempt, **how)

    every = searched(False, None)
    assert ran == list(range(len(found)))
    ran.clear()
    some = searched(True, beyond)
    assert cheapest(some) == cheapest(every)
    for at, (short, whole) in enumerate(zip(some, every, strict=True)):
        assert (short.outcome in (SKIPPED, DEARER)) == (at not in ran)
        assert short.outcome == DEARER or (short.outcome == HOLDS) == (whole.outcome == HOLDS), "what is skipped fails"


def test_a_tier_is_compared_only_with_the_same_rules() -> None:
    """With pages or rules of another kind, other requests fit."""
    found = [candidate(1.0), candidate(2.0)]

    def outcomes(first: Any, second: Any) -> list[str]:
        attempt = lambda number, one, built: Ended(  # noqa: E731
            candidate=one, outcome=FAILS, result=result(0.5, 50), plan=built
        )
        plans = iter([first, second])
        ended = search(found, lambda one: next(plans), attempt, refused={}, attainment=0.9, beyond=None, is_certain=True)
        return [one.outcome for one in ended]

    assert outcomes(plan(5, page_tokens=16, hardware="a"), plan(5, page_tokens=16, hardware="b")) == [FAILS, SKIPPED]
    assert outcomes(plan(5, page_tokens=16), plan(6, page_tokens=16)) == [FAILS, FAILS]
    assert outcomes(plan(5, page_tokens=16), plan(5, page_tokens=8)) == [FAILS, FAILS]


def test_copies_in_cpu_memory_change_the_order_of_prices() -> None:
    """At 1 a GiB, 4 GiB twice cost more than 6 GiB once; what cannot run has no copies, and stays refused at its new place."""
    prices = read_prices({"per": "hour", "gpus": {"h100": 1}, "cpu_gib": 1})
    problem = UsageError("no")
    found = Planned(
        jobs=[candidate(5.0, gpu="h100", gpus=gpus, cpu_bytes=gib * 2**30) for gpus, gib in ((1, 4), (1, 6), (4, 2), (2, 5))],
        refused={3: problem},
    )
    after = priced(found, prices, lambda one: 2 if one.cpu_bytes == 4 * 2**30 else 1)
    assert [(one.price, one.cpu_bytes // 2**30, one.cpu_copies) for one in after.jobs] == [
        (6.0, 2, 1), (7.0, 6, 1), (7.0, 5, 1), (9.0, 4, 2),
    ]  # fmt: skip
    assert after.refused == {2: problem}


def test_at_one_price_the_least_hardware_comes_first_then_the_best_attainment() -> None:
    one = candidate(1.0, cpu_bytes=2)
    ended = [
        Ended(candidate=one, outcome=HOLDS, result=result(1.0)),
        Ended(candidate=replace(one, cpu_bytes=1), outcome=HOLDS, result=result(0.9, ttft_s=0.3)),
        Ended(candidate=replace(one, cpu_bytes=1, policy="slru"), outcome=HOLDS, result=result(0.95)),
        Ended(candidate=replace(one, cpu_bytes=0), outcome=REFUSED),
    ]
    assert cheapest(ended) == 2 and cheapest(ended[3:]) is None


def test_the_reason_is_what_was_busy_or_what_requests_take_alone() -> None:
    def reason(attainment: float, **more: Any) -> str:
        return why(
            Ended(candidate=candidate(1.0), outcome=FAILS, result=result(attainment, **more)), 0.95, lambda: ["alone: 2 s"]
        )

    assert reason(0.5) == "GPU, 90% busy"
    assert reason(0.5, rejected=2) == "GPU, 90% busy; 2 requests never fit into the GPU tier"
    assert reason(0.5, rejected=20) == "20 requests never fit into the GPU tier; GPU, 90% busy"
    assert reason(0.5, bottleneck="none", text="none") == "alone: 2 s; none"
    assert reason(0.5, busy={"gpu": 0.1}) == "alone: 2 s; GPU, 90% busy"
    assert reason(0.5, bottleneck="room", text="room on the GPU") == "room on the GPU"
