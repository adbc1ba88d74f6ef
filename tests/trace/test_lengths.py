"""Logs that tell only lengths."""

import json
import time

import pytest

from kvsim.bounds.lru_curve import LruCurve
from kvsim.cli import main
from kvsim.errors import TraceError
from kvsim.pages.extents import count_pages
from kvsim.trace.formats import recognise
from kvsim.trace.lengths import Lengths

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:48.1805900,0,9",
    "2023-11-16 18:15:50.6805999,396,109",
)
BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,a,1.5,ChatGPT,472,18,490,Conversation log",
    "45.5,,2,GPT-4,1087,230,1317,API log",
    "118,a,1,ChatGPT,600,20,620,Conversation log",
)
LINES = [{"timestamp": 1000 * number, "input_length": 640, "output_length": 64} for number in range(400)]


def load(write, *lines, name="log.csv", page_tokens=16, **settings):
    return Lengths(path=write(*lines, name=name), **settings).load(page_tokens)


def test_azures_log_is_read(write):
    requests = load(write, *AZURE, prefixes=0.0).requests
    assert [(round(r.arrival_s, 5), r.prompt_tokens, r.output_tokens, r.prompt_pages) for r in requests] == [
        (0.0, 374, 44, 23),
        (4.00001, 396, 109, 24),
    ]


def test_a_turn_of_a_session_continues_the_one_before_it(write):
    first, other, second = load(write, *BURST, prefixes=0.0).requests
    assert [(r.arrival_s, r.session, r.turn, r.kind) for r in (first, other, second)] == [
        (0.0, 0, 0, "Conversation log"),
        (40.5, -1, 0, "API log"),
        (113.0, 0, 1, "Conversation log"),
    ]
    shared = (472 + 18) // 16
    pages = [page for start, length in (*first.runs, *first.output_runs) for page in range(start, start + length)]
    again = [page for start, length in second.runs for page in range(start, start + length)]
    assert again[:shared] == pages[:shared]
    assert not set(again[shared:]) & set(pages)


@pytest.mark.parametrize("lines", [AZURE, BURST, LINES])
def test_without_prefixes_it_is_refused_by_name(write, lines):
    path = write(*lines, name="log.csv")
    assert recognise(path)[0].name == "lengths"
    with pytest.raises(TraceError, match=r"(Azure|BurstGPT|lengths).*not what they share.*trace\.prefixes=0\.5"):
        Lengths(path=path).load(16)


def test_more_prefixes_are_more_hits(write):
    """The share of requests that continue another one is the probability."""
    hits = []
    for prefixes in (0.0, 0.3, 0.7, 1.0):
        requests = load(write, *LINES, prefixes=prefixes, seed=3).requests
        new = sum(request.runs[-1][0] + request.runs[-1][1] > first for request, first in firsts(requests))
        hits.append(round(1 - new / len(requests), 1))
        curve = LruCurve(requests, 16, recompute_last_token=False)
        assert curve.unique_pages <= sum(request.prompt_pages for request in requests)
    assert hits[0] == 0.0 and hits[1] == 0.3 and hits[2] == 0.7 and hits[3] > 0.9


def firsts(requests):
    """Each request with the number of page ids before it."""
    top = 0
    for request in requests:
        yield request, top
        top = max(top, *(start + length for start, length in (*request.runs, *request.output_runs)))


def test_pages_are_the_same_for_any_limit_and_rate(write):
    whole = load(write, *LINES, prefixes=0.5).requests
    part = load(write, *LINES, prefixes=0.5, limit=50, rate=2.0).requests
    assert [request.runs for request in part] == [request.runs for request in whole[:50]]
    assert all(count_pages(request.runs) == request.prompt_pages == 40 for request in whole)


def test_results_say_that_prefixes_are_made_up(write, tmp_path, capsys):
    path = write(*LINES)
    note = "prefixes are synthetic: a prompt continues an earlier one with probability 0.5 (trace.prefixes)"
    assert main(["replay", f"trace.path={path}", "trace.prefixes=0.5", f"output={tmp_path / 'run'}"]) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["trace_note"], record["choices"]["trace"]) == (note, "lengths")
    assert note in record["warnings"]
    assert main(["curve", f"trace.path={path}", "trace.prefixes=0.5", f"output={tmp_path / 'curve'}"]) == 0
    assert json.loads((tmp_path / "curve" / "curve.json").read_text())["trace_note"] == note


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16,x,4", ':3: ContextTokens must be a whole number of at least 0, not "x"'),
        ("yesterday,3,4", ':3: TIMESTAMP must be a date such as 2023-11-16 18:15:46.68, not "yesterday"'),
        ("2023-11-16,3", ":3: has 2 cells, but there are 3 columns"),
    ],
)
def test_a_bad_row_is_named(write, row, message):
    path = write(AZURE[0], AZURE[1], row, name="log.csv")
    with pytest.raises(TraceError) as caught:
        Lengths(path=path, prefixes=0.5).load(16)
    assert str(caught.value) == f"{path}{message}"


def test_a_probability_is_between_0_and_1():
    with pytest.raises(ValueError, match="prefixes must be from 0 to 1, not 2"):
        Lengths(path="x", prefixes=2.0)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_dates_do_not_depend_on_the_time_zone_of_the_machine(write, zone, monkeypatch):
    """The clocks of New York are set back at 2 o'clock on the first of these days, and forward on the second."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for before, after in (("2023-11-05 01:59:59", "2023-11-05 02:00:01"), ("2023-03-12 01:59:59", "2023-03-12 02:00:01")):
            requests = load(write, AZURE[0], f"{before},374,44", f"{after},374,44", prefixes=0.0).requests
            assert [request.arrival_s for request in requests] == [0.0, 2.0]
        offset = load(write, AZURE[0], "2023-11-05 01:59:59,374,44", "2023-11-04T21:00:01-05:00,374,44", prefixes=0.0).requests
        assert [request.arrival_s for request in offset] == [0.0, 2.0]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_sessions_are_text(write):
    names = ("007", "7", "1_0", "10", "1e5", "100000", "nan", "infinity", "0x1f", "7.0", "'a'", "٣")
    rows = [f"{at},{name},1,GPT-4,16,4,20,API log" for at, name in enumerate(names)]
    requests = load(write, BURST[0], *rows, prefixes=0.0).requests
    assert [request.session for request in requests] == list(range(len(names)))


def test_quoted_cells_are_read(write):
    rows = (
        '"Timestamp","Session ID",Elapsed time,Model,"Request tokens",Response tokens,Total tokens,Log Type',
        '"5","a, b",1.5,"Chat ""GPT""","472",18,490,"Conversation, log"',
        '6,"a, b",1.5,GPT-4,600,18,618,"two\nlines"',
    )
    first, second = load(write, *rows, prefixes=0.0).requests
    assert (first.prompt_tokens, first.kind, first.session) == (472, "Conversation, log", 0)
    assert (second.turn, second.arrival_s, second.kind) == (1, 1.0, "two\nlines")


@pytest.mark.parametrize("number", ["1_000", "٣٠", "\uff13\uff10", "0x10", "1e3", "3.0", "nan", "--3", "1" * 41, "true", "+"])
def test_tokens_are_decimal_digits(write, number):
    with pytest.raises(TraceError, match=r"log.csv:2: Request tokens must be a whole number of at least 0, not "):
        load(write, BURST[0], f"5,a,1.5,GPT-4,{number},18,490,API log", prefixes=0.0)


@pytest.mark.parametrize("number", ["1_0.5", "٣", "nan", "inf", "infinity", "1e999", "0x1p3", "5 5", "1e+"])
def test_times_are_decimal_numbers(write, number):
    with pytest.raises(TraceError, match=r"log.csv:2: Timestamp must be a number"):
        load(write, BURST[0], f"{number},a,1.5,GPT-4,30,18,490,API log", prefixes=0.0)


def test_numbers_as_programs_write_them_are_read(write):
    times = ("1e-05", "0.5", ".75", "1.", "+2", " 3 ", "4E0")
    requests = load(write, BURST[0], *[f"{time},a,1,G, 30 ,18,48,A" for time in times], prefixes=0.0).requests
    assert [round(request.arrival_s, 6) for request in requests] == [0, 0.49999, 0.74999, 0.99999, 1.99999, 2.99999, 3.99999]


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (BURST[0] + ",Timestamp", "5,a,1.5,G,1,1,2,A,6", ":1: the column Timestamp is there 2 times: rename all but one"),
        (BURST[0], '5,"a"b,1.5,G,1,1,2,A', ":2: not CSV: "),
        (BURST[0], '5,"a,1.5,G,1,1,2,A', ":2: not CSV: unexpected end of data"),
        (BURST[0], "5," + "a" * 200_000 + ",1.5,G,1,1,2,A", ":2: not CSV: field larger than field limit"),
    ],
)
def test_what_is_no_csv_is_named(write, header, row, message):
    with pytest.raises(TraceError) as caught:
        load(write, header, row, prefixes=0.0)
    assert message in str(caught.value)
