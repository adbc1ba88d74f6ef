"""Reads trace files by lines of bytes: plain, gzipped (``.gz``) or compressed with Zstandard (``.zst``)."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, cast

from kvsim.errors import TraceError

CHUNK_BYTES = 1 << 20


def lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the content of each line. Raises TraceError if the file cannot be read to the end."""
    line = 0
    try:
        with open_file(path) as file:
            for line, content in enumerate(file, 1):
                yield line, content
    except Damaged as error:
        raise TraceError(path, line + 1 if error.is_after_content else None, str(error)) from None
    except gzip.BadGzipFile as error:
        raise TraceError(path, line or None, f"not a valid gzip file, although its name ends in .gz: {error}") from None
    except (EOFError, zlib.error):
        raise TraceError(path, line + 1, "the gzip file is truncated or damaged here; download it again") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None


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
        self._compressed = b""
        self._content = memoryview(b"")
        self._has_read = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._file.read(CHUNK_BYTES)
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
        try:
            content: bytes = self._frame.decompress(self._compressed)
        except self._failure as error:
            problem = (
                "damaged here; download it again" if self._has_read else f"not valid, although its name ends in .zst: {error}"
            )
            raise Damaged(f"the Zstandard file is {problem}", is_after_content=self._has_read) from None
        self._has_read = True
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        self._frame = None if self._frame.eof else self._frame
        return content

    def close(self) -> None:
        self._file.close()
        super().close()
