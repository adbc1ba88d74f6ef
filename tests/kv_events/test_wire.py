"""Endpoints of ranks, and what is said without pyzmq."""

import sys

import pytest

from kvsim.errors import UsageError
from kvsim.kv_events.wire import endpoint_of, is_wildcard, zmq_module


def test_endpoints_of_ranks() -> None:
    assert [endpoint_of("tcp://h:5557", rank) for rank in (0, 2)] == ["tcp://h:5557", "tcp://h:5559"]
    assert endpoint_of("tcp://[::1]:80", 1) == "tcp://[::1]:81"
    assert endpoint_of("tcp://h:0", 3) == "tcp://h:0" and endpoint_of("tcp://h:*", 3) == "tcp://h:*"
    assert endpoint_of("inproc://kv", 1) == "inproc://kv_dp1" and endpoint_of("inproc://kv", 0) == "inproc://kv"
    assert is_wildcard("tcp://*:5557") and not is_wildcard("tcp://127.0.0.1:5557")


@pytest.mark.parametrize("wrong", ["h:5557", "tcp://h", "tcp://h:x", "tcp://h:65536", "http://h:1", ""])
def test_what_is_no_endpoint_is_said_in_one_line(wrong: str) -> None:
    with pytest.raises(UsageError, match="endpoint of KV events"):
        endpoint_of(wrong, 0)


def test_without_pyzmq_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    with pytest.raises(UsageError, match=r"pyzmq is missing.*pip install kvsim\[servers\]"):
        zmq_module()
