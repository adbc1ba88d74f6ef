"""``kvsim trace``: describes a trace and compares it with published ones, converts it, or downloads a published one."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from kvsim.commands import trace_fetch
from kvsim.commands.trace_convert import USAGE as CONVERT_USAGE
from kvsim.commands.trace_convert import convert
from kvsim.errors import UsageError
from kvsim.plans.build import build_trace
from kvsim.report.terminal import print_table
from kvsim.settings.configuration import compose, quoted
from kvsim.suggest import closest
from kvsim.trace.base import Trace, TraceSource
from kvsim.trace.formats import format_of, load_source
from kvsim.trace.spreading import shared_times
from kvsim.trace.statistics import PUBLISHED, ReuseStatistics, reuse_statistics, trace_statistics

USAGE = """\
usage: kvsim trace info FILE [KEY=VALUE ...]          describe a trace
       kvsim trace convert FILE OUT [KEY=VALUE ...]   write a trace that can be shared: no text, no tokens
       kvsim trace fetch [NAME]                       download a published trace

Run kvsim trace COMMAND --help for details."""

INFO_USAGE = """\
usage: kvsim trace info FILE [KEY=VALUE ...]
       kvsim trace info trace=synthetic [KEY=VALUE ...]

Shows the statistics of a trace (FILE - is standard input) next to those of published traces. The format is recognised unless
trace=NAME is given. Settings are those of a run, for example page_tokens=512, trace.tail=all, trace.limit=1000."""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand with the arguments that follow ``kvsim trace``."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    name, *rest = arguments
    if name not in COMMANDS:
        hint = closest(name, COMMANDS) or ";"
        raise UsageError(f"kvsim trace has no command {name!r}{hint} use kvsim trace info, convert or fetch")
    run, usage = COMMANDS[name]
    if rest in (["-h"], ["--help"]):
        print(usage)
        return
    run(rest)


def info(arguments: Sequence[str]) -> None:
    """Describe a trace."""
    source, page_tokens = describe(arguments)
    show(load_source(source, page_tokens), format_of(source))


def describe(arguments: Sequence[str]) -> tuple[TraceSource, int]:
    """Return the trace that a file, overrides or both describe, and its page size."""
    paths = [word for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    if len(paths) > 1 or any(word.startswith("-") and word != "-" for word in arguments):
        raise UsageError(f"cannot parse {' '.join(arguments)!r}: use kvsim trace info FILE KEY=VALUE ...")
    if paths:
        overrides.append(f"trace.path={quoted(paths[0])}")
    return build_trace(compose(overrides))


def show(trace: Trace, format_name: str) -> None:
    """Print the statistics of the trace, with one column for each published trace, and how its pages are reused."""
    name = f"{trace.name} (trace={format_name})" if format_name else trace.name
    rows = [
        (row, text(value), *(text(other.get(row)) for other in PUBLISHED.values()))
        for row, value in trace_statistics(trace).items()
    ]
    console = Console()
    _print(console, f"{name}, in pages of {trace.page_tokens} tokens", ("", "this trace", *PUBLISHED), rows)
    if shared := shared_times(trace.requests):
        console.print(f"Arrivals: {shared.warning()}.", highlight=False)
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
    print_table(console, columns, rows, console.width, words=(0,), title=title)


def _size(pages: int, page_tokens: int) -> tuple[str, str]:
    return f"{pages:,}", f"{pages * page_tokens:,}"


def _duration(seconds: float) -> str:
    names = {60.0: "a minute", 600.0: "10 minutes", 3_600.0: "an hour", 86_400.0: "a day"}
    return names.get(seconds, f"{seconds:g} s")


def _range(fewest: int, most: int | None) -> str:
    return f"{fewest} or more" if most is None else f"{fewest}" if most == fewest else f"{fewest} to {most}"


def text(value: Any) -> str:
    """Format a statistic: no decimals for integers and values from 100, six for values below 1, one for others."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.6f}" if value < 1 else f"{value:.1f}"


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "info": (info, INFO_USAGE),
    "convert": (convert, CONVERT_USAGE),
    "fetch": (trace_fetch.run, trace_fetch.USAGE),
}
"""The commands of ``kvsim trace``: what runs, and its help."""
