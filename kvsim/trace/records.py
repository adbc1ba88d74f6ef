"""Reads files of JSON objects, one per line or in one array, and of CSV; errors name the line or the element."""

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from msgspec.json import Decoder

from kvsim.core.runs import Run, append_run
from kvsim.errors import TraceError
from kvsim.trace.files import lines


class Record:
    """A JSON object of a trace file, top-level or nested, whose fields are checked as they are read."""

    __slots__ = ("fields", "line", "path")

    def __init__(self, path: str, line: int | None, fields: object) -> None:
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

    def either(self, key: str, other: str) -> str:
        """Return the name under which a field with two names is there; ``key`` if under neither."""
        return other if key not in self.fields and other in self.fields else key

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

    def id_runs(self, key: str) -> tuple[Run, ...]:
        """Return a list of ids as normalised runs: ``key``, or ``key_rle`` with a first id and a length for each run."""
        packed = f"{key}_rle"
        if not self.has(packed):
            return runs_of(self.integers(key))
        flat = self.integers(packed)
        if len(flat) % 2 or 0 in flat[1::2]:
            raise self.error(f"{packed} must contain pairs of a first id and a length of at least 1")
        runs: list[Run] = []
        for start, length in zip(flat[::2], flat[1::2], strict=True):
            append_run(runs, start, length)
        return tuple(runs)

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
    """Yield the objects of a file of JSON Lines, of one JSON array, or of CSV, only the first ``limit`` if given.

    Blank lines are skipped.

    A file whose name ends in ``.gz`` or ``.zst`` is decompressed. Raises TraceError if the file cannot be read to the end or is
    empty.
    """
    records = _parse(path)
    first = next(records, None)
    if first is None:
        raise TraceError(path, None, "the file is empty: it contains no requests")
    yield first
    yield from islice(records, None if limit is None else limit - 1)


def _parse(path: str) -> Iterator[Record]:
    decode = Decoder().decode
    every_line = lines(path)
    for line, text in every_line:
        if text.isspace():
            continue
        if line == 1:
            text = text.removeprefix(BOM)
            if text.lstrip().startswith(b"["):
                yield from _parse_array(path, b"".join([text, *(more for _, more in every_line)]))
                return
            if COLUMNS.fullmatch(text):
                yield from _parse_rows(path, text.decode().strip().split(","), every_line)
                return
        try:
            fields = decode(text)
        except (ValueError, RecursionError) as error:
            if line > 1 or (fields := _whole(text, every_line)) is None:
                raise TraceError(path, line, _problem(text, error, "not JSON")) from None
        yield Record(path, line, fields)


def _whole(text: bytes, rest: Iterator[tuple[int, bytes]]) -> dict[str, Any] | None:
    """Return a file that is one JSON object over several lines; None if it is not."""
    try:
        fields = Decoder().decode(b"".join([text, *(more for _, more in rest)])) if text.lstrip().startswith(b"{") else None
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


COLUMNS = re.compile(rb"[\w .()-]+(,[\w .()-]+)+\s*")
"""The first line of a CSV file: names of columns."""
BOM = b"\xef\xbb\xbf"


def _parse_rows(path: str, columns: list[str], rows: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
    """Yield the rows of a CSV file. Numbers become numbers, empty cells null; cells are not quoted."""
    for line, text in rows:
        if text.isspace():
            continue
        try:
            cells = text.decode().strip().split(",")
        except UnicodeDecodeError:
            raise TraceError(path, line, "not UTF-8 text") from None
        if len(cells) != len(columns):
            raise TraceError(path, line, f"has {len(cells)} cells, but there are {len(columns)} columns")
        yield Record(path, line, dict(zip(columns, map(_cell, cells), strict=True)))


def _cell(text: str) -> int | float | str | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _parse_array(path: str, text: bytes) -> Iterator[Record]:
    try:
        items = Decoder().decode(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, 1, _problem(text, error, "begins as a JSON array, but is not one")) from None
    for number, fields in enumerate(items, 1):
        yield Record(f"{path}, element {number}", None, fields)


def _problem(text: bytes, error: Exception, what: str) -> str:
    """Say what is wrong with JSON that the fast parser refuses; Python's own parser explains it better."""
    try:
        json.loads(text.decode())
    except UnicodeDecodeError:
        return "not UTF-8 text; if the file is compressed, its name must end in .gz or .zst"
    except json.JSONDecodeError as explained:
        return f"{what}: {explained.msg}"
    except (ValueError, RecursionError):
        pass
    return f"{what}: {error}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def runs_of(ids: list[int]) -> tuple[Run, ...]:
    """Convert a list of ids to normalised runs."""
    cuts = [i for i, (left, right) in enumerate(pairwise(ids), 1) if right != left + 1]
    return tuple((ids[start], stop - start) for start, stop in pairwise([0, *cuts, len(ids)]) if stop > start)
