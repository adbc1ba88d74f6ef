"""``kvsim trace info``: describes a trace and compares it with published ones."""

from collections.abc import Sequence
from typing import Any

from omegaconf import open_dict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvsim.build import build_trace
from kvsim.configuration import compose
from kvsim.errors import TraceError, UsageError
from kvsim.trace.base import Trace
from kvsim.trace.records import read_records
from kvsim.trace.statistics import PUBLISHED, ReuseStatistics, reuse_statistics, trace_statistics

USAGE = """\
usage: kvsim trace info FILE [KEY=VALUE ...]
       kvsim trace info trace=synthetic [KEY=VALUE ...]

Shows the statistics of a trace next to those of published traces. The format is guessed unless trace=NAME
is given. Settings are those of a run, for example page_tokens=512, trace.tail=all, trace.limit=1000."""

FORMATS = {"chat_id": "bailian", "input_length": "mooncake", "requests": "weka", "token_ids": "tokens"}
"""The field that identifies each format, and the format's choice of the group ``trace``. The first field found decides."""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand with the arguments that follow ``kvsim trace``."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments[1:] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if arguments[0] != "info":
        raise UsageError(f"kvsim trace has no command {arguments[0]!r}; use kvsim trace info")
    show(load(arguments[1:]))


def load(arguments: Sequence[str]) -> Trace:
    """Load the trace that a file, overrides or both describe."""
    paths = [word for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    if len(paths) > 1 or any(word.startswith("-") for word in arguments):
        raise UsageError(f"cannot parse {' '.join(arguments)!r}: use kvsim trace info FILE KEY=VALUE ...")
    if paths and not any(override.startswith("trace=") for override in overrides):
        overrides.append(f"trace={guess_format(paths[0])}")
    cfg = compose(overrides)
    if paths:
        with open_dict(cfg.trace):
            cfg.trace.path = paths[0]
    source, page_tokens = build_trace(cfg)
    return source.load(page_tokens)


def guess_format(path: str) -> str:
    """Guess a file's format from the fields of its first record. Raises TraceError if none matches."""
    fields = next(read_records(path, 1)).fields
    for field, name in FORMATS.items():
        if field in fields:
            return name
    known = ", ".join(f"{name} ({field})" for field, name in FORMATS.items())
    raise TraceError(path, 1, f"unknown format: found none of the fields of {known}; set trace=NAME")


def show(trace: Trace) -> None:
    """Print the statistics of the trace, with one column for each published trace, and how its pages are reused."""
    table = Table(title=f"{trace.name}, in pages of {trace.page_tokens} tokens", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for name in ("this trace", *PUBLISHED):
        table.add_column(name, justify="right")
    for row, value in trace_statistics(trace).items():
        table.add_row(row, text(value), *(text(other.get(row)) for other in PUBLISHED.values()))
    console = Console()
    console.print(table)
    if resets := sum(len(request.resets) for request in trace.requests):
        console.print(f"Resets of the cache: {resets:,}. The reuse shown is that of a cache that keeps its pages.")
    if images := sum(len(request.images) for request in trace.requests):
        console.print(f"Images: {images:,}. The reuse shown may end inside an image, where no hit ends.")
    reuse = reuse_statistics(trace)
    if reuse.reused_pages:
        _show_reuse(trace, reuse, console)
    else:
        console.print("No page is used twice.")


def _show_reuse(trace: Trace, reuse: ReuseStatistics, console: Console) -> None:
    """Print four tables about the reuse of pages."""
    tokens = sum(request.prompt_tokens for request in trace.requests)
    console.print(
        f"{reuse.shared_tokens / tokens:.2%} of the prompt tokens are shared with an earlier request, "
        f"in {reuse.requests_that_share / len(trace.requests):.2%} of the requests.\n",
        highlight=False,
    )
    _print(
        console,
        "Reuse distance: pages that LRU must hold to hit a reused page",
        ("reused pages", *(f"{share:.0%}" for share in reuse.reuse_distance)),
        [("need at most", *(f"{pages:,}" for pages in reuse.reuse_distance.values()))],
    )
    _print(
        console,
        "Working set",
        ("", "pages", "tokens"),
        [
            *(
                (f"LRU reaches {share:.0%} of an unlimited cache's hit tokens", *_size(pages, trace.page_tokens))
                for share, pages in reuse.lru_pages.items()
            ),
            *(
                (f"used in {_duration(window_s)}, {which}", *_size(pages, trace.page_tokens))
                for window_s, mean, most in reuse.working_sets
                for which, pages in (("on average", round(mean)), ("at most", most))
            ),
        ],
    )
    unique, total = (sum(getattr(users, name) for users in reuse.users) for name in ("unique_pages", "pages"))
    _print(
        console,
        "Pages by the number of requests that use them",
        ("requests", "unique pages", "share", "share of prompt pages"),
        [
            (_range(users.fewest, users.most), f"{users.unique_pages:,}", f"{users.unique_pages / unique:.2%}",
             f"{users.pages / total:.2%}")
            for users in reuse.users
        ],
    )  # fmt: skip
    _print(
        console,
        "Prefixes whose last part is reused most",
        ("length (pages)", "length (tokens)", "requests", "share of reused pages"),
        [
            (*_size(prefix.pages, trace.page_tokens), f"{prefix.requests:,}", f"{prefix.reused_pages / reuse.reused_pages:.2%}")
            for prefix in reuse.prefixes
        ],
    )


def _print(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _size(pages: int, page_tokens: int) -> tuple[str, str]:
    return f"{pages:,}", f"{pages * page_tokens:,}"


def _duration(seconds: float) -> str:
    names = {60.0: "a minute", 600.0: "10 minutes", 3_600.0: "an hour", 86_400.0: "a day"}
    return names.get(seconds, f"{seconds:g} s")


def _range(fewest: int, most: int | None) -> str:
    return f"{fewest} or more" if most is None else f"{fewest}" if most == fewest else f"{fewest} to {most}"


def text(value: Any) -> str:
    """Format a statistic: integers and values from 100 on without decimals, values below 1 with six, others with one."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.6f}" if value < 1 else f"{value:.1f}"
