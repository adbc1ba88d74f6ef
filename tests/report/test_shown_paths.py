"""Pages are shared, so they do not show where on somebody's machine files lie."""

import shutil
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.report.shown_paths import shortest, shown_command, shown_place, without_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/some one/x.jsonl", "x.jsonl"),
        ("trace.path=/home/someone/x.jsonl", "trace.path=x.jsonl"),
        ("[/home/someone/x,/d/e] of ~/logs/z.gz", "[x,e] of z.gz"),
        ("mooncake · /home/someone/x.gz: cannot be read", "mooncake · x.gz: cannot be read"),
        ("file:///home/someone/x", "x"),
        ("/home/someone/runs/", "runs"),
        ("5 tokens/s, busy time / total time, a/b/c, ../a/b, https://x.org/a/b, /h", None),
    ],
)
def test_a_path_is_the_name_of_its_file(text: str, shown: str | None) -> None:
    assert without_folders(text) == (text if shown is None else shown)


def test_a_command_stays_one() -> None:
    assert (
        shown_command("kvsim replay 'trace.path=/home/some one/x y.jsonl' seed=1") == "kvsim replay 'trace.path=x y.jsonl' seed=1"
    )
    assert shown_command("kvsim replay b=[1,2]") == "kvsim replay b=[1,2]"


def test_paths_of_one_name_are_told_apart() -> None:
    assert shortest(["/a/monday/x", "/a/tuesday/x", "lru"]) == {
        "/a/monday/x": "monday/x",
        "/a/tuesday/x": "tuesday/x",
        "lru": "lru",
    }
    assert shortest(["/a/x", "/b/y"]) == {"/a/x": "x", "/b/y": "y"}
    assert shortest(["x", "/a/x"]) == {"x": "x", "/a/x": "a/x"}


def test_places_are_told_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_place(tmp_path / "out" / "report.html") == "out/report.html"
    assert shown_place(Path("/home/someone/run/report.html")) == "run/report.html"
    assert shown_place(Path("../run/report.html")) == "../run/report.html"


def test_no_page_shows_where_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "some one"
    logs = [home / day / "log.csv" for day in ("monday", "tuesday")]
    for number, log in enumerate(logs):
        log.parent.mkdir(parents=True)
        lines = [f"{second},{64 * (number + 1)},8" for second in range(30)]
        log.write_text("\n".join(["timestamp,input_length,output_length", *lines]))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    small = ["trace=lengths", "trace.prefixes=0.5", "tiers.gpu.capacity=1GiB"]
    for log in logs:
        assert main(["simulate", f"trace.path={log}", *small, f"output={log.parent / 'run'}"]) == 0
    capsys.readouterr()
    assert main(["report", *(str(log.parent / "run") for log in logs), f"output={home / 'pages' / 'all.html'}"]) == 0
    printed = capsys.readouterr().out
    pages = [(log.parent / "run" / "report.html").read_text() for log in logs] + [(home / "pages" / "all.html").read_text()]
    for text in (*pages, printed):
        assert str(tmp_path) not in text and "some one" not in text
    assert "monday/run" in pages[2] and "tuesday/run" in pages[2] and "log.csv" in pages[0]
    shutil.rmtree(home)
