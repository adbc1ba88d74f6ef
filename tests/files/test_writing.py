"""Files that belong together are all new or all as they were, wherever a write fails or its process is killed."""

import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvsim.errors import UsageError
from kvsim.files.writing import UNDO, FileSet, replacing, settle

ROOT = Path(__file__).resolve().parents[2]
CALLS = ((os, "replace"), (os, "link"), (os, "fsync"), (os, "unlink"), (io, "open"))
"""What a disk may refuse."""
OLD = {"a": "old a", "b": "old b", "gone": "old"}
NEW = {"a": "new a", "b": "new b", "c": "new c"}


def old_folder(folder: Path) -> Path:
    folder.mkdir()
    for name, text in OLD.items():
        (folder / name).write_text(text)
    return folder


def replace_all(folder: Path) -> None:
    with FileSet(folder) as files:
        for name, text in NEW.items():
            files.write(name, text)
        files.remove("gone")


def found(folder: Path) -> dict[str, str]:
    """The files that a user sees."""
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.startswith(".")}


@contextmanager
def breaking(step: int, breaks: Callable[[], Any], *, for_good: bool) -> Iterator[list[int]]:
    """Break call number ``step`` of all calls of the system, or all from there on. Yields the number of calls so far."""
    calls, before = [0], [(module, name, getattr(module, name)) for module, name in CALLS]

    def broken(call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*arguments: Any, **settings: Any) -> Any:
            calls[0] += 1
            if calls[0] == step or for_good and calls[0] > step:
                breaks()
            return call(*arguments, **settings)

        return told

    for module, name, call in before:
        setattr(module, name, broken(call))
    try:
        yield calls
    finally:
        for module, name, call in before:
            setattr(module, name, call)


def refuse() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def interrupt() -> None:
    raise KeyboardInterrupt


def test_all_files_are_replaced_together(tmp_path: Path) -> None:
    folder = old_folder(tmp_path / "run")
    replace_all(folder)
    assert found(folder) == NEW
    assert sorted(path.name for path in folder.iterdir()) == sorted(NEW)


def attempt(folder: Path) -> str:
    """Replace the files. Returns what is said of a failure."""
    try:
        replace_all(folder)
    except (UsageError, KeyboardInterrupt) as error:
        return str(error) or "interrupted"
    return ""


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("breaks", [refuse, interrupt])
def test_where_a_step_fails_the_earlier_files_are_whole(tmp_path: Path, breaks: Callable[[], Any], for_good: bool) -> None:
    """Each step in turn, until there is none left to fail. If restoring fails, too, the next reader restores."""
    for step in range(1, 100):
        folder = old_folder(tmp_path / str(step))
        with breaking(step, breaks, for_good=for_good) as calls:
            said = attempt(folder)
        if breaks is refuse and not for_good:
            assert found(folder) == (OLD if said else NEW), "at once, before anybody reads them"
        settle(folder)
        if breaks is refuse:
            assert found(folder) == (OLD if said else NEW)
            assert not said or said.startswith("output: cannot write ") and said.count(os.strerror(errno.EIO)) == 1
        else:
            assert found(folder) in (OLD, NEW)
        replace_all(folder)
        assert sorted(path.name for path in folder.iterdir()) == sorted(NEW), "nothing is left under other names"
        if calls[0] < step:
            break
    assert step > 20


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_writing

for step in range(1, 100):
    folder = test_writing.old_folder(Path(sys.argv[1], str(step)))
    if not os.fork():
        with test_writing.breaking(step, lambda: os._exit(9), for_good=False):
            test_writing.replace_all(folder)
        os._exit(0)
    if not os.waitstatus_to_exitcode(os.wait()[1]):
        break
"""


def test_where_the_process_is_killed_the_files_are_all_old_or_all_new(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    ends = []
    for step in range(1, len(list(tmp_path.iterdir())) + 1):
        folder = tmp_path / str(step)
        settle(folder)
        assert found(folder) in (OLD, NEW)
        ends.append(found(folder) == NEW)
        replace_all(folder)
        assert sorted(path.name for path in folder.iterdir()) == sorted(NEW), "nothing is left by the killed process"
    assert len(ends) > 20 and ends == sorted(ends), "old up to some step, then new"
    assert ends[-1] and not ends[0]


def test_a_reader_waits_while_files_are_renamed(tmp_path: Path) -> None:
    """What is to be undone belongs to a living process, until that is done."""
    from threading import Thread

    from kvsim.files.locking import Lock

    folder = old_folder(tmp_path / "run")
    (folder / UNDO).write_text("{}")
    with Lock(folder):
        reader = Thread(target=settle, args=(folder,))
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        (folder / UNDO).unlink()
        reader.join()
    assert found(folder) == OLD


@pytest.mark.parametrize("content", ["", "{", "[]", '{"../a": true}', "\x00" * 100, "[" * 100_000])
def test_a_damaged_list_of_what_to_restore_is_named(tmp_path: Path, content: str) -> None:
    folder = old_folder(tmp_path / "run")
    (folder / UNDO).write_text(content)
    with pytest.raises(UsageError, match=r"run/\.kvsim\.undo is damaged, and the files beside it may not belong together"):
        settle(folder)
    with pytest.raises(UsageError, match="is damaged"):
        replace_all(folder)
    assert found(folder) == OLD


def test_a_folder_in_place_of_a_file_leaves_the_others(tmp_path: Path) -> None:
    folder = old_folder(tmp_path / "run")
    (folder / "c").mkdir()
    with pytest.raises(UsageError, match=r"output: cannot write .*run/c: Is a directory"):
        replace_all(folder)
    (folder / "c").rmdir()
    assert found(folder) == OLD


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("not bytes")  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_two_writers_of_a_file_do_not_share_the_name_under_which_they_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as one:
        with replacing(path) as other:
            other.write(b"second")
        assert path.read_bytes() == b"second"
        one.write(b"first")
    assert path.read_bytes() == b"first"


def test_files_under_other_names_are_removed_unless_somebody_writes_them(tmp_path: Path) -> None:
    folder = old_folder(tmp_path / "run")
    for name in (".a.part", ".b.99-1.part", ".other.99-1.part", ".b.kept"):
        (folder / name).write_text("left")
    with replacing(folder / "a") as file:
        replace_all(folder)
        names = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert ".other.99-1.part" in names and len(names) == 2, "the one that is being written, and one of nobody here"
        file.write(b"later")
    assert found(folder) == NEW | {"a": "later"}


def test_where_files_cannot_have_two_names_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", unsupported)
    folder = old_folder(tmp_path / "run")
    (folder / "c").mkdir()
    with pytest.raises(UsageError):
        replace_all(folder)
    (folder / "c").rmdir()
    assert found(folder) == OLD
    replace_all(folder)
    assert found(folder) == NEW


@pytest.mark.parametrize("path", ["/", ".", "folder"])
def test_a_single_file_does_not_replace_a_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(UsageError, match=rf"output: cannot write {re.escape(path)}: Is a directory"), replacing(Path(path)):
        pytest.fail("it was opened")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
