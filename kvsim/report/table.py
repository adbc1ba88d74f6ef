"""Prints one result on the terminal."""

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvsim.report.summary import Table, facts, hit_note, shares, tables
from kvsim.report.terminal import print_table
from kvsim.report.tier_looks import look_of
from kvsim.results.rates import percent
from kvsim.results.result import RunRecord

BAR_WIDTH = 72


def print_result(result: RunRecord, console: Console) -> None:
    """Print the facts, a bar that shows where the prompt tokens came from, and the tables; at most 100 columns wide."""
    width = min(console.width, 100)
    console.print(Text(f"kvsim {result['command']}", "bold"))
    console.print(_facts(result), width=width)
    console.print(_bar(result, console, min(width, BAR_WIDTH)), width=width)
    console.print(Text(hit_note(result), "dim"), width=width)
    for table in tables(result):
        console.print()
        print_summary(table, console, width)
        if table.note:
            console.print(Text(table.note, "dim"), width=width)


def _facts(result: RunRecord) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    for name, text in facts(result):
        grid.add_row(Text(name, "dim"), Text(text, "bold" if name == "hit rate" else ""))
    return grid


def _bar(result: RunRecord, console: Console, bar_width: int) -> Text:
    """Draw a bar of prompt tokens by where they came from, to scale, with a legend."""
    plain = not console.encoding.startswith("utf")
    bar, legend, share_so_far = Text(), Text(), 0.0
    for name, share in shares(result):
        look = look_of(name)
        mark, style = look.ascii_mark if plain else look.mark, look.style
        width = round((share_so_far + share) * bar_width) - round(share_so_far * bar_width)
        share_so_far += share
        bar.append(mark * width, style)
        legend.append(mark, style).append(f" {name} {percent(share)}   ")
    return Text("\n").join((Text(), bar, legend))


def print_summary(table: Table, console: Console, width: int) -> None:
    """Print a table of a summary without its title."""
    last = len(table.columns) - 1  # says most: the hit rate, the 99th percentile
    print_table(console, table.columns, table.rows, width, drop=[*range(last - 1, 0, -1), last])
