"""One process at a time writes a folder; what a killed one leaves behind blocks nobody."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from kvsim.errors import UsageError
from kvsim.files.locking import LOCK, InUse, Lock

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from kvsim.files.locking import Lock
with Lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> "subprocess.Popen[str]":
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), "an argument"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with hold(tmp_path) as process:
        with pytest.raises(InUse) as raised, Lock(tmp_path):
            pass
        process.communicate()
    said = str(raised.value)
    assert said.startswith(f"output: {tmp_path} is in use by process {process.pid} on ")
    assert f"(-c {tmp_path} 'an argument'): wait until that has ended, or choose another folder with output=DIR" in said
    with Lock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert not list(tmp_path.iterdir())


def test_a_killed_process_blocks_nobody(tmp_path: Path) -> None:
    with hold(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK).exists()
    with Lock(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_a_thread_may_take_its_lock_again_and_another_may_not(tmp_path: Path) -> None:
    found: list[str] = []

    def other() -> None:
        try:
            with Lock(tmp_path):
                found.append("taken")
        except InUse as error:
            found.append(str(error))

    with Lock(tmp_path):
        with Lock(tmp_path / "." / ".." / tmp_path.name):
            pass
        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert (tmp_path / LOCK).exists()
    assert len(found) == 1 and f"is in use by process {os.getpid()} on " in found[0]
    with pytest.raises(InUse), Lock(tmp_path, again=False), Lock(tmp_path, again=False):
        pass
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, b"process \x00\x1b[31m", b"something else"])
def test_a_holder_who_cannot_be_named_is_another_process(tmp_path: Path, content: bytes) -> None:
    with (tmp_path / LOCK).open("wb") as file:
        file.write(content)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InUse, match="is in use by another process: wait"), Lock(tmp_path):
            pass


def test_a_folder_made_for_a_lock_goes_if_nothing_was_written(tmp_path: Path) -> None:
    with Lock(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run").is_dir()
    assert not list(tmp_path.iterdir())
    with Lock(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "taken" / LOCK).mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "file")
    for name in ("file", "file/run", "loop", "taken", "link"):
        with pytest.raises(UsageError, match=f"output: cannot write to .*/{name}: .*; choose another folder with output=DIR"):
            Lock(tmp_path / name).__enter__()


def test_where_there_are_no_locks_runs_go_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Lock(tmp_path), Lock(tmp_path, again=False):
        pass
    assert not list(tmp_path.iterdir())
