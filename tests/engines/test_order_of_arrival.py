"""First come, first served in a closed loop, where the order of arrival is not that of the trace, under each engine's rules."""

import numpy as np
import pytest

import kvsim
from kvsim.run.execute import Result


def passed(result: Result) -> int:
    """Count the requests, of those that ran once, that were admitted after one that had arrived later."""
    rows = result.requests
    once = rows["retractions"] == 0
    arrived_s = np.array(rows["arrival_s"][once])
    admitted_s = arrived_s + np.array(rows["queue_s"][once])
    order = np.argsort(arrived_s, kind="stable")
    first_after_s = np.minimum.accumulate(admitted_s[order][::-1])[::-1]
    return int(np.sum(admitted_s[order][:-1] > first_after_s[1:] + 1e-9))


@pytest.mark.parametrize("rules", ["default", "vllm", "sglang", "lightllm", "fastdeploy"])
def test_in_a_closed_loop_nobody_is_passed_by_a_later_arrival(rules: str) -> None:
    loaded = "trace.sessions=60", "trace.sessions_per_s=20", "trace.limit=150", "tiers.gpu.capacity=8GiB"
    result = kvsim.simulate("synthetic", *loaded, f"rules={rules}")
    arrivals = np.array(result.requests["arrival_s"])
    assert np.any(np.diff(arrivals) < 0)
    assert float(np.max(result.requests["queue_s"])) > 1
    assert passed(result) == 0
