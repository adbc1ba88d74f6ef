"""What an emulator takes, and what it makes of it."""

import asyncio

import pytest

from kvsim.emulation import services
from kvsim.emulation.emulator import Emulator
from kvsim.emulation.served import Served
from kvsim.emulation.services import build_apis
from kvsim.emulation.settings import ServeSettings
from kvsim.errors import UsageError
from kvsim.pages.extents import count_pages
from tests.servers.emulated import plan_of
from tests.waiting import LONG_S

OVERRIDES = ("preset=vllm", "tiers.gpu.capacity=100pages")


async def served_of(*prompts: list[int], speed: float = 1000.0) -> list[Served]:
    """Requests of these prompts, one after another, each with an answer of 20 tokens."""
    emulator = Emulator(plan_of(OVERRIDES), speed)
    clock = asyncio.create_task(emulator.run())
    all_served: list[Served] = []
    for prompt in prompts:
        served = emulator.submit(prompt, 20)
        all_served.append(served)
        while not served.is_ended:
            served.news.clear()
            await asyncio.wait_for(served.news.wait(), LONG_S)
    assert emulator.unfinished == 0
    assert emulator.served == {}
    clock.cancel()
    return all_served


def test_prompts_share_pages_as_far_as_their_tokens_are_equal() -> None:
    first, second = asyncio.run(served_of(list(range(40)), [*range(32), 99, 98]))
    assert (first.request.prompt_pages, first.request.runs) == (2, ((0, 2),))
    assert second.request.runs == ((0, 2),) and second.cached_tokens[0] == 32
    assert first.generated == 20 and first.first_token_s < first.end_s


def test_answers_differ_and_have_pages_after_their_prompts() -> None:
    first, second = asyncio.run(served_of(list(range(40)), list(range(40))))
    assert first.answer != second.answer
    assert count_pages(first.request.output_runs or ()) == 1, "59 tokens are three pages"
    assert first.request.output_runs != second.request.output_runs


def test_a_request_that_can_never_run_is_rejected() -> None:
    (served,) = asyncio.run(served_of(list(range(1700))))
    assert served.is_rejected and served.generated == 0 and served.cached_tokens == ()


@pytest.mark.parametrize("turns", range(8))
def test_its_time_ends_whenever_it_is_cancelled(turns: int) -> None:
    """While it waits for an event, when a request has just woken it, and at each turn of the loop after that."""

    async def is_ended() -> bool:
        emulator = Emulator(plan_of(OVERRIDES), 1e-6)
        clock = asyncio.create_task(emulator.run())
        for _ in range(10):
            emulator.submit(list(range(40)), 20)
            await asyncio.sleep(0)
        emulator.submit(list(range(40)), 20)
        for _ in range(turns):
            await asyncio.sleep(0)
        clock.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        return clock.cancelled()

    assert asyncio.run(is_ended())


def test_a_request_that_is_refused_ends_at_once_and_leaves_nothing() -> None:
    """The first one runs, the second one waits for the next step, and the third one finds it waiting."""

    async def refused() -> list[bool]:
        emulator = Emulator(plan_of((*OVERRIDES, "admission=queue_limit", "admission.waiting_requests=1")), 0.001)
        served = [emulator.submit(list(range(40)), 20) for _ in range(3)]
        assert [one.is_ended for one in served] == [one.is_shed for one in served] == [one.is_refused for one in served]
        assert emulator.unfinished == 2 and list(emulator.served) == [0, 1] and not any(one.is_rejected for one in served)
        return [one.is_shed for one in served]

    assert asyncio.run(refused()) == [False, False, True]


def test_pages_are_dropped_only_while_no_request_runs() -> None:
    async def emptied() -> list[bool]:
        emulator = Emulator(plan_of(OVERRIDES), 0.001)
        before = emulator.empty()
        emulator.submit(list(range(40)), 20)
        return [before, emulator.empty()]

    assert asyncio.run(emptied()) == [True, False]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("substrate=hardware", "page_tokens=16"), "only simulated engines can be emulated"),
        (("eviction=belady", "tiers.gpu.capacity=100pages"), "Belady is a bound"),
        (("eviction=belady_compute",), "BeladyCompute must know all requests in advance"),
        (("prefetch=tool_calls", "tiers.cpu.capacity=9GiB"), "ToolCallPrefetch must know which request continues another one"),
    ],
)
def test_plans_that_cannot_be_emulated_are_refused(overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Emulator(plan_of(overrides))


def test_engines_side_by_side_have_policies_of_their_own() -> None:
    plan = plan_of((*OVERRIDES[1:], "eviction=arc", "scheduling=longest_prefix"))
    first, second = [api.emulator.cluster.engines[0] for api in build_apis(plan, 2, "vllm", ServeSettings())]
    assert first.gpu.eviction is not second.gpu.eviction and type(first.gpu.eviction) is type(second.gpu.eviction)
    assert first.continuous.queue._policy is not second.continuous.queue._policy


def test_engines_side_by_side_share_their_settings() -> None:
    """They are frozen: if their class is compiled, they cannot be copied."""
    plan = plan_of(OVERRIDES[1:])
    one = services.plan_of(plan, 1)
    assert one.engine is plan.engine and one.cluster is plan.cluster
    assert one.scheduling is not plan.scheduling and one.seed == plan.seed + 1
