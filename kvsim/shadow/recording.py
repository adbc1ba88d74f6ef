"""A trace file of the requests that pass, for replays: times, lengths, and salted hashes of pages, in Mooncake's format."""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import msgspec

from kvsim.errors import UsageError
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.sources.salt import Salt
from kvsim.trace.lines import BLOCKS_OF_ANSWER


class Recording:
    """Appends a line for each request, in one write: whoever kills the process loses at most the line under way.

    A hash is 63 bits of keyed BLAKE2b over a page's key. A page is known by its hash and the pages before it, so that equal
    hashes of different pages matter only right behind the same page.
    """

    def __init__(self, path: Path, page_tokens: int, salt: Salt, note: Callable[[], str], *, goes_on: bool) -> None:
        """Begin a file or, if it ``goes_on``, append to one with the same salt. Raises UsageError.

        ``note`` is asked before the first line what of the trace is estimated.
        """
        self.path = path
        self.lines = 0
        """Lines written by this process."""
        self._page_tokens = page_tokens
        self._salt = salt
        self._note = note
        self._last_ms = 0.0
        self._is_new = not path.exists()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            raise self._unwritable(error) from None
        if self._size and not goes_on:
            os.close(self._file)
            raise UsageError(
                f"shadow.record: {path} exists, and its hashes have another salt: choose another name, or set shadow.salt_file, "
                "from the first recording on"
            )
        if self._size:
            self._take_up()

    def write(self, request: LiveRequest) -> None:
        """Append a request. Raises UsageError if it cannot be written; the file then ends with the line before."""
        fields = self._fields(request)
        reset = {"reset": "drain", "timestamp": fields["timestamp"]}
        line = b"".join(
            msgspec.json.encode(one) + b"\n" for one in ((reset, fields) if request.after_reset and self._size else (fields,))
        )
        try:
            written = os.write(self._file, line)
            if written < len(line):
                written += os.write(self._file, line[written:])  # says what is wrong
        except OSError as error:
            self._cut()
            raise self._unwritable(error) from None
        if written < len(line):
            self._cut()
            raise UsageError(f"shadow.record: cannot write {self.path}: the disk is full")
        self._size += len(line)
        self.lines += 1

    def close(self) -> None:
        """Bring the file to disk; one that was begun here and has no line is removed. Raises UsageError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a device
                raise self._unwritable(error) from None
        finally:
            os.close(self._file)
            if self._is_new and not self._size:
                self.path.unlink(missing_ok=True)

    def _fields(self, request: LiveRequest) -> dict[str, Any]:
        self._last_ms = max(self._last_ms, round(request.arrival_s * 1000, 3))
        fields: dict[str, Any] = {"timestamp": self._last_ms}
        if not self._size:
            fields["block_size"] = self._page_tokens
            fields |= {"note": note} if (note := self._note()) else {}
        if request.session is not None:
            fields["session_id"] = self._salt.number(request.session.encode("utf-8", "surrogatepass"))
        fields |= {"input_length": request.prompt_tokens, "output_length": request.output_tokens}
        return fields | {"hash_ids": self._ids(request.keys), BLOCKS_OF_ANSWER: self._ids(request.output_keys)}

    def _ids(self, keys: Sequence[bytes]) -> list[int]:
        return [self._salt.number(key) for key in keys]

    def _take_up(self) -> None:
        """Cut off a half-written last line, and check the first. Raises UsageError for a file that is no recording."""
        try:
            with self.path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                end = content.rfind(b"\n")
                first, last = content.readline(), content[content.rfind(b"\n", 0, max(end, 0)) + 1 : max(end, 0)]
            size, self._last_ms = msgspec.json.decode(first)["block_size"], float(msgspec.json.decode(last)["timestamp"])
            self._size = end + 1
            os.ftruncate(self._file, self._size)
        except OSError as error:
            raise self._unwritable(error) from None
        except (ValueError, IndexError, KeyError, TypeError):
            raise UsageError(f"shadow.record: {self.path} is no recording of kvsim shadow: choose another name") from None
        if size != self._page_tokens:
            raise UsageError(
                f"shadow.record: {self.path} has pages of {size} tokens, not {self._page_tokens}: choose another name, or set "
                f"page_tokens={size}"
            )

    def _cut(self) -> None:
        """Leave nothing of a line that could not be written as a whole."""
        with suppress(OSError):  # a device cannot be cut, and has kept nothing
            os.ftruncate(self._file, self._size)

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(f"shadow.record: cannot write {self.path}: {error.strerror or error}")
