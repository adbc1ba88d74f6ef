"""Reads JSON Lines files, plain or gzipped; errors name the line."""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, TextIO

from kvsim.core.runs import Run
from kvsim.errors import TraceError


class Record:
    """A JSON object of a trace file, top-level or nested, whose fields are checked as they are read."""

    __slots__ = ("fields", "line", "path")

    def __init__(self, path: str, line: int, fields: object) -> None:
        self.path = path
        self.line = line
        if not isinstance(fields, dict):
            raise self.error(f"expected a JSON object, not {_shown(fields)}")
        self.fields: dict[str, Any] = fields

    def error(self, problem: str) -> TraceError:
        """Return the error to raise for a problem with this record."""
        return TraceError(self.path, self.line, problem)

    def has(self, key: str) -> bool:
        """Whether the field is present and not null."""
        return self.fields.get(key) is not None

    def integer(self, key: str, minimum: int | None = 0) -> int:
        """Return a field that must be an integer of at least ``minimum``; None allows any integer."""
        value = self.fields.get(key)
        if type(value) is int and (minimum is None or value >= minimum):
            return value
        raise self._wrong(key, "an integer" if minimum is None else f"an integer of at least {minimum}")

    def number(self, key: str) -> float:
        """Return a field that must be a finite, non-negative number."""
        value = self.fields.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
            return float(value)
        raise self._wrong(key, "a number of at least 0")

    def name(self, key: str) -> str | int:
        """Return a field that must be a string or an integer."""
        value = self.fields.get(key)
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return value
        raise self._wrong(key, "a string or an integer")

    def flag(self, key: str) -> bool:
        """Return a field that must be true or false; false if it is absent or null."""
        value = self.fields.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(key, "true or false")

    def items(self, key: str) -> list[Any]:
        """Return a field that must be a list."""
        value = self.fields.get(key)
        if isinstance(value, list):
            return value
        raise self._wrong(key, "a list")

    def integers(self, key: str) -> list[int]:
        """Return a field that must be a list of non-negative integers."""
        values = self.items(key)
        if set(map(type, values)) <= {int} and (not values or min(values) >= 0):
            return values
        raise self._wrong(key, "a list of non-negative integers")

    def integer_lists(self, key: str) -> list[list[int]]:
        """Return a field that must be a list of lists of non-negative integers."""
        for values in self.items(key):
            if not isinstance(values, list) or not set(map(type, values)) <= {int} or values and min(values) < 0:
                raise self._wrong(key, "a list of lists of non-negative integers")
        return self.items(key)

    def stretches(self, key: str, tokens: int) -> tuple[tuple[int, int], ...]:
        """Return a field that must be a list of [begin, end], in order; () if it is absent or null.

        They must lie within ``tokens`` tokens and must not overlap.
        """
        if not self.has(key):
            return ()
        for pair in self.items(key):
            if not isinstance(pair, list) or [type(part) for part in pair] != [int, int] or not 0 <= pair[0] < pair[1] <= tokens:
                raise self.error(f"{key} must be a list of [begin, end] within the prompt of {tokens} tokens, not {_shown(pair)}")
        found = sorted((begin, end) for begin, end in self.items(key))
        for (begin, end), (following, _) in pairwise(found):
            if following < end:
                raise self.error(f"{key} must not overlap: one begins at token {following}, inside [{begin}, {end}]")
        return tuple(found)

    def _wrong(self, key: str, expected: str) -> TraceError:
        if key not in self.fields:
            return self.error(f"{key} is missing; it must be {expected}")
        return self.error(f"{key} must be {expected}, not {_shown(self.fields[key])}")


def read_records(path: str, limit: int | None = None) -> Iterator[Record]:
    """Yield the objects of a JSON Lines file, only the first ``limit`` if given. Blank lines are skipped.

    A file whose name ends in ``.gz`` is decompressed. Raises TraceError if the file cannot be read to the end or is empty.
    """
    records = _parse(path)
    first = next(records, None)
    if first is None:
        raise TraceError(path, None, "the file is empty: it contains no requests")
    yield first
    yield from islice(records, None if limit is None else limit - 1)


def _parse(path: str) -> Iterator[Record]:
    for line, text in _lines(path):
        if text.isspace():
            continue
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(path, line, f"not JSON: {getattr(error, 'msg', error)}") from None
        yield Record(path, line, fields)


def _lines(path: str) -> Iterator[tuple[int, str]]:
    line = 0
    try:
        with _open(path) as file:
            for line, text in enumerate(file, 1):
                yield line, text
    except gzip.BadGzipFile as error:
        raise TraceError(path, line or None, f"not a valid gzip file, although its name ends in .gz: {error}") from None
    except (EOFError, zlib.error):
        raise TraceError(path, line + 1, "the gzip file is truncated or damaged here; download it again") from None
    except UnicodeDecodeError:
        raise TraceError(path, line + 1, "not UTF-8 text; if the file is gzipped, its name must end in .gz") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None


def _open(path: str) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def runs_of(ids: list[int]) -> tuple[Run, ...]:
    """Convert a list of ids to normalised runs."""
    cuts = [i for i, (left, right) in enumerate(pairwise(ids), 1) if right != left + 1]
    return tuple((ids[start], stop - start) for start, stop in pairwise([0, *cuts, len(ids)]) if stop > start)
