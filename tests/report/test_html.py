import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import kvsim
from kvsim.engine.outcome import Outcome
from kvsim.report.html import render
from kvsim.results.result import summarize


class Page(HTMLParser):
    """The page as a browser without JavaScript reads it: text outside scripts and styles, attributes, tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._silent else data


def page_of(outcome: Outcome, command: str = "simulate", **more: Any) -> str:
    config = {"page_tokens": 10, "trace": {"name": "<b>"}}
    return render(summarize(outcome, command=command, config=config, seed=0, warmup=0, load_s=0, versions={}, **more))


def test_the_page_loads_nothing(simulated: Outcome):
    page = page_of(simulated)
    parsed = Page(page)
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "srcset", "action"}
    assert not set(parsed.tags) & {"link", "iframe", "img", "object", "embed", "base"}
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import", style[1])
    assert any(value.startswith("default-src 'none'") for _, value in parsed.attributes)


def test_the_tables_can_be_read_without_javascript(simulated: Outcome):
    parsed = Page(page_of(simulated))
    assert parsed.tags.count("table") == len(("tiers", "links", "times"))
    for text in ("33.33% of 120 prompt tokens", "A hit is", "capacity (pages)", "unlimited", "cpu_to_gpu", "time to first token"):
        assert text in parsed.text


def test_a_run_with_a_timeline_has_a_picture_of_free_pages(simulated: Outcome):
    record = summarize(simulated, command="simulate", config={}, seed=0, warmup=0, load_s=0, versions={})
    record["timeline"]["free_pages"] = {"edges_s": [0.0, 5.0, 10.0], "mean": {"gpu": [4.0, 1.0]}}
    page = render(record)
    assert 'id="picture3"' in page and "Free pages by tier" in page
    assert "Free pages" not in page_of(simulated)


def test_a_run_without_a_clock_says_what_is_left_out(replayed: Outcome):
    page = page_of(replayed, "replay")
    assert 'id="picture0"' in page
    assert 'id="picture1"' not in page
    assert Page(page).text.count("No data: a replay has no clock.") == 2


def test_a_simulation_that_served_nothing_is_not_called_a_replay(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 4000, "output_length": 3, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n')
    outcome = kvsim.simulate(str(file), "admission=predicted_ttft", "admission.ttft_s=1e-9").outcome
    page = Page(page_of(outcome)).text
    assert not outcome.simulated_s and "no clock" not in page
    assert "No data: no request has a time." in page and "No data: no transfer took any time." in page


def test_a_run_in_which_nothing_was_served_has_no_picture_and_no_script(outcome_of: Callable[..., Outcome]):
    page = page_of(outcome_of([20], [(0, 0, 0)], rejected=[0]))
    assert "<script" not in page
    assert "No request was served." in page


def test_the_page_ends_with_the_command_that_reproduces_it(simulated: Outcome):
    text = Page(page_of(simulated, command_line="kvsim simulate page_tokens=10")).text
    foot = text.partition("Reproduce")[2].lstrip()
    assert foot.startswith("kvsim simulate page_tokens=10")
    assert "page_tokens=10\ntrace.name=<b>" in foot
