"""Reads trace files as bytes, plain, gzipped (``.gz``) or compressed with Zstandard (``.zst``), in bounded memory."""

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

from kvsim.errors import TraceError

CHUNK_BYTES = 1 << 20
PART_BYTES = 4096
"""Bytes of a Zstandard file that are decompressed at once: they become 128 MiB at most, however the file was made."""
BOM = b"\xef\xbb\xbf"


class TraceFile:
    """The decompressed content of a trace file, by lines or by parts; errors name the line that is reached.

    No line, and no blank between two lines, may have more than ``max_line_bytes`` bytes: memory stays bounded whatever the file
    is, even if it is small and decompresses to far more than there is memory.
    """

    def __init__(self, path: str, file: IO[bytes], max_line_bytes: int) -> None:
        self.path = path
        self.max_line_bytes = max_line_bytes
        self.line = 0
        """Lines read so far."""
        self._file: Any = file

    def begin(self) -> bytes:
        """Skip a byte order mark and blanks, and return the first byte, which is not read yet; empty at the end of the file."""
        if self._file.peek(len(BOM)).startswith(BOM):
            self._file.read(len(BOM))
        return self.skip_blanks()

    def skip_blanks(self) -> bytes:
        """Skip white space and return the byte behind it, which is not read yet; empty at the end of the file."""
        skipped = 0
        while content := self._file.peek(1):
            text = content.lstrip()
            blank = len(content) - len(text)
            self.line += content.count(b"\n", 0, blank)
            self._file.read(blank)
            skipped += blank
            if text:
                return cast(bytes, text[:1])
            self.check(skipped, "is nothing but blanks", self.line + 1)
        return b""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number, from 1, and the content of each line that is not blank."""
        read = self._file.readline
        most = self.max_line_bytes + 1
        while content := read(most):
            self.line += 1
            if content.isspace():
                self.line -= not content.endswith(b"\n")
                self.skip_blanks()
                continue
            self.check(len(content), "is too long", self.line)
            yield self.line, content

    def part(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only at the end of the file."""
        return cast(bytes, self._file.read(size))

    def check(self, size: int, problem: str, line: int | None, path: str = "") -> None:
        """Raise TraceError if a line, or what stands for one, has more bytes than a line may have."""
        if size > self.max_line_bytes:
            raise TraceError(
                path or self.path, line, f"{problem}: more than {self.max_line_bytes:,} bytes (trace.max_line_bytes)"
            )


@contextmanager
def open_trace(path: str, max_line_bytes: int) -> Iterator[TraceFile]:
    """Open a trace file. Raises TraceError if it cannot be read to the end or changes while it is read."""
    trace = None
    try:
        before = _state(path)
        with open_file(path) as file:
            trace = TraceFile(path, file, max_line_bytes)
            yield trace
        if _state(path) != before:
            raise TraceError(path, None, "changed while it was read: run again, or read a copy of a log that is still written")
    except Damaged as error:
        raise TraceError(path, _next_line(trace) if error.is_after_content else None, str(error)) from None
    except gzip.BadGzipFile as error:
        problem = f"not a valid gzip file, although its name ends in .gz: {error}"
        raise TraceError(path, (trace.line or None) if trace else None, problem) from None
    except (EOFError, zlib.error):
        raise TraceError(path, _next_line(trace), "the gzip file is truncated or damaged here; download it again") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None


def _next_line(trace: TraceFile | None) -> int | None:
    return None if trace is None else trace.line + 1


def _state(path: str) -> tuple[int, ...]:
    """Return what changes when a file does. Raises TraceError for what can be read only once, such as a pipe."""
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
        raise TraceError(path, None, "is not a file: pipe its content into kvsim and set trace.path=-")
    return state.st_ino, state.st_size, state.st_mtime_ns


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading, decompressed if its name ends in ``.gz`` or ``.zst``. Raises OSError."""
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstandardFile(open(path, "rb")), CHUNK_BYTES)
    return open(path, "rb")


class Damaged(OSError):
    """Compressed content that cannot be decompressed."""

    def __init__(self, message: str, is_after_content: bool) -> None:
        super().__init__(message)
        self.is_after_content = is_after_content


class _ZstandardFile(io.RawIOBase):
    """The decompressed content of a file of one or more Zstandard frames. Raises Damaged, also where a frame ends too early."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._failure = zstandard.ZstdError
        self._frame: Any = None
        self._compressed = memoryview(b"")
        self._content = memoryview(b"")
        self._has_read = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or memoryview(self._file.read(CHUNK_BYTES))
            if not self._compressed:
                if self._frame is not None:
                    raise Damaged("the Zstandard file is truncated here; download it again", is_after_content=True)
                return 0
            self._content = memoryview(self._decompressed())
        size = min(len(buffer), len(self._content))
        buffer[:size] = self._content[:size]
        self._content = self._content[size:]
        return size

    def _decompressed(self) -> bytes:
        """Return the next content; sets ``_frame`` to None at the end of a frame."""
        self._frame = self._frame or self._new_frame()
        part = self._compressed[:PART_BYTES]
        try:
            content: bytes = self._frame.decompress(part)
        except self._failure as error:
            problem = (
                "damaged here; download it again" if self._has_read else f"not valid, although its name ends in .zst: {error}"
            )
            raise Damaged(f"the Zstandard file is {problem}", is_after_content=self._has_read) from None
        self._has_read = True
        left = len(self._frame.unused_data) if self._frame.eof else 0
        self._compressed = self._compressed[len(part) - left :]
        self._frame = None if self._frame.eof else self._frame
        return content

    def close(self) -> None:
        self._file.close()
        super().close()
