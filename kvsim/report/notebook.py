"""Results in one line, for a prompt, and as small tables, for a notebook."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from kvsim.report.comparison.compare import Comparison
from kvsim.report.summary import facts, shed_requests, tables
from kvsim.results.rates import count, digits, percent
from kvsim.results.result import RunRecord

NAME = "text-align:left;padding:0 .8em 0 0"
NUMBER = "text-align:right;padding:0 .8em 0 0"
MOST_ROWS = 40
"""Most runs of a sweep shown in a notebook: the first ones; ``table`` has all."""


def run_line(record: RunRecord) -> str:
    """Describe a run in one line, without its name."""
    choices = record["choices"]
    about = [record["command"], *(f"{key}={choices[key]}" for key in ("trace", "model", "eviction") if key in choices)]
    capacities = [f"{name} {_capacity(tier)}" for name, tier in record["tiers"].items()]
    rate = "no prompt served" if record["hit_rate"] is None else f"hit rate {percent(record['hit_rate'])}"
    ttft = record["ttft_s"]
    times = [] if ttft["mean"] is None else [f"TTFT {digits(ttft['mean'])} s mean, {digits(ttft['p99'])} s p99"]
    rejected = [f"{count(record['rejected'])} rejected"] if record["rejected"] else []
    rejected += [f"{count(shed)} shed"] if (shed := shed_requests(record)) else []
    number = len(record["warnings"])
    warnings = [f"{number} warning{'s' * (number > 1)} in record"] if number else []
    requests = f"{count(record['requests'])} requests"
    return ", ".join([" ".join(about), *capacities, requests, *rejected, rate, *times, *warnings])


def run_html(record: RunRecord) -> str:
    """Return the facts and tables that a command prints as HTML."""
    parts = [html_table((), [(name, text) for name, text in facts(record)])]
    parts += [html_table((table.title, *table.columns[1:]), table.rows) for table in tables(record)]
    return "".join([f"<p><b>kvsim {escape(run_line(record))}</b></p>", *parts])


def comparison_html(comparison: Comparison, line: str) -> str:
    """Return the table of a comparison, with its bounds, as HTML below a line."""
    columns = ("job", *comparison.keys, *(measure.title for measure in comparison.measures))
    rows = comparison.rows()
    runs = [row for row in rows if not row.is_bound]
    shown = {row.name for row in runs[:MOST_ROWS]}
    body = [(row.name, *row.settings, *row.cells) for row in rows if row.is_bound or row.name in shown]
    more = f"<p>{len(runs) - MOST_ROWS} more runs are in <code>table</code>.</p>" if len(runs) > MOST_ROWS else ""
    return f"<p><b>{escape(line)}</b></p>{html_table(columns, body)}{more}"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of text, each beginning with a name, as an HTML table.

    Without ``columns`` there is no header, and the other cells are texts, not numbers.
    """
    others = NUMBER if columns else NAME

    def line(tag: str, cells: Sequence[str]) -> str:
        styles = (NAME if place == 0 else others for place in range(len(cells)))
        return "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for style, cell in zip(styles, cells, strict=True))

    head = f"<thead><tr>{line('th', columns)}</tr></thead>" if columns else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _capacity(tier: Mapping[str, Any]) -> str:
    return "unlimited" if tier["capacity_pages"] is None else f"{count(tier['capacity_pages'])} pages"
