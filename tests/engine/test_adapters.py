"""LoRA adapters: who runs together, what a step costs more, and what of a cache they share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.__main__ import main
from kvsim.api import load_trace
from kvsim.core.request import Request
from kvsim.engine.adapters import AdapterSettings, AdapterSlots, AdapterWork
from kvsim.engine.substrate import Work
from kvsim.engine.watch import EngineWatch
from kvsim.hardware.spec import HardwareSpec
from kvsim.results.formulas import adapter_use
from kvsim.substrate.simulated.adapter_steps import AdapterSteps
from kvsim.substrate.simulated.compute import Roofline
from tests.engine.drawn import SETTINGS, asks
from tests.engine.small import FOREVER, HARDWARE, MODEL, STEP_READS, Ask, ask, check_idle, make_requests, seconds, small_engine

ONE_PLACE = AdapterSettings(max_loras=1, adapter_bytes=1)


def request(adapter: str) -> Request:
    return Request(index=0, arrival_s=0.0, prompt_tokens=1, output_tokens=1, runs=(), prompt_pages=0, adapter=adapter)


def with_adapters(some: list[Ask], adapters: str) -> list[Request]:
    """Requests with an adapter each, by letter; "-" is none."""
    requests = make_requests(some)
    return [replace(one, adapter=letter.strip("-")) for one, letter in zip(requests, adapters, strict=True)]


def first_tokens(settings: AdapterSettings, some: list[Ask], adapters: str, **more: Any) -> list[float]:
    engine = small_engine(gpu=99, hardware=STEP_READS, lora=settings, **more)
    outcome = engine.run(with_adapters(some, adapters))
    check_idle(engine)
    return [float(at + first) for at, first in zip(outcome.arrival_s, outcome.ttft_s, strict=True)]


def test_a_request_of_another_adapter_is_passed_over() -> None:
    """Steps take 1 s. The second request waits for the first one's adapter; those behind it do not."""
    some = [ask("a", output=4), ask("b"), ask("c"), ask("d")]
    assert first_tokens(ONE_PLACE, some, "xyx-") == seconds([1, 5, 1, 1])
    assert first_tokens(AdapterSettings(max_loras=2, adapter_bytes=1), some, "xyx-") == seconds([1, 1, 1, 1])
    assert first_tokens(AdapterSettings(), some, "xyx-") == seconds([1, 1, 1, 1])


def test_the_order_of_those_that_wait_stays() -> None:
    some = [ask("a", output=3), ask("b"), ask("c", at=0.5), ask("d", at=0.6)]
    assert first_tokens(ONE_PLACE, some, "xyzy") == seconds([1, 4, 5, 4])


def slow_loads(settings: AdapterSettings, steps: list[list[str]]) -> list[int]:
    """How many adapters each step brings to the GPU, by when each was used last."""
    last: dict[str, int] = {}
    loads = []
    for number, adapters in enumerate(steps):
        there = sorted(last, key=last.__getitem__)[-settings.max_loras :]
        loads.append(len(set(adapters) - set(there)))
        for place, adapter in enumerate(dict.fromkeys(adapters)):
            last[adapter] = 100 * number + place
    return loads


@given(
    st.integers(1, 4).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.lists(st.sampled_from("abcdef"), max_size=9))))
)
def test_the_adapter_used_longest_ago_gives_up_its_place(drawn: tuple[int, list[list[str]]]) -> None:
    most, steps = drawn
    steps = [[one for one in step if one in list(dict.fromkeys(step))[:most]] for step in steps]
    settings = AdapterSettings(max_loras=most, adapter_bytes=1)
    slots, found = AdapterSlots(settings), []
    for step in steps:
        work = slots.use([(request(adapter), 3) for adapter in step] + [(request(""), 5)])
        found.append(0 if work is None else work.loads)
        assert (work is None) == (not step)
        assert work is None or (work.tokens, work.adapters) == (3 * len(step), len(set(step)))
    assert found == slow_loads(settings, steps)


def test_a_step_pays_for_tokens_bytes_and_copies() -> None:
    """A GPU reads 1 byte and computes 1 FLOP in a second, the link carries 2 bytes; the model itself takes no time."""
    machine = HardwareSpec(
        **(HARDWARE | {"flops_per_s": FOREVER, "memory_bytes_per_s": FOREVER, "host_to_device_bytes_per_s": 2})
    )
    steps = AdapterSteps(Roofline(MODEL, machine), AdapterSettings(max_loras=4, adapter_bytes=6, step_overhead_s=0.5), machine)
    work = Work(decode_requests=3, decode_context_tokens=9)
    assert steps.leap_s(work, 5) == seconds(0)
    work.adapters = AdapterWork(tokens=3, adapters=2, loads=2)
    assert steps.leap_s(work, 5) == seconds(5 * 0.5 + 2 * 3)
    slow = HardwareSpec(**(HARDWARE | {"flops_per_s": 1.0, "memory_bytes_per_s": 2.0, "host_to_device_bytes_per_s": 2}))
    more = AdapterSteps(Roofline(MODEL, slow), AdapterSettings(max_loras=4, adapter_bytes=6), slow)
    alone = Roofline(MODEL, slow).leap_s(work, 1)
    assert more.leap_s(work, 1) - alone == pytest.approx(max(3 * 6, 2 * 6 / 2) + 2 * 3, rel=1e-3)


@SETTINGS
@given(asks(), st.data(), st.integers(1, 3), st.integers(4, 20))
def test_any_requests_end_and_no_step_has_too_many_adapters(some: list[Ask], data: st.DataObject, most: int, gpu: int) -> None:
    adapters = data.draw(st.text("xyz-", min_size=len(some), max_size=len(some)))
    settings = AdapterSettings(max_loras=most, adapter_bytes=1)
    engine = small_engine(gpu=gpu, cpu=6, lora=settings, max_running_requests=5)
    seen: list[int] = []

    class Watch(EngineWatch):
        def computes(self, work: Work, done: Any) -> None:
            seen.append(0 if work.adapters is None else work.adapters.adapters)

    engine.watches = [Watch()]
    outcome = engine.run(with_adapters(some, adapters))
    check_idle(engine)
    assert max(seen, default=0) <= most
    assert outcome.adapter_use["loads"] <= outcome.adapter_use["uses"]
    ran = [one for one in outcome.requests if one.adapter and not outcome.status[one.index] and one.output_tokens]
    assert outcome.adapter_use["uses"] >= len(ran)


def test_an_adapter_that_leaves_between_chunks_is_copied_again() -> None:
    """Two places. The request of x computes nothing in the steps of y and z, which run one after another beside it."""
    slots = AdapterSlots(AdapterSettings(max_loras=2, adapter_bytes=1))
    waits, others = request("x"), [request("y"), request("z")]
    slots.begin_round([])
    slots.admitted(waits)
    slots.use([(waits, 1)])
    for other in others:
        slots.begin_round([waits])
        assert slots.takes(other)
        slots.admitted(other)
        slots.use([(other, 1)])
    slots.use([(waits, 1)])
    assert slots.counts() == {"uses": 3, "loads": 4}
    assert adapter_use(slots.counts()) == {"uses": 3, "loads": 4, "hit_rate": 0.0}
    assert adapter_use({"uses": 4, "loads": 1}) == {"uses": 4, "loads": 1, "hit_rate": 0.75}
    assert adapter_use({"uses": 0, "loads": 0}) is None


def test_an_engine_that_is_taken_away_has_no_adapters_when_it_comes_back() -> None:
    engine = small_engine(gpu=99, hardware=STEP_READS, lora=ONE_PLACE)
    engine.run(with_adapters([ask("a")], "x"))
    engine.rest()
    assert engine.schedule.adapters is not None
    work = engine.schedule.adapters.use([(request("x"), 1)])
    assert work is not None and work.loads == 1


def test_sessions_with_different_adapters_share_no_pages() -> None:
    plain = load_trace("synthetic", sessions=40).requests
    apart = load_trace("synthetic", sessions=40, adapters=3).requests
    pages: dict[str, set[int]] = {}
    for one in apart:
        pages.setdefault(one.adapter, set()).update(page for first, count in one.runs for page in range(first, first + count))
    assert sorted(pages) == ["1", "2", "3"]
    assert not (pages["1"] & pages["2"] or pages["1"] & pages["3"] or pages["2"] & pages["3"])
    fields = ("arrival_s", "prompt_tokens", "output_tokens", "session", "turn", "kind")
    assert [[getattr(one, name) for name in fields] for one in apart] == [
        [getattr(one, name) for name in fields] for one in plain
    ]


def test_lines_name_adapters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": at, "input_length": 32, "output_length": 2, "hash_ids": [5, 6], "output_hash_ids": [], "lora": lora}
        for at, lora in enumerate(["x", None, 7, "x"])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = load_trace("mooncake", path=str(path), block_tokens=16, page_tokens=16).requests
    assert [(one.adapter, one.runs) for one in requests] == [
        ("x", ((0, 2),)), ("", ((2, 2),)), ("7", ((4, 2),)), ("x", ((0, 2),)),
    ]  # fmt: skip
    assert main(["trace", "convert", str(path), str(tmp_path / "b.jsonl"), "--block-tokens=16", "trace.block_tokens=16"]) == 0
    again = load_trace("mooncake", path=str(tmp_path / "b.jsonl"), block_tokens=16, page_tokens=16).requests
    assert [(one.adapter, one.runs) for one in again] == [(one.adapter, one.runs) for one in requests]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.lora.adapter_bytes=1MiB"], "engine.lora.adapter_bytes has no effect without places for adapters"),
        (["engine.lora.max_loras=2"], "adapter_bytes must be set with max_loras"),
        (["engine.lora.max_loras=-1"], "max_loras must be"),
        (["engine.lora.max_loras=2", "engine.lora.adapter_bytes=9", "rules=sglang"], "the schedule of SGLang's own rules"),
        (
            ["engine.lora.max_loras=2", "engine.lora.adapter_bytes=9", "cluster.prefill=1", "cluster.decode=1"],
            "with prefill and decode apart",
        ),
        (["engine.lora.max_loras=2", "engine.lora.adapter_bytes=9"], "has no effect on a trace without adapters"),
        (["engine.lora.max_loras=200", "engine.lora.adapter_bytes=1GiB", "tiers.gpu.capacity=auto"], "200.0 GiB of adapters"),
    ],
)
def test_what_cannot_be_is_refused(
    overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "trace.sessions=4", *overrides, f"output={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_places_for_adapters_take_room_from_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for number, more in enumerate(([], ["engine.lora.max_loras=8", "engine.lora.adapter_bytes=1GiB"])):
        folder = tmp_path / str(number)
        words = ["simulate", "trace.sessions=9", "trace.adapters=3", "tiers.gpu.capacity=auto", *more, f"output={folder}"]
        assert main(words) == 0
        found.append(json.loads((folder / "result.json").read_text()))
    plain, costly = (result["gpu_memory"] for result in found)
    assert plain["kv_bytes"] - costly["kv_bytes"] == costly["adapters_bytes"] == 8 * 2**30 and "adapters_bytes" not in plain
    assert found[1]["lora"]["loads"] == 3 and found[1]["lora"]["hit_rate"] == 1 - 3 / found[1]["lora"]["uses"]
    assert "lora" not in found[0] and found[0]["ttft_s"]["mean"] < found[1]["ttft_s"]["mean"]
    told = f"3 copies to the GPU for {found[1]['lora']['uses']} requests with one: "
    assert " ".join(capsys.readouterr().out.split()).count(told) == 1
    assert np.isclose(found[0]["hit_rate"], found[1]["hit_rate"], atol=0.02)
