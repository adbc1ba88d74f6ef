"""What a run calls its bottleneck, on small engines whose waits are known."""

from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import Outcome
from kvsim.report.summary import facts
from kvsim.results.diagnosis import diagnosis
from tests.outcomes import make_outcome

LINEAR = (
    "model=tiny", "hardware=linear", "hardware.fixed_s=0.01", "hardware.prefill_token_s=0.001", "hardware.decode_request_s=0",
    "hardware.chunk_context_s=0", "hardware.decode_context_s=0",
)  # fmt: skip


def waited(queue_s: float, load_s: float, *, busy_s: float, claiming_s: float = 0.0, **links: float) -> dict[str, Any]:
    """Four requests, one a second, that wait as long and then compute for a second, in 10 s; links are busy for so long."""
    outcome: Outcome = make_outcome([20] * 4, [(0, 0, 0)] * 4, ttft_s=[queue_s + load_s + 1.0] * 4)
    outcome.columns |= {"queue_s": np.full(4, queue_s), "load_s": np.full(4, load_s)}
    outcome.engines_busy_s, outcome.engines_claiming_s = [busy_s], [claiming_s]
    outcome.tiers["gpu"].capacity_pages = 1000
    for name, seconds in links.items():
        outcome.links[name.replace("_", "-")] = LinkUse(busy_s=seconds, bytes=10**9, intervals=np.array([[0, seconds, 10**9, 0]]))
    found = diagnosis(outcome, 1000)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("run", "bottleneck"),
    [
        ({"queue_s": 0.05, "load_s": 0.05, "busy_s": 9.9}, "none"),
        ({"queue_s": 1.0, "load_s": 0.0, "busy_s": 9.0}, "gpu"),
        ({"queue_s": 0.2, "load_s": 0.5, "busy_s": 9.0, "cpu_gpu": 3.0, "disk_gpu": 4.0, "gpu_cpu": 9.9}, "disk-gpu"),
        ({"queue_s": 1.0, "load_s": 0.0, "busy_s": 9.0, "gpu_cpu": 9.6}, "gpu-cpu"),
        ({"queue_s": 1.0, "load_s": 0.0, "busy_s": 9.8, "gpu_cpu": 9.6}, "gpu"),
        ({"queue_s": 1.0, "load_s": 0.0, "busy_s": 9.0, "gpu_cpu": 5.0, "cpu_disk": 9.9}, "gpu"),
        ({"queue_s": 1.0, "load_s": 0.0, "busy_s": 9.0, "claiming_s": 3.0, "gpu_cpu": 5.0, "cpu_disk": 9.9}, "cpu-disk"),
    ],
)
def test_the_bottleneck_is_what_requests_wait_for(run: dict[str, float], bottleneck: str) -> None:
    found = waited(**run)
    assert found["bottleneck"] == bottleneck
    assert found["busy"]["gpu"] == pytest.approx(run["busy_s"] / 10)


def test_the_sentence_has_the_numbers() -> None:
    found = waited(1.0, 0.5, busy_s=8.0, gpu_cpu=2.5)
    assert found["text"] == (
        "GPU, 80.00% busy; of a mean TTFT of 2.50 s, requests wait 1.00 s in the queue and 0.500 s for loads; gpu-cpu 25.00% busy"
    )


def test_without_a_clock_nothing_is_said() -> None:
    assert diagnosis(make_outcome([20] * 4, [(0, 0, 0)] * 4), 1000) is None


def simulated(gap_s: float, tokens: int, *more: str) -> dict[str, Any]:
    """100 prompts, none like another, one after each gap, with answers of 50 tokens; a token takes 1 ms, a step 10 ms more."""
    prompts = [[1000 * number + at for at in range(tokens)] for number in range(100)]
    trace = kvsim.trace_from_tokens(prompts, arrivals_s=[gap_s * number for number in range(100)], output_tokens=50)
    return kvsim.simulate(trace, *LINEAR, *more).record


def test_an_idle_engine_has_no_bottleneck_and_a_busy_one_is_it() -> None:
    assert simulated(10.0, 100, "tiers.gpu.capacity=1000pages")["diagnosis"]["bottleneck"] == "none"
    found = simulated(0.1, 100, "tiers.gpu.capacity=100000pages", "engine.max_running_requests=2")["diagnosis"]
    assert found["bottleneck"] == "gpu" and found["busy"]["gpu"] > 0.95


def test_an_engine_whose_memory_is_full_lacks_room() -> None:
    """A request takes 10 of 25 pages: two run, which hold 80 %, and the others wait for room."""
    found = simulated(0.1, 100, "tiers.gpu.capacity=25pages")["diagnosis"]
    assert found["bottleneck"] == "room" and found["text"].startswith("room on the GPU: running requests hold it during 99.99%")


def test_drive_writes_are_bytes_of_a_day_over_the_capacity() -> None:
    record = simulated(
        0.5, 100, "tiers.gpu.capacity=200pages", "tiers.cpu.capacity=200pages", "tiers.disk.capacity=400pages",
        "placement=write_through",
    )  # fmt: skip
    written = record["links"]["cpu-disk"]["bytes"]
    capacity = 400 * record["page_bytes"]
    assert written > 0
    expected = written / record["simulated_s"] * 86400 / capacity
    assert record["diagnosis"]["drive_writes_per_day"] == pytest.approx(expected)
    assert "drive writes a day" in dict(facts(record))["disk"] and dict(facts(record))["bottleneck"]
