"""A disk file returns the bytes that were written or nothing, whatever happens to it in between."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.errors import UsageError
from kvsim.files.locking import InUse
from kvsim.substrate.hardware.disk.disk_file import DiskFile
from kvsim.substrate.hardware.disk.disk_job import BLOCK_BYTES
from tests.waiting import LONG_S, join

ROOT = Path(__file__).resolve().parents[3]
Open = Callable[..., DiskFile]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Open]:
    """Opens the disk file of this test, again and again if need be; all are closed at the end."""
    opened: list[DiskFile] = []

    def opens(pages: int = 8, page_bytes: int = BLOCK_BYTES, **settings: Any) -> DiskFile:
        for file in opened:
            file.close()
        opened.append(DiskFile(tmp_path / "disk", pages=pages, page_bytes=page_bytes, **settings))
        return opened[-1]

    yield opens
    for file in opened:
        file.close()


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def page(number: int, n_bytes: int) -> np.ndarray:
    """The bytes of a page: no two pages are equal."""
    return np.random.default_rng(number).integers(0, 256, n_bytes, dtype=np.uint8)


def memory(rows: int, page_bytes: int, *, shift: int = 0) -> np.ndarray:
    """Rows of pages that begin some bytes into a block."""
    room = np.zeros(rows * page_bytes + 2 * BLOCK_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % BLOCK_BYTES + shift
    return room[start : start + rows * page_bytes].reshape(rows, page_bytes)


def write(disk: DiskFile, pages: dict[int, int], cancelled: Callable[[], bool] = lambda: False) -> int:
    """Write pages, given by slot and number; how many were written."""
    host = memory(len(pages), disk.page_bytes)
    for row, number in enumerate(pages.values()):
        host[row] = page(number, disk.page_bytes)
    rows, keys = np.arange(len(pages)), [key(number) for number in pages.values()]
    return disk.write(np.array(list(pages)), keys, host, rows, cancelled=cancelled).result(timeout=LONG_S)


def read(disk: DiskFile, pages: dict[int, int], cancelled: Callable[[], bool] = lambda: False) -> int:
    """Read pages, given by slot and number; how many arrived. Their bytes are compared."""
    host = memory(len(pages), disk.page_bytes)
    rows, keys = np.arange(len(pages))[::-1], [key(number) for number in pages.values()]
    arrived = disk.read(np.array(list(pages)), keys, host, rows, cancelled=cancelled).result(timeout=LONG_S)
    for row, number in list(zip(rows.tolist(), pages.values(), strict=True))[:arrived]:
        assert (host[row] == page(number, disk.page_bytes)).all(), f"page {number} has other bytes"
    return arrived


def faults(disk: DiskFile) -> dict[str, int]:
    """The faults that there were."""
    return {kind: times for kind, times in disk.faults.items() if times}


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize(
    ("page_bytes", "shift"), [(4096, 0), (4096, 8), (8192, 0), (1, 0), (5000, 0), (12_288, 100), (5 << 20, 0)]
)
def test_every_page_comes_back_from_any_slot_to_any_row(disk: Open, page_bytes: int, shift: int, is_direct: bool) -> None:
    rng = np.random.default_rng(page_bytes + shift)
    pages = 3 if page_bytes > 1 << 20 else 40
    file = disk(pages, page_bytes, is_direct=is_direct)
    host = memory(pages, page_bytes, shift=shift)
    there: dict[int, int] = {}
    for turn in range(4):
        slots = rng.permutation(pages)[: rng.integers(1, pages + 1)]
        slots = np.sort(slots) if turn % 2 else slots
        rows = rng.permutation(pages)[: len(slots)]
        names = [1000 * turn + slot for slot in slots.tolist()]
        for row, number in zip(rows.tolist(), names, strict=True):
            host[row] = page(number, page_bytes)
        written = file.write(slots, [key(number) for number in names], host, rows, cancelled=lambda: False)
        assert written.result(timeout=LONG_S) == len(slots)
        there.update(zip(slots.tolist(), names, strict=True))
        slots, rows = np.array(list(there)), rng.permutation(pages)[: len(there)]
        host[:] = 0
        arrived = file.read(slots, [key(number) for number in there.values()], host, rows, cancelled=lambda: False)
        assert arrived.result(timeout=LONG_S) == len(there)
        assert all((host[row] == page(number, page_bytes)).all() for row, number in zip(rows, there.values(), strict=True))
    assert not faults(file)


def test_neighbouring_slots_are_one_access_wherever_their_rows_are(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    file, accesses, preadv = disk(), [], os.preadv
    assert write(file, {slot: slot for slot in range(8)}) == 8

    def counted(fd: int, buffers: Any, offset: int) -> int:
        accesses.append((offset // BLOCK_BYTES, len(buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    host = memory(8, BLOCK_BYTES)
    slots, rows = np.array([4, 5, 6, 7, 1, 2]), np.array([0, 1, 5, 6, 3, 2])
    assert file.read(slots, [key(slot) for slot in slots.tolist()], host, rows, cancelled=lambda: False).result(20) == 6
    assert sorted(accesses) == [(1, 2), (4, 2)], "two accesses; the rows of each are in two places"
    assert all((host[row] == page(slot, BLOCK_BYTES)).all() for slot, row in zip(slots.tolist(), rows, strict=True))


def test_without_direct_access_the_page_cache_serves(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    file = disk()
    assert not file.is_direct
    assert write(file, {3: 1, 5: 2}) == read(file, {5: 2, 3: 1}) == 2


def test_lists_of_many_threads_do_not_disturb_each_other(disk: Open) -> None:
    file = disk(64, 8192, threads=3)
    done: list[int] = []

    def use(first: int) -> None:
        for turn in range(6):
            pages = {slot: 100 * turn + slot for slot in range(first, first + 16, 1 + turn % 2)}
            done.append(write(file, pages) == read(file, pages) == len(pages))

    threads = [threading.Thread(target=use, args=(first,)) for first in (0, 16, 32, 48)]
    for thread in threads:
        thread.start()
    join(*threads)
    assert done == [True] * 24 and not faults(file)


# --- restarts --------------------------------------------------------------------------------------------------------


def test_the_next_process_finds_the_pages_in_the_order_in_which_they_were_written(disk: Open) -> None:
    file = disk()
    assert not file.recovered()
    for slot, number in {5: 1, 2: 2, 7: 3}.items():
        write(file, {slot: number})
    file = disk()
    assert list(file.recovered().items()) == [(key(1), 5), (key(2), 2), (key(3), 7)]
    assert read(file, {7: 3, 5: 1, 2: 2}) == 3
    write(file, {0: 4})
    assert list(disk().recovered()) == [key(1), key(2), key(3), key(4)]


def test_a_slot_that_is_written_anew_after_a_restart_has_lost_its_page(disk: Open) -> None:
    write(disk(), {0: 1, 1: 2})
    file = disk()
    write(file, {1: 3})
    assert disk().recovered() == {key(1): 0, key(3): 1}
    file = disk()
    assert read(file, {1: 2}) == 0 and faults(file) == {"key": 1}
    assert read(file, {1: 3}) == 1, "the other page is whole"


def test_of_a_page_that_was_written_twice_the_last_copy_counts(disk: Open) -> None:
    file = disk()
    for slot, number in ((3, 1), (4, 2), (6, 1)):
        write(file, {slot: number})
    assert list(disk().recovered().items()) == [(key(2), 4), (key(1), 6)]


def test_the_folder_may_get_more_slots_or_fewer(disk: Open) -> None:
    write(disk(4), {0: 1, 3: 2})
    file = disk(9)
    assert file.recovered() == {key(1): 0, key(2): 3}
    assert write(file, {8: 3}) == 1 and read(file, {0: 1, 3: 2, 8: 3}) == 3
    assert disk(3).recovered() == {key(1): 0}
    assert disk(9).recovered() == {key(1): 0}


# --- what goes wrong -------------------------------------------------------------------------------------------------


def flip(file: DiskFile, folder: Path, slot: int, at: int) -> None:
    """Flip one bit of a page in the file."""
    with open(folder / "disk" / "pages.data", "r+b") as data:
        data.seek(slot * file.slot_bytes + at)
        (byte,) = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("page_bytes", [4096, 100])
def test_a_flipped_bit_is_found_and_the_page_is_not_offered_again(disk: Open, tmp_path: Path, page_bytes: int) -> None:
    file = disk(8, page_bytes)
    write(file, {slot: slot for slot in range(6)})
    file = disk(8, page_bytes, is_direct=False)
    flip(file, tmp_path, 3, page_bytes - 1)
    assert read(file, {slot: slot for slot in range(6)}) == 3
    assert faults(file) == {"checksum": 1}
    assert read(file, {3: 3}) == 0 and faults(file) == {"checksum": 1, "missing": 1}
    assert set(disk(8, page_bytes).recovered()) == {key(slot) for slot in (0, 1, 2, 4, 5)}


def test_a_file_that_ends_early_brings_what_is_there(disk: Open, tmp_path: Path) -> None:
    file = disk()
    write(file, {slot: slot for slot in range(8)})
    os.truncate(tmp_path / "disk" / "pages.data", 5 * BLOCK_BYTES)
    assert read(file, {slot: slot for slot in range(8)}) == 5 and faults(file) == {"short_read": 1}
    assert set(disk().recovered()) == {key(slot) for slot in range(5)}, "what lay behind the end is known to be gone"


@pytest.mark.parametrize("sector", [0, 3, 8, 9])
@pytest.mark.parametrize("byte", [b"\x00", b"\x5a"])
def test_a_damaged_sector_of_the_index_costs_the_pages_in_it(disk: Open, tmp_path: Path, sector: int, byte: bytes) -> None:
    """Sectors of 512 bytes: eight of the header, and two of the entries of 25 slots; what is lost is a miss."""
    pages = {slot: slot + 100 for slot in range(25)}
    assert write(disk(25), pages) == 25
    disk(25).close()
    with (tmp_path / "disk" / "pages.index").open("r+b") as file:
        file.seek(512 * sector)
        file.write(byte * 512)
    if not sector and byte != b"\x00":
        with pytest.raises(ValueError, match=r"pages.index is not an index of pages: choose another folder"):
            disk(25)
        return
    file = disk(25)
    found = {slot: int.from_bytes(name, "little") for name, slot in file.recovered().items()}
    assert len(found) == (0 if not sector else 25 if sector < 8 else 12)
    assert found.items() <= pages.items()
    assert read(file, found) == len(found)
    assert write(file, {slot: number + 1000 for slot, number in pages.items()}) == 25
    assert read(file, {slot: number + 1000 for slot, number in pages.items()}) == 25


@pytest.mark.parametrize("name", ["pages.index", "pages.data"])
@pytest.mark.parametrize("n_bytes", [0, 24, 4095, 4136])
def test_a_file_cut_anywhere_costs_pages_only(disk: Open, tmp_path: Path, name: str, n_bytes: int) -> None:
    pages = {slot: slot + 100 for slot in range(3)}
    write(disk(3), pages)
    disk(3).close()
    os.truncate(tmp_path / "disk" / name, n_bytes)
    file = disk(3)
    found = {slot: int.from_bytes(key, "little") for key, slot in file.recovered().items()}
    assert found.items() <= pages.items()
    assert read(file, found) == len(found)
    assert write(file, pages) == read(file, pages) == 3


@pytest.mark.parametrize("name", ["pages.index", "pages.data"])
def test_a_folder_or_a_loop_in_place_of_a_file_is_named(disk: Open, tmp_path: Path, name: str) -> None:
    write(disk(), {0: 1})
    disk().close()
    path = tmp_path / "disk" / name
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(OSError, match=f"{name}'"):
        disk()
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match=f"{name}'"):
        disk()
    path.rmdir()
    assert write(disk(), {0: 2}) == 1, "the lock is free again"


def test_a_page_that_was_never_written_is_missing(disk: Open) -> None:
    file = disk()
    write(file, {1: 1})
    assert read(file, {1: 1, 2: 2}) == 1 and faults(file) == {"missing": 1}


def test_a_disk_that_cannot_read_is_a_fault(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    file = disk()
    write(file, {0: 1})

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    assert read(file, {0: 1}) == 0 and faults(file) == {"read_error": 1}


@pytest.mark.parametrize("fitting", [0, 3])
def test_of_a_write_that_the_disk_has_no_room_for_the_whole_pages_count(
    disk: Open, monkeypatch: pytest.MonkeyPatch, fitting: int
) -> None:
    file, pwritev = disk(page_bytes=5000), os.pwritev
    write(file, {slot: slot for slot in range(8)})

    def full(fd: int, buffers: Any, offset: int) -> int:
        if not fitting:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(fd, [memoryview(buffers[0]).cast("B")[: fitting * 8192]], offset) + 4096

    monkeypatch.setattr(os, "pwritev", full)
    assert write(file, {slot: 10 + slot for slot in range(6)}) == fitting
    assert faults(file) == {"write_error": 1}
    whole = {slot: 10 + slot for slot in range(fitting)} | {6: 6, 7: 7}
    assert disk(page_bytes=5000).recovered() == {key(number): slot for slot, number in whole.items()}


def test_a_worker_that_fails_says_so_and_nothing_waits_for_it(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as a process that is killed when half of a page has been written: the slot holds no whole page then."""
    file, pwritev = disk(page_bytes=2 * BLOCK_BYTES), os.pwritev
    write(file, {0: 1, 1: 2})

    def torn(fd: int, buffers: Any, offset: int) -> int:
        pwritev(fd, [memoryview(buffers[0]).cast("B")[:BLOCK_BYTES]], offset)
        raise MemoryError("half of it")

    monkeypatch.setattr(os, "pwritev", torn)
    host = memory(1, file.page_bytes)
    written = file.write(np.array([0]), [key(9)], host, np.array([0]), cancelled=lambda: False)
    assert isinstance(written.exception(timeout=LONG_S), MemoryError)
    assert disk(page_bytes=2 * BLOCK_BYTES).recovered() == {key(2): 1}


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from kvsim.substrate.hardware.disk.disk_file import DiskFile

disk, rng, number = DiskFile(Path(sys.argv[1]), pages=32, page_bytes=20480), np.random.default_rng(int(sys.argv[2])), 0
host = np.zeros((8, 20480), dtype=np.uint8)
while True:
    slots = rng.permutation(32)[:8]
    for row in range(8):
        host[row] = np.random.default_rng(number + row).integers(0, 256, 20480, dtype=np.uint8)
    keys = [(number + row).to_bytes(16, "little") for row in range(8)]
    assert disk.write(slots, keys, host, np.arange(8), cancelled=lambda: False).result() == 8
    number += 8
    if number == 80:
        print("writing", flush=True)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_after_a_kill_every_page_that_is_found_is_whole(disk: Open, tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "disk"), str(seed)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.1 * seed)
        process.send_signal(signal.SIGKILL)
    file = disk(32, 20_480)
    found = {slot: int.from_bytes(name, "little") for name, slot in file.recovered().items()}
    assert len(found) >= 24, "at most one list of eight was under way"
    assert read(file, found) == len(found) and not faults(file)
    assert write(file, {slot: 10**6 + slot for slot in range(32)}) == 32


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_cancelled_list_ends_with_the_pages_before(disk: Open) -> None:
    file = disk(64, 1 << 20, threads=1)
    pages = {2 * slot: slot for slot in range(20)}
    assert write(file, pages) == 20
    for stop in (0, 1, 7):
        answers = iter([False] * stop + [True] * 20)
        assert read(file, pages, lambda answers=answers: next(answers)) == stop  # type: ignore[misc]
    answers = iter([False] * 3 + [True] * 20)
    assert write(file, {slot: 100 + slot for slot in pages}, lambda: next(answers)) == 3
    assert read(file, {slot: number for slot, number in pages.items() if slot >= 6}) == 17, "the others are as they were"
    assert not faults(file)


def test_closing_ends_what_is_under_way_and_may_be_done_twice(disk: Open) -> None:
    file = disk(threads=1)
    begun, go_on = threading.Event(), threading.Event()

    def held() -> bool:
        begun.set()
        return not go_on.wait(timeout=LONG_S)

    host, slots, keys = memory(4, BLOCK_BYTES), np.arange(4), [key(slot) for slot in range(4)]
    written = [file.write(slots, keys, host, slots, cancelled=held) for _ in range(3)]
    assert begun.wait(timeout=LONG_S)
    closing = threading.Thread(target=file.close)
    closing.start()
    while not file.is_closed:
        pass
    go_on.set()
    join(closing)
    file.close()
    assert [future.result(timeout=0) for future in written] == [4, 0, 0]
    with pytest.raises(ValueError, match="the disk file is closed"):
        file.read(slots, keys, host, slots, cancelled=lambda: False)


def test_one_process_at_a_time(disk: Open, tmp_path: Path) -> None:
    file = disk()
    with pytest.raises(InUse, match=rf"disk.folder: .*/disk is in use by process {os.getpid()} on .*: wait until that has ended"):
        DiskFile(tmp_path / "disk", pages=8, page_bytes=BLOCK_BYTES)
    assert write(file, {0: 1}) == read(file, {0: 1}) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from kvsim.substrate.hardware.disk.disk_file import DiskFile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        "try: DiskFile(Path(sys.argv[1]), pages=1000, page_bytes=4096)\n"
        "except OSError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "disk")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    text = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30).stdout
    path = tmp_path / "disk" / "pages.data"
    assert text == f"[Errno {errno.EFBIG}] cannot reserve 4,096,000 bytes: {os.strerror(errno.EFBIG)}: '{path}'\n"
    assert path.stat().st_size == 0


def test_a_folder_that_cannot_be_used_is_refused(disk: Open, tmp_path: Path) -> None:
    write(disk(), {0: 1})
    with pytest.raises(ValueError, match=r"pages.index has pages of 4,096 bytes, not 8,192: choose another folder or empty it"):
        disk(page_bytes=8192)
    assert disk().recovered() == {key(1): 0}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pages.index").write_text("something else altogether")
    with pytest.raises(ValueError, match=r"other/pages.index is not an index of pages: choose another folder"):
        DiskFile(tmp_path / "other", pages=1, page_bytes=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"disk.folder: cannot write to .*/file: "):
        DiskFile(tmp_path / "file", pages=1, page_bytes=1)


def test_lists_that_do_not_fit_are_refused(disk: Open) -> None:
    file, one, host = disk(), np.array([0]), memory(2, BLOCK_BYTES)
    with pytest.raises(ValueError, match="1 slots, 0 keys and 1 host_slots: the numbers must be equal"):
        file.read(one, [], host, one, cancelled=lambda: False)
    with pytest.raises(ValueError, match=r"slots must lie in 0 ... 7, not 8 ... 8"):
        file.read(one + 8, [key(0)], host, one, cancelled=lambda: False)
    with pytest.raises(ValueError, match=r"host_slots must lie in 0 ... 1, not -1 ... -1"):
        file.read(one, [key(0)], host, one - 1, cancelled=lambda: False)
    with pytest.raises(ValueError, match="a page's key must have 16 bytes, not 3"):
        file.read(one, [b"key"], host, one, cancelled=lambda: False)
    with pytest.raises(ValueError, match=r"host must be contiguous uint8 \[pages, 4096\], not uint8 \[2, 2048\]"):
        file.read(one, [key(0)], host[:, ::2], one, cancelled=lambda: False)
