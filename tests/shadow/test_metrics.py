"""Prometheus reads names with units, and the numbers of the last look."""

import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvsim.errors import UsageError
from kvsim.shadow.metrics import MetricsServer, Seen
from tests.shadow.seen import engine, ghost, snapshot
from tests.waiting import LONG_S


def test_metrics_have_the_numbers_of_the_last_look() -> None:
    seen: list[Seen] = []
    server = MetricsServer("127.0.0.1", 0, lambda: seen[-1] if seen else None)
    try:
        assert httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=LONG_S).text == ""
        ghosts = (ghost("as_configured"), ghost('a "b"\n', points=6.1, occupancy={"gpu": (3, None)}))
        found = snapshot(*ghosts, requests=10, engines=(engine("e", rank=1),), gaps=2)
        seen.append(Seen(found, 0.4, 9, {"server": 3}))
        text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=LONG_S).text
    finally:
        server.close()
    samples = {
        (sample.name.removeprefix("kvsim_shadow_"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples.items() >= {
        ("requests_total",): 10, ("gaps_total",): 2, ("memory_bytes",): 2048, ("recorded_requests_total",): 9,
        ("engine_recent_hit_ratio",): 0.4, ("problems_total", "server"): 3, ("hit_ratio", "as_configured"): 0.5,
        ("recent_hit_ratio", "as_configured"): 0.25, ("hit_ratio_gain", 'a "b"\n'): 0.061, ("pages", "as_configured", "gpu"): 3,
        ("capacity_pages", "as_configured", "gpu"): 10, ("tier_hit_ratio", "as_configured", "gpu"): 0.5,
        ("engine_blocks", "e", "gpu", "1"): 3, ("engine_stored_blocks_total", "e", "1"): 3, ("engine_is_known", "e", "1"): 1,
        ("engine_predicted_ratio", "e", "stored", "gpu", "1"): 0.75,
    }.items()  # fmt: skip
    assert ("capacity_pages", 'a "b"\n', "gpu") not in samples and all(name.isascii() for name, *_ in samples)


def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match=r"cannot listen on .*: Address already in use"),
    ):
        MetricsServer("127.0.0.1", taken.getsockname()[1], lambda: None)
