"""Dates in place of numbers, wherever a log has a time."""

import pytest

from kvsim.api import load_trace
from kvsim.errors import TraceError

DATES = ["2024-05-01T12:00:00Z", "2024-05-01 12:00:02.250", "2024-05-01T14:00:04.500000123+02:00"]
LINES = {
    "mooncake": {"input_length": 512, "output_length": 1, "hash_ids": [1]},
    "tokens": {"token_ids": [1, 2, 3, 4], "output_length": 1},
    "bailian": {"parent_chat_id": -1, "type": "t", "turn": 1, "input_length": 16, "output_length": 1, "hash_ids": [1]},
    "lmcache": {"chunk_size": 256, "seq_len": 256, "chunk_hashes": ["0x1"]},
    "lengths": {"input_length": 9, "output_length": 1},
}


@pytest.mark.parametrize("name", LINES)
def test_a_date_is_in_utc_unless_it_has_an_offset(write, name):
    lines = [{**LINES[name], "timestamp": date, "chat_id": at} for at, date in enumerate(DATES)]
    if name != "bailian":
        lines = [{key: value for key, value in line.items() if key != "chat_id"} for line in lines]
    more = {"prefixes": 0.0} if name == "lengths" else {}
    trace = load_trace(path=write(*lines), page_tokens=16, **more)
    assert [request.arrival_s for request in trace.requests] == pytest.approx([0.0, 2.25, 4.5], abs=1e-6)


def test_dates_and_numbers_do_not_mix(write):
    lines = [{**LINES["tokens"], "timestamp": timestamp} for timestamp in (5, DATES[0])]
    with pytest.raises(TraceError, match=":2: timestamp is a date in some lines and a number in others"):
        load_trace(path=write(*lines), page_tokens=16)
