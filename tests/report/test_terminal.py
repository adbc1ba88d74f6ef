"""Tables on terminals of any width."""

import io

import pytest
from rich.console import Console

from kvsim.report.terminal import print_table

HEADINGS = ("job", "cpu eviction", "trace path", "hit rate", "TTFT p99 (s)", "capacity")
ROWS = [
    ("0", "write_through_selective", "../shared/traces/mooncake.jsonl.gz", "12.34%", "0.000123", "40GiB"),
    ("no cache", "", "", "0.00%", "", "3000000tokens"),
]


def printed(width: int, **settings: object) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, HEADINGS, ROWS, width, **settings)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("title", [None, "A table with a title that is longer than forty columns"])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_broken(width: int, title: str | None) -> None:
    lines = printed(width, words=(1, 2), left=(0, 1, 2), title=title)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    missing = " ".join(text.split()).partition("No room for: ")[2]
    for column, heading in enumerate(HEADINGS):
        assert (heading in missing) or all(row[column] in text for row in ROWS if column not in (1, 2) and row[column]), heading


def test_a_wide_terminal_shows_everything_on_one_line_each() -> None:
    lines = printed(200)
    assert len(lines) == 3
    assert lines[0].split() == [*["job", "cpu", "eviction", "trace", "path", "hit", "rate", "TTFT", "p99", "(s)", "capacity"]]
    assert lines[1].split() == list(ROWS[0])


def test_paths_wrap_after_their_slashes_and_names_not_at_all() -> None:
    lines = printed(82, words=(1, 2), left=(0, 1, 2))
    assert any(
        line.split() == ["0", "write_through_selective", "../shared/traces/", "12.34%", "0.000123", "40GiB"] for line in lines
    )
    assert any(line.split() == ["mooncake.jsonl.gz"] for line in lines)


def test_columns_are_left_out_in_the_given_order() -> None:
    assert "No room for: trace path, capacity. A wider" in " ".join(printed(60, drop=(2, 5, 1)))
    assert printed(200, drop=(2, 5, 1))[-1].split()[0] == "no"


def test_headings_wrap_at_words_before_a_column_is_left_out() -> None:
    lines = printed(98)
    assert "p99" in lines[0] or "p99" in lines[1]
    assert not any("No room" in line for line in lines)
