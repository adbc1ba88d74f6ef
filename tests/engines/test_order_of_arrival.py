"""First come, first served in a closed loop, where the order of arrival is not that of the trace."""

import numpy as np
import pytest

import kvsim
from kvsim.run.execute import Result

LOADED = "trace.sessions=60", "trace.sessions_per_s=20", "trace.limit=150", "tiers.gpu.capacity=8GiB"
TWICE_AS_LOADED = "trace.sessions=120", "trace.sessions_per_s=40", "trace.limit=300", "tiers.gpu.capacity=8GiB"


def passed(result: Result) -> int:
    """Count the requests, of those that ran once, that an engine admitted after one that had arrived later."""
    rows = result.requests
    once = rows[(rows["retractions"] == 0) & (rows["status"] == "finished")]
    return sum(passed_in(once[once["engine"] == engine]) for engine in set(once["engine"]))


def passed_in(rows: np.ndarray) -> int:
    """Count them among the requests of one engine."""
    arrived_s = np.array(rows["arrival_s"])
    admitted_s = arrived_s + np.array(rows["queue_s"])
    order = np.argsort(arrived_s, kind="stable")
    first_after_s = np.minimum.accumulate(admitted_s[order][::-1])[::-1]
    return int(np.sum(admitted_s[order][:-1] > first_after_s[1:] + 1e-9))


@pytest.mark.parametrize("rules", ["default", "vllm", "sglang", "lightllm", "fastdeploy"])
def test_under_no_rules_is_a_request_passed_by_a_later_one(rules: str) -> None:
    result = kvsim.simulate("synthetic", *LOADED, f"rules={rules}")
    assert np.any(np.diff(np.array(result.requests["arrival_s"])) < 0)
    assert float(np.max(result.requests["queue_s"])) > 1
    assert passed(result) == 0


@pytest.mark.parametrize(
    "cluster",
    [
        "tiers.cpu.capacity=20GiB",
        "cluster.engines=2",
        "cluster.engines=2 cluster.failures=[{engine: 1, at_s: 5, back_after_s: 5}]",
        "cluster.prefill=1 cluster.decode=1",
    ],
)
def test_in_no_cluster_is_a_request_passed_by_a_later_one(cluster: str) -> None:
    first, *rest = cluster.split(" ", 1)
    result = kvsim.simulate("synthetic", *TWICE_AS_LOADED, first, *rest)
    assert passed(result) == 0
