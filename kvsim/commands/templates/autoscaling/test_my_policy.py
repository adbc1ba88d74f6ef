"""MyPolicy by hand: what it answers to what it sees."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvsim.commands.templates.autoscaling.my_policy import MyPolicy


@dataclass
class Cluster:
    """What the policy may know of a cluster (ClusterStatus); add what yours reads."""

    up: int = 2
    starting: int = 0
    waiting_requests: int = 0
    running_requests: int = 0


def engines(policy: MyPolicy, **seen: int) -> int:
    status: Any = Cluster(**seen)
    return policy.engines(status)


def test_an_engine_is_added_while_requests_wait() -> None:
    assert engines(MyPolicy(), waiting_requests=1) == 3
    assert engines(MyPolicy(), waiting_requests=1, starting=1, running_requests=48) == 3


def test_engines_leave_one_by_one() -> None:
    assert engines(MyPolicy(), up=4, running_requests=16) == 3
    assert engines(MyPolicy(), up=1, running_requests=16) == 1


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="requests_per_engine must be above 0, not -1"):
        MyPolicy(requests_per_engine=-1)
