"""Cuts a JSON array into its elements as it is read, so that an array of any length takes the memory of one element."""

import re
from collections.abc import Iterator

from kvsim.errors import TraceError
from kvsim.trace.files import CHUNK_BYTES, TraceFile

STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
"""What decides where an element ends: texts and brackets. A quote alone begins a text that goes on behind what is read."""
BLANKS = re.compile(rb"\s*+")
QUOTE, OPENING = b'"'[0], b"[{"
DEEPEST = 1_000
"""Brackets within brackets; the parser has about the same limit."""
SHOWN = re.compile(rb"[^\s,\]]{1,40}|.", re.DOTALL)


class Elements:
    """The elements of a file that is one JSON array, which begins with its next byte."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._text = b""
        self._at = 0
        self._number = 0

    @property
    def path(self) -> str:
        """The file and the number of the element that is being read, from 1, for errors."""
        return f"{self._file.path}, element {self._number}"

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text of each element. Raises TraceError for one that is no object, and for an array that does not end."""
        self._next()
        self._at += 1
        is_last = self._next() == b"]"
        while not is_last:
            self._number += 1
            end = self._end()
            yield self._text[self._at : end]
            self._at = end
            behind = self._next()
            if behind not in (b",", b"]"):
                raise self._error(f"expected , or ] behind it, not {self._shown()}")
            self._at += 1
            is_last = behind == b"]"
        if not self._number:
            self._at += 1
        if self._next():
            raise self._error(f"expected nothing behind the end of the array, not {self._shown()}")

    def _error(self, problem: str) -> TraceError:
        return TraceError(self.path, None, problem)

    def _shown(self) -> str:
        found = SHOWN.match(self._text, self._at)
        return found[0].decode(errors="replace") if found and found[0] else "the end of the file"

    def _next(self) -> bytes:
        """Pass white space, and return the byte behind it, which is not passed yet; empty at the end of the file."""
        while True:
            found = BLANKS.match(self._text, self._at)
            self._at = found.end() if found else 0
            if self._at < len(self._text):
                return self._text[self._at : self._at + 1]
            if not self._read():
                return b""

    def _read(self) -> bool:
        """Append more of the file to what is not passed yet, at least as much again; false at its end."""
        kept = self._text[self._at :]
        self._file.check(len(kept), "is too long", None, self.path)
        more = self._file.part(max(CHUNK_BYTES, len(kept)))
        self._text, self._at = kept + more, 0
        return bool(more)

    def _end(self) -> int:
        """Return the end of the element that begins here. Raises TraceError unless it is an object."""
        if self._next() != b"{":
            raise self._error(f"expected a JSON object, not {self._shown()}")
        depth, passed = 0, 0  # brackets that are open, and bytes of the element that are looked at
        while True:
            text, begin = self._text, self._at
            for found in STRUCTURE.finditer(text, begin + passed):
                start, end = found.span()
                if text[start] == QUOTE:
                    if end == start + 1:
                        break
                elif text[start] in OPENING:
                    depth += 1
                    if depth > DEEPEST:
                        raise self._error("is nested too deeply")
                else:
                    depth -= 1
                    if not depth:
                        self._file.check(end - begin, "is too long", None, self.path)
                        return end
                passed = end - begin
            if not self._read():
                raise self._error("the file ends inside it; an array must end with ]")
