"""Reads files of JSON objects, one per line or in one array, and of CSV; errors name the line or the element."""

import json
import re
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Any

from msgspec.json import Decoder

from kvsim.errors import TraceError
from kvsim.numbers import LONGEST_TEXT, MOST_SECONDS, SECONDS, Real, Whole
from kvsim.numbers import shown as shown_number
from kvsim.pages.extents import Extent, append_extent
from kvsim.trace.arrays import Elements
from kvsim.trace.files import TraceFile, open_trace
from kvsim.trace.rows import COLUMNS, read_rows

NO_VALUE = "not JSON: Expecting value"
NO_COLUMNS = "; a line is a JSON object, or the first one has the names of a CSV file's columns, with commas between them"
MAX_LINE_BYTES = 1 << 27
"""Room for a prompt of 16 million token ids."""
COUNT = Whole()
AT_LEAST_ONE = Whole(1)
SAMPLES = Whole(1, 1 << 14)
"""Answers to one prompt; engines stop at far fewer."""
SIGNED = Whole(-(2**63))
MILLISECONDS = Real(least=0, most=1000 * MOST_SECONDS)
LARGEST_NAME = 2**128


class Record:
    """A JSON object of a trace file, top-level or nested, whose fields are checked as they are read."""

    __slots__ = ("fields", "line", "path")

    def __init__(self, path: str, line: int | None, fields: object) -> None:
        self.path = path
        self.line = line
        if not isinstance(fields, dict):
            raise self.error(f"expected a JSON object, not {shown(fields)}")
        self.fields: dict[str, Any] = fields

    def error(self, problem: str) -> TraceError:
        """Return the error to raise for a problem with this record."""
        return TraceError(self.path, self.line, problem)

    def names(self) -> set[str]:
        """Return the names of the fields, with those in the objects among them, as ``a.b``."""
        inner = {f"{name}.{own}" for name, value in self.fields.items() if isinstance(value, dict) for own in value}
        return inner | self.fields.keys()

    def has(self, key: str) -> bool:
        """Whether the field is present and not null."""
        return self.fields.get(key) is not None

    def either(self, key: str, other: str) -> str:
        """Return the name under which a field with two names is there; ``key`` if under neither."""
        return other if key not in self.fields and other in self.fields else key

    def integer(self, key: str, number: Whole = COUNT) -> int:
        """Return a field that must be a whole number, not negative by default."""
        value = self.fields.get(key)
        if type(value) is int and number.least <= value <= number.most:
            return value
        raise self._wrong(key, number.expected(value))

    def tokens(self, key: str, most: int, number: Whole = COUNT) -> int:
        """Return a field that must be a number of tokens. Raises TraceError for more than ``most``, which is ``max_tokens``."""
        tokens = self.integer(key, number)
        if tokens > most:
            raise self.too_long(key, tokens, most)
        return tokens

    def too_long(self, what: str, tokens: int, most: int) -> TraceError:
        """Return the error for more tokens than ``max_tokens``."""
        return self.error(f"{what} is {tokens} tokens, more than trace.max_tokens={most}: raise that if the trace is right")

    def samples(self, max_tokens: int, output_tokens: int) -> int:
        """Return the field ``n``, the number of answers of ``output_tokens`` each; 1 if it is absent or null."""
        samples = self.integer("n", SAMPLES) if self.has("n") else 1
        if samples * output_tokens > max_tokens:
            raise self.too_long(f"the answer, n={samples} times,", samples * output_tokens, max_tokens)
        return samples

    def number(self, key: str, number: Real = SECONDS) -> float:
        """Return a field that must be a finite number, by default a time in seconds."""
        value = self.fields.get(key)
        if (type(value) is float or type(value) is int) and number.least <= value <= number.most:
            return float(value)
        raise self._wrong(key, number.expected(value))

    def name(self, key: str) -> str | int:
        """Return a field that must be a string or an integer."""
        value = self.fields.get(key)
        if isinstance(value, str) or type(value) is int and abs(value) <= LARGEST_NAME:
            return value
        raise self._wrong(key, "a string or an integer" + " of at most 128 bits" * (type(value) is int))

    def flag(self, key: str) -> bool:
        """Return a field that must be true or false; false if it is absent or null."""
        value = self.fields.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(key, "true or false")

    def part(self, key: str) -> "Record":
        """Return a field that must be an object."""
        value = self.fields.get(key)
        if isinstance(value, dict):
            return Record(self.path, self.line, value)
        raise self._wrong(key, "a JSON object")

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

    def id_extents(self, key: str) -> tuple[Extent, ...]:
        """Return a list of ids as normalised extents: ``key``, or ``key_rle`` with a first id and a length for each extent."""
        packed = f"{key}_rle"
        if not self.has(packed):
            return extents_of(self.integers(key))
        flat = self.integers(packed)
        if len(flat) % 2 or 0 in flat[1::2]:
            raise self.error(f"{packed} must contain pairs of a first id and a length of at least 1")
        extents: list[Extent] = []
        for start, length in zip(flat[::2], flat[1::2], strict=True):
            append_extent(extents, start, length)
        return tuple(extents)

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
                raise self.error(f"{key} must be a list of [begin, end] within the prompt of {tokens} tokens, not {shown(pair)}")
        found = sorted((begin, end) for begin, end in self.items(key))
        for (begin, end), (following, _) in pairwise(found):
            if following < end:
                raise self.error(f"{key} must not overlap: one begins at token {following}, inside [{begin}, {end}]")
        return tuple(found)

    def _wrong(self, key: str, expected: str) -> TraceError:
        if key not in self.fields:
            return self.error(f"{key} is missing; it must be {expected}")
        return self.error(f"{key} must be {expected}, not {shown(self.fields[key])}")


INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
"""Numbers as logs write them; Python would also take underscores, and the digits of all scripts."""


class Row(Record):
    """A row of a CSV file: each cell is text, so that 007 and 7 are two names, and a number only where one is needed."""

    __slots__ = ()

    def integer(self, key: str, number: Whole = COUNT) -> int:
        cell = self.fields.get(key)
        if isinstance(cell, str) and INTEGER.fullmatch(cell) and number.least <= (value := int(cell)) <= number.most:
            return value
        raise self._wrong(key, number.expected(None))

    def items(self, key: str) -> list[Any]:
        cell = self.fields.get(key)
        if isinstance(cell, str) and cell[:1] == "[":
            try:
                found = Decoder(list[Any]).decode(cell)
            except (ValueError, RecursionError):
                raise self._wrong(key, "a list") from None
            return found
        raise self._wrong(key, "a list")

    def number(self, key: str, number: Real = SECONDS) -> float:
        cell = self.fields.get(key)
        if isinstance(cell, str) and DECIMAL.fullmatch(cell) and number.least <= (value := float(cell)) <= number.most:
            return value
        raise self._wrong(key, number.expected(None))


def read_records(path: str, limit: int | None = None, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Record]:
    """Yield the objects of a file of JSON Lines, of one JSON array, or of CSV, only the first ``limit`` if given.

    Blank lines are skipped. A file whose name ends in ``.gz`` or ``.zst`` is decompressed. Raises TraceError if the file cannot
    be read to the end or is empty, and for a line, or an element of an array, of more than ``max_line_bytes`` bytes.
    """
    with open_trace(path, max_line_bytes) as file:
        records = _parse(file)
        first = next(records, None)
        if first is None:
            raise TraceError(path, None, "the file is empty: it contains no requests")
        yield first
        yield from islice(records, None if limit is None else limit - 1)


def _parse(file: TraceFile) -> Iterator[Record]:
    if file.begin() == b"[":
        return _parse_array(Elements(file))
    lines = file.lines()
    first = next(lines, None)
    if first is None:
        return iter(())
    if len(first[1]) <= MAX_EXPLAINED_BYTES and COLUMNS.fullmatch(first[1]):
        return (Row(file.path, line, cells) for line, cells in read_rows(file.path, first, lines))
    return _parse_lines(file, first, lines)


def _parse_lines(file: TraceFile, first: tuple[int, bytes], others: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
    """Yield the objects of lines; the first line may also begin an object that is the whole file."""
    decode = Decoder().decode
    for line, text in chain([first], others):
        try:
            fields = decode(text)
        except (ValueError, RecursionError) as error:
            if line > first[0] or (fields := _whole(text, file)) is None:
                problem = _problem(text, error)
                is_other = line == first[0] and problem == NO_VALUE
                raise TraceError(file.path, line, problem + NO_COLUMNS if is_other else problem) from None
        yield Record(file.path, line, fields)


def _whole(text: bytes, file: TraceFile) -> dict[str, Any] | None:
    """Return a file that is one JSON object over several lines; None if it is not."""
    if not text.lstrip().startswith(b"{"):
        return None
    more = file.part(file.max_line_bytes - len(text) + 1)
    try:
        fields = Decoder().decode(text + more)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


MAX_EXPLAINED_BYTES = 1 << 20
"""The longest line that is looked at more than once."""


def _parse_array(elements: Elements) -> Iterator[Record]:
    decode = Decoder().decode
    for text in elements:
        try:
            fields = decode(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(elements.path, None, _problem(text, error)) from None
        yield Record(elements.path, None, fields)


def _problem(text: bytes, error: Exception) -> str:
    """Say what is wrong with JSON that the fast parser refuses; Python's own parser explains short lines better."""
    if isinstance(error, RecursionError):
        return "not JSON that can be read: nested too deeply"
    try:
        if len(text) <= MAX_EXPLAINED_BYTES:
            json.loads(text.decode())
    except UnicodeDecodeError:
        return "not UTF-8 text; if the file is compressed, its name must end in .gz or .zst"
    except json.JSONDecodeError as explained:
        return f"not JSON: {explained.msg}"
    except (ValueError, RecursionError):
        pass
    return f"not JSON: {error}"


def shown(value: object) -> str:
    """Return a value as JSON has it, shortened."""
    if isinstance(value, int) and not isinstance(value, bool):
        return shown_number(value)
    text = ""
    for part in json.JSONEncoder().iterencode(value):
        text += part
        if len(text) > LONGEST_TEXT:
            return f"{text[:LONGEST_TEXT]}..."
    return text


def extents_of(ids: list[int]) -> tuple[Extent, ...]:
    """Convert a list of ids to normalised extents."""
    cuts = [i for i, (left, right) in enumerate(pairwise(ids), 1) if right != left + 1]
    return tuple((ids[start], stop - start) for start, stop in pairwise([0, *cuts, len(ids)]) if stop > start)
