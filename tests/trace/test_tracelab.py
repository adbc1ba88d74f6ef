"""TraceLab's CSV of rounds: prompts are put together as its own replay does."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest

from kvsim.__main__ import main
from kvsim.core.request import Request
from kvsim.errors import TraceError
from kvsim.trace.formats import recognise
from kvsim.trace.tracelab import NOTE, TraceLab

COLUMNS = "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len"
Row = tuple[int | str, int, int, float, int, float, int]
ROWS: list[Row] = [
    ("a", 20, 12, 0.0, 0, 1500.0, 4),
    ("b", 8, 4, 250.0, 0, 0.0, 0),
    ("a", 10, 6, 0.0, 1, 0.0, 30),
    ("a", 5, 1, 0.0, 2, 0.0, 13),
]
"""The second round of a keeps 30 of 36 tokens, the third 13 of 46."""


def lines(rows: Iterable[Row]) -> list[str]:
    return [COLUMNS, *(",".join(map(str, row)) for row in rows)]


def load(write: Any, rows: Iterable[Row] = ROWS, page_tokens: int = 4, **settings: Any) -> Sequence[Request]:
    return TraceLab(path=write(*lines(rows), name="trace.csv"), **settings).load(page_tokens).requests


def pages(extents: Iterable[tuple[int, int]]) -> list[int]:
    return [start + at for start, length in extents for at in range(length)]


def test_a_prompt_begins_with_what_its_prefix_says_of_the_round_before(write: Any) -> None:
    first, other, second, third = load(write)
    assert [request.prompt_tokens for request in (first, other, second, third)] == [24, 8, 40, 18]
    assert len(pages(first.runs)) == 6 and len(pages(first.output_runs or ())) == 2
    whole = [*pages(first.runs), *pages(first.output_runs or ())]
    assert pages(second.runs)[:7] == whole[:7] and not set(pages(second.runs)[7:]) & set(whole)
    assert pages(third.runs)[:3] == whole[:3] and not set(pages(third.runs)[3:]) & {*whole, *pages(second.runs)}
    assert not set(pages(other.runs)) & {*whole, *pages(second.runs)}


def test_a_round_waits_for_the_one_before_it_and_its_tools(write: Any) -> None:
    found = load(write)
    assert [(r.arrival_s, r.predecessors, r.delay_s, r.session, r.turn) for r in found] == [
        (0, (), 0, 0, 0), (0.25, (), 0, 1, 0), (1.5, (0,), 1.5, 0, 1), (1.5, (2,), 0, 0, 2),
    ]  # fmt: skip
    assert [request.arrival_s for request in load(write, rate=2.0)] == [0, 0.125, 1.5, 1.5]
    assert len(load(write, limit=2)) == 2


def test_pages_are_those_of_prompts_of_tokens(write: Any) -> None:
    """Prompts and answers as lists of tokens; equal pages are equal beginnings of such lists, and differ otherwise."""
    random, rows = Random(1), list[Row]()
    contexts: dict[int | str, list[int]] = {}
    paths, new = list[list[int]](), iter(range(10**6))
    for at in range(60):
        session, prefix, added, answer = at % 4, random.randint(0, 90), random.randint(1, 40), random.randint(0, 30)
        rows.append((session, added, answer, 0.0, at, 0.0, prefix))
        context = contexts.get(session, [])[:prefix]
        prompt = context + [next(new) for _ in range(prefix - len(context) + added)]
        contexts[session] = prompt + [next(new) for _ in range(answer)]
        paths.append(prompt + contexts[session][len(prompt) : len(prompt) + max(answer - 1, 0)])
    requests = sorted(load(write, rows), key=lambda request: (request.turn, request.session))
    of_page: dict[int, tuple[int, ...]] = {}
    for request, path in zip(requests, paths, strict=True):
        found = [*pages(request.runs), *pages(request.output_runs or ())]
        assert len(found) == len(path) // 4 and request.prompt_pages == request.prompt_tokens // 4
        for at, page in enumerate(found):
            assert of_page.setdefault(page, tuple(path[: 4 * at + 4])) == tuple(path[: 4 * at + 4])
    assert len(set(of_page.values())) == len(of_page)
    assert len(of_page) < sum(len(path) // 4 for path in paths)


def test_a_file_is_recognised_and_marked(write: Any) -> None:
    path = write(*lines(ROWS), name="trace.csv")
    assert recognise(path)[0].name == "tracelab"
    assert TraceLab(path=path).load(16).note == NOTE
    record = dict(zip(COLUMNS.replace("id", "session_id", 1).split(","), ROWS[0], strict=True))
    del record["arrival_time"]
    assert recognise(write(record))[0].name == "tracelab"
    (request,) = TraceLab(path=write(record)).load(4).requests
    assert (request.arrival_s, request.prompt_tokens) == (0, 24)


def test_a_hit_is_no_longer_than_what_was_cached(write: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With room for all, 7 and 3 pages of 4 tokens are hit, of 90 tokens; without answers, one page less."""
    path = write(*lines(ROWS), name="trace.csv")
    for cached, hits in (("true", 10), ("false", 9)):
        words = (
            f"trace.path={path}",
            "page_tokens=4",
            "tiers.gpu.capacity=100pages",
            f"output={tmp_path}/{cached}",
            f"rules.cache_output={cached}",
        )
        assert main(["replay", *words]) == 0
        shown = capsys.readouterr().out
        assert f"{4 * hits / 90:.2%}" in shown and "sessions share nothing" in shown


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a", 0, 1, 0, 3, 0, 4), "input_len must be a whole number of at least 1"),
        (("a", 5, -1, 0, 3, 0, 4), "output_len must be a whole number of at least 0"),
        (("a", 5, 1, 0, 3, -4, 4), "tool_wait_after_ms must be a number of at least 0"),
        (("a", 5, 1, 0, 2, 0, 4), "round_idx must increase within a session: 2 after 2; sort the file"),
        (("c", 5, 1, -2, 0, 0, 4), "arrival_time must be a number of at least 0"),
        (("a", 5, 1, 0, 3, 0, 10**9), "prefix_len is 1000000000 tokens, more than trace.max_tokens"),
        (
            ("a", 16_777_216, 1, 0, 3, 0, 1),
            "a prompt, prefix_len and input_len together, is 16777217 tokens, more than trace.max_tokens",
        ),
        (("", 5, 1, 0, 3, 0, 1), "id must be a string or an integer"),
    ],
)
def test_a_bad_row_is_named(row: Row, message: str, write: Any) -> None:
    path = write(*lines([*ROWS, row]), name="trace.csv")
    with pytest.raises(TraceError) as caught:
        TraceLab(path=path).load(4)
    assert str(caught.value).startswith(f"{path}:6: ") and message in str(caught.value)
