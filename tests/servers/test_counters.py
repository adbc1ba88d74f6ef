"""Counters of a server, as Prometheus writes them."""

import pytest

from kvsim.errors import UsageError
from kvsim.servers.counters import counters, parse, risen

TEXT = """\
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{model_name="m",engine="0"} 96.0
# TYPE vllm:prefix_cache_hits_created gauge
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 3.0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4.0
vllm:time_to_first_token_seconds_count 4.0
vllm:time_to_first_token_seconds_sum 0.75
"""


def test_only_what_rises_is_counted_by_name_and_labels() -> None:
    assert counters(parse(TEXT, "http://a")) == {
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"}': 96.0,
        "vllm:time_to_first_token_seconds_count": 4.0,
        "vllm:time_to_first_token_seconds_sum": 0.75,
    }


def test_a_counter_that_has_fallen_counts_from_its_new_start() -> None:
    assert risen({"a": 3.0, "b": 5.0}, {"a": 7.0, "b": 2.0, "new": 1.0}) == ({"a": 4.0, "b": 2.0, "new": 1.0}, ["b"])


@pytest.mark.parametrize("text", ["<html>{</html>", "{}", "a{b=c} 1"])
def test_a_text_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"http://a/metrics cannot be read: .+") as raised:
        parse(text, "http://a")
    assert "\n" not in str(raised.value)
