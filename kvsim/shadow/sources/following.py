"""Follows a file that grows, or the files of a folder, through rotations and truncations."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from kvsim.errors import UsageError
from kvsim.shadow.sources.lines import Line
from kvsim.trace.records import MAX_LINE_BYTES

CHUNK_BYTES = 1 << 20
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
Tell = Callable[[str, str], None]
"""Takes a kind of problem and a line about this one."""


class Tail:
    """The lines of a file as they come. A line counts when its end is there.

    A file that is renamed, with a new one in its place, is read to its end before the new one; one that becomes shorter is read
    again from its beginning.
    """

    def __init__(self, path: Path, tell: Tell, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path = path
        self._tell = tell
        self._max_line_bytes = max_line_bytes
        self._file: BinaryIO | None = None
        self._begun = b""
        """The beginning of a line whose end has not come."""
        self._is_too_long = False
        self._number = 0

    def lines(self) -> Iterator[Line]:
        """Yield the lines that are there and were not yielded yet."""
        while self._file is not None or self._open():
            yield from self._complete()
            if not self._is_replaced():
                return
            yield from self._complete()  # what came between the end and the new name
            self.close()

    def close(self) -> None:
        """Forget the file, which was read to its end."""
        if self._file is not None:
            self._file.close()
        if self._begun or self._is_too_long:
            self._tell("half", f"{self.path}:{self._number + 1}: the file ends within a line, which is left out")
        self._file, self._begun, self._is_too_long, self._number = None, b"", False, 0

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            self._tell("unreadable", f"{self.path}: {error.strerror or error}; it is read when it can be")
            return False
        return True

    def _complete(self) -> Iterator[Line]:
        assert self._file is not None
        try:
            while content := self._file.read(CHUNK_BYTES):
                *ended, self._begun = (self._begun + content).split(b"\n")
                for text in ended:
                    self._number += 1
                    if self._is_too_long or len(text) > self._max_line_bytes:
                        self._refuse()
                    elif text.strip():
                        yield Line(str(self.path), self._number, text)
                if len(self._begun) > self._max_line_bytes:
                    self._begun, self._is_too_long = b"", True
        except OSError as error:
            self._tell("unreadable", f"{self.path}: {error.strerror or error}")

    def _refuse(self) -> None:
        self._is_too_long = False
        self._tell("long", f"{self.path}:{self._number}: more than {self._max_line_bytes:,} bytes, left out")

    def _is_replaced(self) -> bool:
        """Whether another file has this name now, or the file is shorter than what was read of it."""
        assert self._file is not None
        here = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path)
        except OSError:
            return False  # between two names, or removed for good
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            return True
        if here.st_size < self._file.tell():
            self._tell("shorter", f"{self.path}: it became shorter, and is read again from its beginning")
            return True
        return False


class Folder:
    """The lines of a folder's files in the order of their names, such as SGLang's, which have the hour in them."""

    def __init__(self, path: Path, tell: Tell, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path = path
        self._tell = tell
        self._max_line_bytes = max_line_bytes
        self._tails: dict[str, Tail] = {}
        self._ended: set[str] = set()

    def lines(self) -> Iterator[Line]:
        """Yield the lines that are there and were not yielded yet. The last two files may still grow."""
        names = self._names()
        for name in names:
            if name in self._ended:
                continue
            tail = self._tails.setdefault(name, Tail(self.path / name, self._tell, self._max_line_bytes))
            yield from tail.lines()
            if name not in names[-2:]:
                self._tails.pop(name).close()
                self._ended.add(name)

    def close(self) -> None:
        """Forget the files."""
        for tail in self._tails.values():
            tail.close()

    def _names(self) -> list[str]:
        try:
            return sorted(
                entry.name
                for entry in os.scandir(self.path)
                if entry.is_file() and not entry.name.startswith(".") and not entry.name.endswith(COMPRESSED)
            )
        except OSError as error:
            self._tell("unreadable", f"{self.path}: {error.strerror or error}; it is read when it can be")
            return []


def follower(name: str, tell: Tell) -> Tail | Folder:
    """Return what follows a log or a folder. Raises UsageError if it cannot be read."""
    path = Path(name)
    if name.endswith(COMPRESSED):
        raise UsageError(f"log: {path} is compressed and does not grow: replay it with kvsim replay trace.path={path}")
    try:
        if path.is_dir():
            os.scandir(path).close()
            return Folder(path, tell)
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"log: {path}: {error.strerror or error}; name a log that exists and that you may read") from None
    return Tail(path, tell)
