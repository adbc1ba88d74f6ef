"""The page of a shadow: small, offline, and escaped."""

import re
from pathlib import Path

import pytest

from kvsim.report.shadow.drawing import HEIGHT, WIDTH, Line, draw
from kvsim.report.shadow.page import LivePage, Occupancy, render, write_page
from kvsim.report.summary import Table

EVIL = "<script>alert('x')</script>"


def page(every_s: float | None = 2.0, name: str = "twice") -> LivePage:
    return LivePage(
        headlines=[("+6.1 points", f"{name}: eviction=arc")],
        facts=[("requests", "10")],
        warnings=["something is an estimate"],
        tables=[Table("Ghost caches", ("cache", "points"), [(name, "+6.1")], "a note"), Table("Engines", ("engine",), [("e",)])],
        lines=[Line(name, [(0.0, 0.1), (1.0, 0.2)])],
        occupancy=[Occupancy(name, "gpu", 5, 10), Occupancy(name, "cpu", 7, None)],
        command="kvsim shadow log=x",
        at_s=0.0,
        every_s=every_s,
    )


def test_the_page_loads_itself_again_until_the_end() -> None:
    assert '<meta http-equiv="refresh" content="2">' in render(page())
    assert 'content="1">' in render(page(0.2)) and "setTimeout" in render(page())
    last = render(page(None))
    assert 'http-equiv="refresh"' not in last and "setTimeout" not in last and ", the end" in last


def test_the_title_names_the_ghost_that_gains_most() -> None:
    assert "<title>kvsim shadow: +6.1 points with twice</title>" in render(page())
    assert "<title>kvsim shadow</title>" in render(page()._replace(headlines=[]))
    assert "<title>kvsim shadow</title>" in render(page()._replace(headlines=[("-2.0 points", "half: x=1")]))


def test_the_page_is_small_and_asks_for_nothing() -> None:
    text = render(page())
    assert len(text) < 20_000 and not re.search(r"""(?:src|href)=|url\(|@import""", text)


def test_what_matters_comes_first() -> None:
    text = render(page())
    places = [
        text.index(part)
        for part in ("something is an estimate", "<b>+6.1 points</b>twice", "Ghost caches", "<path d=", "How full", "Engines")
    ]
    assert places == sorted(places)
    assert "width:50.0%" in text and "7 of unlimited" in text


def test_names_are_escaped() -> None:
    text = render(page(name=EVIL))
    assert EVIL not in text and "&lt;script&gt;alert" in text


def test_a_page_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "shadow.html"
    for every_s in (2.0, None):
        write_page(path, page(every_s))
    assert path.read_text() == render(page(None)) and [one.name for one in tmp_path.iterdir()] == ["shadow.html"]


def test_lines_are_drawn_to_scale_and_broken_at_gaps() -> None:
    drawn = draw([Line("a", [(0.0, 0.0), (5.0, 0.5), (7.5, None), (10.0, 0.25)]), Line("b", [(0.0, 0.9)])])
    assert drawn is not None
    assert drawn.lines[0]["path"] == f"M0.0 {HEIGHT:.1f}L{WIDTH / 2:.1f} {HEIGHT / 2:.1f}M{WIDTH:.1f} {0.75 * HEIGHT:.1f}"
    assert [label for _, label in drawn.grid] == ["100%", "80%", "60%", "40%", "20%", "0%"] or drawn.grid[0][1] == "100%"
    assert drawn.times == ["0 s", "2 s", "5 s", "8 s", "10 s"] and drawn.lines[0]["colour"] != drawn.lines[1]["colour"]


@pytest.mark.parametrize(("most", "top"), [(0.0, "1%"), (0.04, "4%"), (0.07, "8%"), (0.31, "40%"), (0.82, "100%"), (1.0, "100%")])
def test_the_axis_ends_at_a_round_number_above_all_lines(most: float, top: str) -> None:
    drawn = draw([Line("a", [(0.0, 0.0), (1.0, most)])])
    assert drawn is not None and drawn.grid[0][1] == top and drawn.grid[-1][1] == "0%" and len(drawn.grid) <= 6


def test_one_moment_makes_no_picture() -> None:
    assert draw([]) is None and draw([Line("a", [(1.0, 0.5)])]) is None and draw([Line("a", [(0.0, None), (1.0, 0.5)])]) is None
    assert "<path" not in render(page()._replace(lines=[]))
