"""When the requests of a JSON-lines trace arrive."""

import pytest

from kvsim.errors import TraceError
from kvsim.trace.records import Record
from kvsim.trace.timetable import Timetable


def place(*lines, **settings):
    times = Timetable(settings.pop("rate", 1.0), **settings)
    return [tuple(times.place(Record("f", number, fields)))[:5] for number, fields in enumerate(lines, 1)]


def test_timestamps_are_milliseconds_from_the_first_one():
    assert place({"timestamp": 5000}, {"timestamp": 5000}, {"timestamp": 6500.5}) == [
        (0.0, -1, 0.0, -1, 0),
        (0.0, -1, 0.0, -1, 0),
        (1.5005, -1, 0.0, -1, 0),
    ]


def test_a_rate_divides_timestamps_and_leaves_delays():
    assert place({"timestamp": 0}, {"timestamp": 4000, "session_id": "a"}, {"session_id": "a", "delay": 3000}, rate=2.0) == [
        (0.0, -1, 0.0, -1, 0),
        (2.0, -1, 0.0, 0, 0),
        (5.0, 1, 3.0, 0, 1),
    ]


def test_a_delay_waits_for_the_turn_before_it_even_if_a_timestamp_is_there():
    first, other, second, third = place(
        {"timestamp": 0, "session_id": 7, "delay": 9000},
        {"timestamp": 1000, "session_id": "7"},
        {"timestamp": 2000, "session_id": 7, "delay": 500},
        {"timestamp": 3000, "session_id": 7},
    )
    assert first == (0.0, -1, 0.0, 0, 0)
    assert other == (1.0, -1, 0.0, 1, 0)
    assert second == (2.0, 0, 0.5, 0, 1)
    assert third == (3.0, -1, 0.0, 0, 2)


def test_without_timestamps_everything_begins_at_once():
    assert place({"session_id": "a"}, {}, {"session_id": "a", "delay": 250}) == [
        (0.0, -1, 0.0, 0, 0),
        (0.0, -1, 0.0, -1, 0),
        (0.25, 0, 0.25, 0, 1),
    ]


def test_a_session_may_begin_before_the_first_timestamp():
    lines = {"session_id": "a", "delay": 9}, {"session_id": "a", "delay": 500}, {"timestamp": 7000}, {"timestamp": 8000}
    assert [at[:3] for at in place(*lines)] == [(0.0, -1, 0.0), (0.5, 0, 0.5), (0.0, -1, 0.0), (1.0, -1, 0.0)]


def joined(*lines, **settings):
    """(arrival, requests waited for, delay, turn) of each line."""
    times = Timetable(settings.pop("rate", 1.0), **settings)
    places = [times.place(Record("f", number, fields)) for number, fields in enumerate(lines, 1)]
    return [(at.arrival_s, (at.after, *at.joins), at.delay_s, at.turn) for at in places]


def test_a_line_may_wait_for_lines_that_it_names():
    diamond = (
        {"session_id": "a", "request_id": "plan", "output_length": 1},
        {"session_id": "a", "request_id": "left", "after": ["plan"], "delay": 100},
        {"session_id": "a", "request_id": "right", "after": ["plan"], "delay": 300},
        {"session_id": "a", "request_id": 7, "after": ["left", "right", "left"], "delay": 50},
        {"session_id": "a", "after": []},
        {"after": [7]},
    )
    assert joined(*diamond) == [
        (0.0, (-1,), 0.0, 0),
        (0.1, (0,), 0.1, 1),
        (0.3, (0,), 0.3, 2),
        (0.35, (1, 2), 0.05, 3),
        (0.0, (-1,), 0.0, 4),
        (0.35, (3,), 0.0, 0),
    ]


def test_the_timestamp_of_a_line_that_waits_only_orders_it():
    lines = (
        {"timestamp": 0, "request_id": 1},
        {"request_id": 2, "after": [1], "delay": 5000},
        {"timestamp": 2000, "after": [1, 2]},
    )
    assert joined(*lines) == [(0.0, (-1,), 0.0, 0), (5.0, (0,), 5.0, 0), (5.0, (0, 1), 0.0, 0)]


def test_a_request_id_names_the_latest_line_before():
    assert joined({"request_id": 1}, {"request_id": 1, "after": [1]}, {"after": [1]}) == [
        (0.0, (-1,), 0.0, 0),
        (0.0, (0,), 0.0, 0),
        (0.0, (1,), 0.0, 0),
    ]


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([{"timestamp": 9}, {"timestamp": 8}], {}, "f:2: timestamps must not decrease: 8 ms after 9 ms; sort the file"),
        ([{"timestamp": 0}, {}], {}, "f:2: timestamp is missing"),
        ([{"timestamp": 0}, {"session_id": 1, "delay": 5}], {}, "f:2: timestamp is missing"),
        ([{"timestamp": -1}], {}, "f:1: timestamp must be 0 or more, not -1"),
        (
            [{"timestamp": 0, "session_id": 1}, {"session_id": 1, "delay": -1}],
            {},
            "f:2: delay must be 0 or more",
        ),
        ([{"timestamp": 0, "session_id": 1.5}], {}, "f:1: session_id must be a string or an integer"),
        ([{}, {"timestamp": 0}], {}, "f:2: this line has a timestamp but an earlier one has none"),
        ([{"after": ["a"]}], {}, 'f:1: after names "a", but no earlier line has that request_id'),
        ([{"request_id": 1}, {"after": ["1"]}], {}, 'f:2: after names "1", but no'),
        ([{"request_id": 1}, {"after": [True]}], {}, "f:2: after names true, but no"),
        ([{"request_id": 1}, {"after": [[]]}], {}, "f:2: after names [], but no"),
        ([{"request_id": 1}, {"after": 1}], {}, "f:2: after must be a list, not 1"),
        ([{"request_id": 1.5}], {}, "f:1: request_id must be a string or an integer"),
        ([{"timestamp": 0}, {"after": []}], {}, "f:2: timestamp is missing"),
        ([{}], {"rate": 2.0}, "f:1: rate=2.0 has no effect on a file without timestamps"),
    ],
)
def test_bad_times_are_refused(lines, settings, message):
    with pytest.raises(TraceError) as caught:
        place(*lines, **settings)
    assert str(caught.value).startswith(message)
