"""What the studies in experiments/ share: options, worker processes, result files, exit code.

A study is a folder with a ``run.py``. Its docstring asks a question and states claims that can fail; its functions name the
cells to run, run one of them, judge the claims, and lay out the page and the figure. ``Study.main`` does the rest, and writes

results.csv     all numbers
results.md      the claims with what was measured, and tables
results.html    the figure, with results.png as its screenshot where a Chromium is installed
"""

import csv
import io
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

from kvsim.files.writing import replacing
from kvsim.report.screenshot import take_screenshot
from kvsim.trace.base import Trace

Cell = TypeVar("Cell")
Row = TypeVar("Row")
Place = TypeVar("Place")


class Recording(NamedTuple):
    """A recorded trace that a study plays."""

    file: str
    description: str


CONVERSATION = Recording("mooncake_conversation_trace.jsonl.gz", "the Mooncake conversation trace")
WEKA = Recording("weka_claude_code_traces_rle.jsonl.gz", "WEKA's agent sessions")


class Claim(NamedTuple):
    """What a study claims, what it measured, and whether the claim holds."""

    text: str
    measured: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Study(Generic[Cell, Row]):
    """A question, and how it is answered: one ``Row`` of results for each ``Cell``."""

    file: str
    """Path of the run.py; its folder receives the results."""
    question: str | None
    """Docstring of the run.py, shown by ``--help``."""
    traces: dict[str, Recording]
    """Recorded traces, by the option that gives their path."""
    cells: Callable[[], Iterable[Cell]]
    """What to run."""
    run: Callable[[Namespace, Cell], Row]
    """Runs one cell in a worker process; cache the trace, so that each worker reads it once."""
    claims: Callable[[dict[Cell, Row]], list[Claim]]
    """What is claimed, judged by the results."""
    table: Callable[[dict[Cell, Row]], Iterable[Sequence[object]]]
    """Lines of results.csv, the head first."""
    page: Callable[[Namespace, dict[Cell, Row]], Iterable[str]]
    """Lines of results.md."""
    figure: Callable[[dict[Cell, Row]], Any]
    """A Plotly figure with width and height."""
    limit: int | tuple[int, ...] | None = None
    """Requests to play: one number for every trace (``--limit``), or one each (``--requests``); None plays whole traces."""
    processes: int | None = 2
    """Worker processes; None starts one per core."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that may be given beside the traces, by option, with what they are; None in the options of ``run`` if not given."""

    def main(self) -> int:
        """Run every cell and write the results. Return 1 if a claim fails, else 0; with fewer requests always 0."""
        options = self.options()
        began = perf_counter()
        rows = self.play(options)
        write_csv(options.output, self.table(rows))
        print(write_page(options.output, self.page(options, rows)))
        write_figure(options.output, self.figure(rows))
        print(f"{len(rows)} cells took {perf_counter() - began:,.0f} s")
        return 0 if options.limit != self.limit or all(claim.holds for claim in self.claims(rows)) else 1

    def options(self) -> Namespace:
        """Read the command line: a path per trace, ``limit`` and ``output``."""
        return self.parser().parse_args()

    def parser(self) -> ArgumentParser:
        """Return the parser of the command line."""
        parser = option_parser(self.file, self.question, self.traces)
        for option, text in self.files.items():
            parser.add_argument(f"--{option}", type=existing_trace, help=text)
        if isinstance(self.limit, tuple):
            name, count, default = "--requests", len(self.limit), " and ".join(map(str, self.limit))
        else:
            name, count, default = "--limit", None, str(self.limit or "all")
        text = f"requests to play from each trace; the claims are about the default, {default}"
        parser.add_argument(name, dest="limit", type=int, nargs=count, default=self.limit, metavar="N", help=text)
        return parser

    def to_play(self, options: Namespace) -> list[Cell]:
        """Return the cells to run with these options."""
        return list(self.cells())

    def play(self, options: Namespace) -> dict[Cell, Row]:
        """Run all cells, several at a time, and return their results in the same order."""
        cells = self.to_play(options)
        with ProcessPoolExecutor(self.processes, mp_context=get_context("fork")) as pool:
            return dict(zip(cells, pool.map(partial(self.run, options), cells), strict=True))


def option_parser(file: str, question: str | None, traces: dict[str, Recording]) -> ArgumentParser:
    """Return a parser with an option for each trace, by default in shared/traces beside the repository, and ``--output``."""
    parser = ArgumentParser(description=question, formatter_class=RawDescriptionHelpFormatter)
    folder = Path(file).resolve().parent
    for option, (name, description) in traces.items():
        default = str(folder.parents[2] / "shared" / "traces" / name)
        parser.add_argument(f"--{option}", type=existing_trace, default=default, help=description)
    parser.add_argument("--output", type=Path, default=folder, help="folder of the results")
    return parser


def existing_trace(path: str) -> str:
    """Return the absolute path of a trace; argparse reports the error if there is none."""
    if not Path(path).exists():
        raise ArgumentTypeError(f"no trace at {path}; set this option to its path")
    return str(Path(path).resolve())


def write_csv(folder: Path, lines: Iterable[Sequence[object]]) -> None:
    """Write results.csv; like the page, into a folder that is created if missing."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "results.csv") as file:
        file.write(text.getvalue().encode())


def write_page(folder: Path, lines: Iterable[str], name: str = "results.md") -> str:
    """Write a page and return its text."""
    text = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / name) as file:
        file.write(text.encode())
    return text


def write_figure(folder: Path, figure: Any) -> None:
    """Write results.html and, where a Chromium is installed, results.png."""
    page, margin = folder / "results.html", 16
    with replacing(page) as file:
        file.write(figure.to_html(include_plotlyjs=True, config={"displayModeBar": False}).encode())
    width, height = figure.layout.width + margin, figure.layout.height + margin
    take_screenshot(page, folder / "results.png", width=width, height=height)


def capacities(**gib: float) -> tuple[str, ...]:
    """Return the overrides that give tiers these sizes, in GiB: ``capacities(gpu=60, cpu=800)``."""
    return tuple(f"tiers.{tier}.capacity={size}GiB" for tier, size in gib.items())


def with_conversations(trace: Trace) -> Trace:
    """Return a trace whose prompts that share their second page are one conversation, for a file that names none.

    The first page may be a system prompt. A prompt without a second full page is of no conversation.
    """
    for request in trace.requests:
        (start, length), *others = request.runs
        request.session = start + 1 if length > 1 else others[0][0] if others else -1
    return trace


def lowest(values: Mapping[Place, float]) -> tuple[Place, float]:
    """Return the place with the lowest value, and the value."""
    return min(values.items(), key=itemgetter(1))


def highest(values: Mapping[Place, float]) -> tuple[Place, float]:
    """Return the place with the highest value, and the value."""
    return max(values.items(), key=itemgetter(1))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *text: str) -> list[str]:
    """Return the lines of a section: a table, after the lines that say what it shows."""
    return ["", f"## {title}", "", *((*text, "") if text else ()), *markdown(head, rows)]


def verdict(holds: bool) -> str:
    return "holds" if holds else "FAILS"


def claim_table(claims: Iterable[Claim]) -> list[str]:
    """Return the Markdown table of claims."""
    return markdown(("claim", "measured", ""), [(text, measured, verdict(holds)) for text, measured, holds in claims])


def opening(title: str, text: Iterable[str], picture: str, claims: Iterable[Claim], finding: str = "") -> list[str]:
    """Return the lines that a page begins with: what was played, the figure, the claims and, if there is one, the finding."""
    lines = [f"# {title}", "", *text, "", f"![{picture}](results.png)", "", *claim_table(claims)]
    return [*lines, "", finding] if finding else lines


def bold(values: Sequence[float], best: float | None, form: str = ".4f") -> list[str]:
    """Return the values as text, those equal to ``best`` in bold."""
    return [f"**{value:{form}}**" if value == best else f"{value:{form}}" for value in values]
