"""The one way in which files of results are written: under other names first, and renamed when all are complete.

A reader sees the earlier files or the new ones, each complete. Files that belong together are replaced together (``FileSet``): if
that fails, or its process ends, the earlier ones stay or come back. What replaces a file is on disk before the rename, so that
not even a power loss can cost the earlier file without giving the new one.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from kvsim.errors import UsageError
from kvsim.files.locking import InUse, Lock

UNDO = ".kvsim.undo"
"""The list of what to restore if the process that replaces files ends before all are replaced."""
WAIT_S = 10.0
"""Longest time that a reader waits for another process to rename its files."""
PART = re.compile(r"\.(.+?)(\.\d+-\d+)?\.part")

_numbers = count()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` if the block succeeds, and is deleted if it fails.

    Raises UsageError if it cannot be written; an earlier file is then still there.
    """
    if path.is_dir():
        raise _unwritable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    part = _part_of(path)
    try:
        with part.open("wb") as file:
            _claim(file)
            yield file
            _finish(file, path)
            os.replace(part, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


class FileSet:
    """Files of one folder that are replaced together at the end of a ``with`` block, or not at all if it fails.

    The folder is locked, and created if need be. Raises UsageError if it, or a file, cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock(folder)
        self._parts: dict[str, Path] = {}
        self._removed: list[str] = []

    def __enter__(self) -> "FileSet":
        self._lock.__enter__()
        try:
            if (self.folder / UNDO).exists():
                _restore(self.folder)
        except BaseException:
            self._lock.__exit__()
            raise
        return self

    @property
    def names(self) -> set[str]:
        """The names of the new files."""
        return set(self._parts)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open the new file ``name``."""
        self._parts[name] = part = _part_of(self.folder / name)
        try:
            with part.open("wb") as file:
                yield file
                _finish(file, self.folder / name)
        except OSError as error:
            raise _unwritable(self.folder / name, error) from error

    def write(self, name: str, text: str) -> None:
        """Write ``text`` to the new file ``name``."""
        with self.open(name) as file:
            file.write(text.encode())

    def remove(self, name: str) -> None:
        """Remove the file ``name``, if it exists, when the others are replaced."""
        self._removed.append(name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self._replace()
        finally:
            try:
                self._clean()
            finally:
                self._lock.__exit__()

    def _replace(self) -> None:
        """Put all files in their places; at an error, put the earlier ones back."""
        names = [*self._removed, *self._parts]
        there = {name: os.path.lexists(self.folder / name) for name in names}
        undo = {name: False for name in names if not there[name]}
        current = self.folder
        try:
            for name in (name for name in names if there[name]):
                current = self.folder / name
                _keep(current, self.folder / _kept(name))
                undo[name] = True
            if any(undo.values()):
                current = self.folder / UNDO
                _write_undo(current, undo)
            for name in names:
                current = self.folder / name
                if name in self._parts:
                    os.replace(self._parts[name], current)
                else:
                    current.unlink(missing_ok=True)
            if any(undo.values()):
                current = self.folder / UNDO
                _sync(self.folder)
                current.unlink()
        except BaseException as error:
            with suppress(OSError):
                _put_back(self.folder, undo)
            if isinstance(error, OSError):
                raise _unwritable(current, error) from error
            raise

    def _clean(self) -> None:
        """Delete files under other names: of this process, and those that killed ones have left."""
        names = {*self._removed, *self._parts, UNDO}
        with suppress(OSError):
            for path in self.folder.iterdir():
                is_part = (found := PART.fullmatch(path.name)) is not None and found[1] in names and _is_left(path)
                if is_part or path.name in map(_kept, names) and not (self.folder / UNDO).exists():
                    path.unlink(missing_ok=True)


def settle(folder: Path) -> None:
    """Make sure that the files of a folder belong together before they are read.

    If a process was killed while it replaced them, the earlier ones come back. Raises UsageError if that is impossible.
    """
    until = time.monotonic() + WAIT_S
    while (folder / UNDO).exists():
        try:
            with Lock(folder):
                if (folder / UNDO).exists():
                    _restore(folder)
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _restore(folder: Path) -> None:
    """Undo what a killed process has replaced; the folder is locked. Raises UsageError."""
    path = folder / UNDO
    try:
        were_there = json.loads(path.read_bytes())
        if not isinstance(were_there, dict) or not all(Path(name).name == name for name in were_there):
            raise ValueError
        _put_back(folder, were_there)
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is damaged, and the files beside it may not belong together: remove the folder") from None
    except OSError as error:
        raise UsageError(f"cannot restore the files listed in {path}: {error.strerror}") from error


def _write_undo(path: Path, undo: dict[str, bool]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(undo).encode())
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _put_back(folder: Path, were_there: dict[str, bool]) -> None:
    """Give a folder its earlier files: a file that was there comes back from its kept copy, one that was not goes."""
    for name, was_there in were_there.items():
        kept = folder / _kept(name)
        if not was_there:
            (folder / name).unlink(missing_ok=True)
        elif os.path.lexists(kept):
            os.replace(kept, folder / name)
            kept.unlink(missing_ok=True)  # two names of one file: replacing does nothing
    (folder / UNDO).unlink(missing_ok=True)


def _keep(path: Path, kept: Path) -> None:
    """Give a file a second name, or copy it where files cannot have two."""
    kept.unlink(missing_ok=True)
    try:
        os.link(path, kept, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, kept, follow_symlinks=False)


def _kept(name: str) -> str:
    return f".{name}.kept"


def _part_of(path: Path) -> Path:
    """Return the name under which this process writes a new file."""
    return path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}.part")


def _finish(file: BinaryIO, path: Path) -> None:
    """Bring a new file to disk if it replaces another one: a power loss must not cost both."""
    file.flush()
    if os.path.lexists(path):
        os.fsync(file.fileno())


def _claim(file: BinaryIO) -> None:
    """Lock a new file, which tells others that it is not left by a killed process."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_left(part: Path) -> bool:
    """Whether no process writes this file any more."""
    try:
        with part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Bring the names in a folder to disk, where folders can be."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"output: cannot write {path}: {error.strerror or error}")
