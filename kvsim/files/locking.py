"""Lets one process at a time write a folder: a locked file in it, which says who holds it.

The system frees the lock when its process ends, however that happens, so a killed process blocks no other.
"""

import errno
import fcntl
import os
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import ClassVar

from kvsim.errors import UsageError

LOCK = ".kvsim.lock"
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""What file systems without locks answer. Nothing can be locked there."""
MOST_HOLDER_BYTES = 2000


class InUse(UsageError):
    """Another process, or another thread of this one, holds the lock."""


class Lock:
    """The lock of a folder, for a ``with`` block.

    ``subject`` begins the messages: the setting that names the folder. With ``again``, a thread that holds the lock may take it
    once more, as what is written in the course of a run does.
    """

    _held: ClassVar[dict[tuple[int, int, str], list[int | None]]] = {}
    """The open file of each lock that a thread of this process holds, as often as the thread has taken it."""

    def __init__(self, folder: Path, name: str = LOCK, *, subject: str = "output", again: bool = True) -> None:
        self.folder, self.path = folder, folder / name
        self.subject, self.again = subject, again
        self._key = os.getpid(), get_ident(), os.path.realpath(self.path)
        self._made: list[Path] = []

    def __enter__(self) -> "Lock":
        """Take the lock; a folder that does not exist is created. Raises InUse, or UsageError if the folder cannot be written."""
        if self.again and self._key in self._held:
            self._held[self._key].append(self._held[self._key][0])
            return self
        try:
            self._make_folder()
            file = self._take()
            self._held.setdefault(self._key, []).append(file)
        except OSError as error:
            self._remove_folder()
            text = f"{self.subject}: cannot write to {self.folder}: {error.strerror or error}"
            raise UsageError(f"{text}; choose another folder with {self.subject}=DIR") from error
        except InUse:
            self._remove_folder()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        """Release the lock. Remove the folder if it was created for the lock and is still empty."""
        files = self._held[self._key]
        file = files.pop()
        if files:
            return
        del self._held[self._key]
        try:
            if file is not None:
                with suppress(OSError):
                    self.path.unlink()
        finally:
            if file is not None:
                os.close(file)
            self._remove_folder()

    def _take(self) -> int | None:
        """Return the locked file; None where the file system has no locks."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(file)
                os.close(file)
                raise InUse(
                    f"{self.subject}: {self.folder} is in use by {holder}: wait until that has ended, or choose another folder "
                    f"with {self.subject}=DIR"
                ) from None
            except OSError as error:
                os.close(file)
                if error.errno not in UNSUPPORTED:
                    raise
                with suppress(OSError):
                    self.path.unlink()
                return None
            if _is_at(file, self.path):
                _sign(file)
                return file
            os.close(file)  # its holder has removed it in between

    def _make_folder(self) -> None:
        for folder in reversed([self.folder, *self.folder.parents]):
            if not folder.exists():
                folder.mkdir(exist_ok=True)
                self._made.append(folder)

    def _remove_folder(self) -> None:
        with suppress(OSError):
            while self._made:
                self._made.pop().rmdir()
        self._made.clear()


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        there, own = os.stat(path), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def _sign(file: int) -> None:
    """Write the holder's name into the lock file, unless the disk is full."""
    program = shlex.join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])
    text = " ".join(f"process {os.getpid()} on {socket.gethostname()} ({program})".split())
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(errors="replace")[:MOST_HOLDER_BYTES], 0)


def _holder(file: int) -> str:
    """Return who has locked a file, as it says itself."""
    with suppress(OSError):
        holder = os.pread(file, MOST_HOLDER_BYTES, 0).decode(errors="replace")
        if holder.startswith("process ") and holder.isprintable():
            return holder
    return "another process"
