"""The page of a validation against a server, and its tables."""

import io
from typing import Any

from rich.console import Console

from kvsim.report.servers.page import lines, print_server, render_server, tables
from kvsim.report.servers.scores import Compared, score
from kvsim.report.servers.series import series
from kvsim.results.observed import ObservedRun
from kvsim.results.result import plain
from kvsim.results.tolerances import Tolerances
from tests.report.servers.observed_runs import observed
from tests.report.test_html import Page

FACTS = {"engine": "vllm", "version": "0.33.0", "model": "m", "page_tokens": 16, "capacity_tokens": 60_000}
TIERS = {"device": [0, 50, 48, 0]}


def record(real: list[ObservedRun], given: list[ObservedRun], simulated: ObservedRun, **more: Any) -> dict[str, Any]:
    runs = Compared(real=real, given=given, simulated=[simulated])
    about = [
        {"source": run.source, "client": run.client, "failed": 0, "preemptions": 0, "late_s": 0.0, "notes": ["Slow."]}
        for run in real
    ]
    made = {
        "command_line": "kvsim validate server=http://server", "config": {"page_tokens": 16}, "choices": {"preset": "vllm"},
        "versions": {"python": "3.11"}, "seed": 0, "server": FACTS, "runs": about, "simulations": 1, "rejected": 0,
        "notes": ["Noted."], **score(runs, Tolerances()), **series(runs),
    }  # fmt: skip
    return {name: plain(value) for name, value in (made | more).items()}


REAL = [observed([0, 50, 48, 0], tiers=TIERS), observed([0, 50, 50, 0], tiers=TIERS)]
WHOLE = record(REAL, [observed([0, 50, 48, 0]), observed([0, 50, 48, 0])], observed([0, 50, 50, 0], tiers=TIERS))


def test_the_tables_stand_side_by_side_with_the_spread_of_real_runs() -> None:
    hits, media, times, tolerances = tables(WHOLE)
    assert hits.rows == [
        ("server's order", "0, 1 of 4", "24.50%", "24.75%", "-0.25", "1 differ, 0.50 points"),
        ("simulated", "0.5", "25.00%", "24.75%", "+0.25", "1 differ, 0.50 points"),
    ]
    assert media.rows == [("device", "98", "98", "+0.0%", "0.0%")]
    assert times.rows[0] == ("time to first token, mean (ms)", "1,000", "1,000", "+0.0%", "0.0%") and len(times.rows) == 14
    assert [row[-1] for row in tolerances.rows] == ["FAILS", "holds", "holds", "holds", "holds"]


def test_what_must_be_known_of_the_runs_is_said_once() -> None:
    assert lines(WHOLE)[:3] == ["4 requests: 2 runs on vLLM 0.33.0, 1 simulation.", "Noted.", "Slow."]
    few = record(REAL[:1], [], observed([0, 50, 50, 0], failed=[0]), rejected=1, server=None)
    assert lines(few)[0] == ("4 requests: 1 run on a server (kvsim), 1 simulation. Rejected by the simulation: 1. Compared: 3.")


def test_preemptions_explain_what_differs() -> None:
    runs = [{**WHOLE["runs"][0], "preemptions": 2}, WHOLE["runs"][1]]
    shown = lines(WHOLE | {"runs": runs})
    assert "Preemptions: 2, 0. In the server's order, they are played as answers show them (not SGLang's with a host)." in shown


def test_the_page_is_self_contained_and_shows_all_scores() -> None:
    page = render_server(WHOLE)
    assert not {name for name, _ in Page(page).attributes} & {"src", "href", "srcset", "action"}
    for title in ("Cached tokens by request", "Time to first token by request", "Cached tokens by medium", "Hit rate over time"):
        assert title in page
    assert "60,000 tokens" in page and "kvsim validate server=http://server" in page
    assert render_server(WHOLE) == page


def test_without_hits_the_page_has_times_only() -> None:
    bare = record([observed(None)], [], observed(None))
    page = render_server(bare)
    assert "Times and throughput" in page and "Cached tokens" not in page and "Hit rate over time" not in page
    assert [table.title for table in tables(bare)] == ["Times and throughput", "Tolerances"]


def test_the_terminal_has_the_tables() -> None:
    text = io.StringIO()
    print_server(WHOLE, Console(file=text, width=100))
    assert "server's order" in text.getvalue() and "FAILS" in text.getvalue()
