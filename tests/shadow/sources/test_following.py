"""A log is followed through everything that happens to logs; a line counts once, when its end is there."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import UsageError
from kvsim.shadow.sources.following import Folder, Tail, follower


class Told(list[tuple[str, str]]):
    """What the follower has said."""

    def __call__(self, kind: str, line: str) -> None:
        self.append((kind, line))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def follow(told: Told) -> Iterator[Callable[..., Tail]]:
    """Makes followers of files, which are closed at the end."""
    made: list[Tail] = []

    def new(path: Path, **settings: int) -> Tail:
        made.append(Tail(path, told, **settings))
        return made[-1]

    yield new
    for tail in made:
        tail.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def texts(tail: Tail | Folder) -> list[bytes]:
    return [line.text for line in tail.lines()]


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_lines_come_when_their_end_is_there(log: Path, told: Told, follow: Callable[..., Tail]) -> None:
    log.write_bytes(b"one\ntw")
    tail = follow(log)
    assert texts(tail) == [b"one"] and texts(tail) == []
    append(log, b"o\n\nthree\n")
    assert [(line.number, line.text) for line in tail.lines()] == [(2, b"two"), (4, b"three")]
    assert told == []


def test_a_renamed_file_is_read_to_its_end_before_the_one_in_its_place(
    log: Path, told: Told, follow: Callable[..., Tail]
) -> None:
    log.write_bytes(b"1\n")
    tail = follow(log)
    assert texts(tail) == [b"1"]
    append(log, b"2\n")
    log.rename(log.with_suffix(".1"))
    append(log.with_suffix(".1"), b"3\n")
    log.write_bytes(b"4\n")
    assert texts(tail) == [b"2", b"3", b"4"] and told == []


def test_nothing_is_lost_between_the_two_names(log: Path, told: Told, follow: Callable[..., Tail]) -> None:
    log.write_bytes(b"1\n")
    tail = follow(log)
    assert texts(tail) == [b"1"]
    log.rename(log.with_suffix(".1"))
    assert texts(tail) == []
    append(log.with_suffix(".1"), b"2\n")
    assert texts(tail) == [b"2"]
    log.write_bytes(b"3\n")
    assert texts(tail) == [b"3"] and told == []


def test_a_file_that_became_shorter_is_read_from_its_beginning(log: Path, told: Told, follow: Callable[..., Tail]) -> None:
    log.write_bytes(b"one\ntwo\nthr")
    tail = follow(log)
    assert texts(tail) == [b"one", b"two"]
    log.write_bytes(b"new\n")
    assert texts(tail) == [b"new"] and told.kinds == ["shorter", "half"]


def test_a_line_that_never_ended_is_left_out_and_said(log: Path, told: Told, follow: Callable[..., Tail]) -> None:
    log.write_bytes(b"one\nhal")
    tail = follow(log)
    assert texts(tail) == [b"one"]
    log.rename(log.with_suffix(".1"))
    log.write_bytes(b"two\n")
    assert texts(tail) == [b"two"]
    assert told == [("half", f"{log}:2: the file ends within a line, which is left out")]


def test_a_line_that_is_too_long_is_left_out(log: Path, told: Told, follow: Callable[..., Tail]) -> None:
    log.write_bytes(b"x" * 50)
    tail = follow(log, max_line_bytes=10)
    assert texts(tail) == []
    append(log, b"x" * 50 + b"\nshort\n")
    assert texts(tail) == [b"short"] and told == [("long", f"{log}:1: more than 10 bytes, left out")]


def test_a_file_that_is_gone_for_a_while_is_read_when_it_comes(log: Path, told: Told, follow: Callable[..., Tail]) -> None:
    tail = follow(log)
    assert texts(tail) == [] and told.kinds == ["unreadable"]
    log.write_bytes(b"one\n")
    assert texts(tail) == [b"one"]


def test_files_of_a_folder_come_in_the_order_of_their_names(tmp_path: Path, told: Told) -> None:
    folder = Folder(tmp_path, told)
    assert texts(folder) == []
    (tmp_path / "m-20260101_11.log").write_bytes(b"b\n")
    (tmp_path / "m-20260101_10.log").write_bytes(b"a\n")
    (tmp_path / "m-20260101_09.log.gz").write_bytes(b"\x1f\x8b")
    assert texts(folder) == [b"a", b"b"]
    append(tmp_path / "m-20260101_10.log", b"late\n")
    (tmp_path / "m-20260101_12.log").write_bytes(b"c\n")
    assert texts(folder) == [b"late", b"c"] and told == []
    folder.close()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path, "No such file or directory"),
        (lambda path: path.write_bytes(b"") and path or path.chmod(0) or path, "Permission denied"),
        (lambda path: path.mkdir() or path.chmod(0) or path, "Permission denied"),
    ],
    ids=["missing", "unreadable file", "unreadable folder"],
)
def test_a_log_that_cannot_be_read_is_refused(make: Callable[[Path], Path], problem: str, log: Path, told: Told) -> None:
    make(log)
    if problem.startswith("Perm") and os.geteuid() == 0:
        pytest.skip("root may read everything")
    with pytest.raises(UsageError, match=rf"log: {log}: {problem}; name a log"):
        follower(str(log), told)


def test_a_compressed_log_is_refused(tmp_path: Path, told: Told) -> None:
    with pytest.raises(UsageError, match="is compressed and does not grow: replay it"):
        follower(str(tmp_path / "log.jsonl.gz"), told)


@given(st.lists(st.binary(max_size=30), max_size=20), st.lists(st.integers(0, 400), max_size=5))
def test_lines_do_not_depend_on_how_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], cuts: list[int]
) -> None:
    log, told = tmp_path_factory.mktemp("log") / "log", Told()
    content = b"".join(part.replace(b"\n", b"") + b"\n" for part in parts)
    tail, found, begin = Tail(log, told), [], 0
    log.write_bytes(b"")
    for cut in sorted(cuts):
        append(log, content[begin:cut])
        begin = max(begin, min(cut, len(content)))
        found += texts(tail)
    append(log, content[begin:])
    found += texts(tail)
    tail.close()
    assert found == [line for line in content.split(b"\n") if line.strip()] and told == []
