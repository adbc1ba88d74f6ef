"""What studies of published results count with: other caches, orders, conversations. Each example is small enough to follow."""

import csv
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from kvsim.trace.base import Trace
from tests.experiments.test_studies import EXPERIMENTS, study
from tests.workloads import make_request, pages_of, wildchat

FILES = ("trace_a", "trace_b", "lmsys", "sharegpt", "swebench")
"""Published files, which are not in the repository."""
READ = {int: int, float: lambda text: float(text or "nan"), str: str, bool: "True".__eq__}


@pytest.mark.parametrize("name", ["workload_aware", "hybrid_states", "lmetric"])
def test_a_page_is_what_its_program_writes_of_its_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that was changed on the page alone would be lost when the study is repeated."""
    module = study(name, monkeypatch)
    cell, row = ([READ[kind] for kind in get_type_hints(each).values()] for each in (module.Cell, module.Row))
    rows = {}
    with (EXPERIMENTS / name / "results.csv").open() as file:
        for line in list(csv.reader(file))[1:]:
            values = [read(text) for read, text in zip(cell + row, line, strict=True)]
            rows[module.Cell(*values[: len(cell)])] = module.Row(*values[len(cell) :])
    page = "\n".join(module.page(Namespace(limit=module.STUDY.limit, **dict.fromkeys(FILES)), rows)) + "\n"
    assert page == (EXPERIMENTS / name / "results.md").read_text()


def test_the_rule_of_blocks_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for three blocks. LRU drops the end of the older prompt, compute its start: what is behind the hole is hit."""
    study("compute_savings", monkeypatch)
    flat = sys.modules["flat_blocks"]
    requests = [make_request(pages, prompt_tokens=len(pages)) for pages in ([1, 2], [3, 4], [1, 2], [5, 6, 7, 8])]
    found = {name: flat.replay(requests, 3, np.array([1.0, 3.0, 5.0]), score) for name, score in flat.SCORES.items()}
    assert found["lru"] == flat.Savings(hit_rate=1 / 6, saved=1 / 12, skipped=1)
    assert found["random_compute"] == flat.Savings(hit_rate=1 / 6, saved=3 / 12, skipped=1)
    assert found["belady"].hit_rate == 1 / 6 and found["belady_compute"].saved == 3 / 12


def test_the_rule_of_blocks_with_foresight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt 1 is used again before prompt 2, which is never: Belady drops its blocks at once for the third prompt."""
    study("compute_savings", monkeypatch)
    flat = sys.modules["flat_blocks"]
    requests = [make_request(pages, prompt_tokens=len(pages)) for pages in ([1, 2], [3, 4], [5, 6], [1, 2])]
    costs = np.array([1.0, 3.0])
    assert flat.replay(requests, 4, costs, flat.SCORES["lru"]).hit_rate == 0
    assert flat.replay(requests, 4, costs, flat.SCORES["belady"]) == flat.Savings(2 / 8, 4 / 16, 0)
    following, starts = flat.next_uses([flat.ids_of(request) for request in requests])
    assert starts == [0, 2, 4, 6] and following[0].tolist() == [6, 6] and set(following[1].tolist()) == {flat.NEVER}


def test_orders_are_compared_by_kendalls_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    study("compute_savings", monkeypatch)
    published = sys.modules["published_savings"]
    ranks = {"a": 1, "b": 2, "c": 2, "d": 4}
    assert published.kendall({"a": 0.9, "b": 0.5, "d": 0.1, "x": 0.7}, ranks) == 1
    assert published.kendall({"a": 0.1, "b": 0.5, "d": 0.9}, ranks) == -1
    assert published.kendall({"a": 0.9, "b": 0.5, "c": 0.4, "d": 0.1}, ranks) == pytest.approx(5 / (6 * 5) ** 0.5)
    assert published.kendall({"a": 0.5, "b": 0.5}, ranks) == 0
    assert published.published(327_548).file == "freeinference.lcp.zst" and published.published(9) is None


def test_requests_longer_than_the_models_context_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("compute_savings", monkeypatch)
    sizes = (10, module.CONTEXT_TOKENS, module.CONTEXT_TOKENS + 1, 20)
    requests = [make_request([at], index=at, prompt_tokens=tokens) for at, tokens in enumerate(sizes)]
    given = Trace(name="made", requests=requests, page_tokens=16, block_tokens=None)
    assert [(one.index, one.prompt_tokens) for one in module.without_long(given).requests] == [(0, 10), (1, sizes[1]), (2, 20)]
    short = Trace(name="made", requests=requests[:2], page_tokens=16, block_tokens=None)
    assert module.without_long(short) is short


def test_conversations_of_published_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study("tail_latency", monkeypatch)
    read = sys.modules["drawn_conversations"].read
    turns = read(str(wildchat(tmp_path)), 0, 10)
    assert [turn[1:] for turn in turns] == [(0, 0, 2, 3), (1, 0, 2, 3), (0, 5, 2, 3)]
    assert [turn.at_s - turns[0].at_s for turn in turns] == [0, 60, 120]
    words = [{"from": "human", "value": "1234"}, {"from": "gpt", "value": "12345678"}, {"from": "human", "value": "no answer"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "a", "conversations": words}, {"id": "b", "conversations": []}]))
    (turn,) = read(str(path), 0, 10)
    assert turn[1:] == (0, 0, 1, 2) and turn.at_s > 0


def test_what_conversations_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 10 tokens. The first conversation ends with 6, the second with 7; then the first asks 1 more."""
    study("tail_latency", monkeypatch)
    cache = sys.modules["conversation_cache"]
    turns = [cache.Turn(0.0, 0, 0, 4, 2), cache.Turn(1.0, 1, 0, 3, 4), cache.Turn(2.0, 0, 6, 1, 1)]

    def uncached(**rule: Any) -> list[int]:
        computed: list[int] = cache.uncached_tokens(turns, 10, cache.Rule(**rule))
        return computed

    assert uncached() == [4, 3, 4], "LRU takes the 3 tokens too many from the first"
    assert uncached(threshold=3, next_prompt=1) == [4, 3, 3], "2 from the first, which then computes 3, and 1 from the second"
    assert uncached(least_history=7) == [4, 3, 7], "the first is not cached"
    assert uncached(knows_future=True) == [4, 3, 1], "the second never comes again"
    assert cache.uncached_tokens(turns, 2, cache.Rule()) == [4, 3, 7], "a turn may be longer than the cache"
    assert cache.next_turns(turns) == [2, float("inf"), float("inf")]


def test_drawn_conversations_are_requests_that_continue_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    study("tail_latency", monkeypatch)
    drawn = sys.modules["drawn_conversations"]
    kind = drawn.Conversations(turns=3.0, prompt_tokens=40, prompt_spread=1.0, answer_tokens=60, answer_spread=0.5, pause=0.5)
    turns = drawn.draw(kind, seed=1, turns=300)
    assert turns == sorted(turns) and turns == drawn.draw(kind, seed=1, turns=400)[:300] != drawn.draw(kind, seed=2, turns=300)
    assert 30 < np.mean([turn.prompt for turn in turns]) < 50 and 50 < np.mean([turn.answer for turn in turns]) < 70
    held: dict[int, list[int]] = {}
    for turn, request in zip(turns, drawn.as_trace(turns, 16).requests, strict=True):
        prompt, answer = pages_of(request.runs), pages_of(request.output_runs)
        before = held.get(turn.session, [])
        assert len(prompt) == request.prompt_pages == (turn.history + turn.prompt) // 16 and prompt[: len(before)] == before
        assert len(prompt) + len(answer) == (turn.end - 1) // 16
        held[turn.session] = [*prompt, *answer]
    assert len({page for pages in held.values() for page in pages}) == sum(map(len, held.values()))


def test_times_to_first_token_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """.1 ms per token: 10, 20, ... 100 ms. Above 75 ms are three, by 5, 15 and 25 ms."""
    study("tail_latency", monkeypatch)
    tail = sys.modules["tail_runs"].tail([100 * at for at in range(1, 11)], slo_ms=75, threshold_ms=75)
    assert (tail.p50, tail.p90, tail.violations, tail.excess) == pytest.approx((55, 91, 0.3, 4.5))
