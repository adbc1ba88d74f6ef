"""Every counter has a meaning, and pages show it."""

from dataclasses import fields
from typing import Any

import pytest

from kvsim.core.copies import Counts
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import PrefetchCounts
from kvsim.engine.tool_calls import ToolCallCounts
from kvsim.report.html import render
from kvsim.results.counters import COUNTERS
from kvsim.results.glossary import meanings
from kvsim.results.result import summarize
from kvsim.states.store import CheckpointCounts
from tests.outcomes import simulated

__all__ = ["simulated"]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("prefetch", PrefetchCounts),
        ("tool_calls", ToolCallCounts),
        ("placement", Counts),
        ("checkpoints", CheckpointCounts),
    ],
)
def test_every_counter_has_a_meaning(kind: str, counts: Any) -> None:
    assert list(COUNTERS[kind]) == [field.name for field in fields(counts)]


def test_help_knows_them_by_name() -> None:
    assert meanings("placement.revived_pages") == meanings("revived_pages")
    assert [name for name, _ in meanings("fetched_pages")] == ["prefetch.fetched_pages", "placement.fetched_pages"]


def test_a_page_says_what_a_counter_means(simulated: Outcome) -> None:
    simulated.placement = {"revived_pages": 7, "dropped_pages": 0}
    page = render(summarize(simulated, command="simulate", config={}, seed=0, warmup=0, load_s=0, versions={}))
    assert f'title="{COUNTERS["placement"]["revived_pages"]}"' in page and "dropped pages" not in page
