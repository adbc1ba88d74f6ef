"""The requests of a long trace, in a file without a name instead of in memory."""

import marshal
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain, islice, repeat
from operator import attrgetter, is_
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, overload
from weakref import finalize

import numpy as np

from kvsim.core.request import Request, Reset, RetentionRange
from kvsim.core.requests import ReadRequests, values_of
from kvsim.errors import UsageError

PART = 1024
"""Requests that are written and read together."""
PARTS_KEPT = 8
"""Parts that are kept as objects: a run asks for one request after another, and now and then for an earlier one."""
SORTED_AT_ONCE = 64 * PART
"""Requests in memory while an order is changed."""
MOST_IN_MEMORY = 1 << 20
"""Extents up to which requests stay in memory, each request counted as ``OF_A_REQUEST`` more: an eighth of a GiB, about."""
OF_A_REQUEST = 4
AT_ONCE = 1 << 30
"""Bytes of the file that are read at once; the system reads less than 2 GiB."""
FIELDS = tuple(field.name for field in fields(Request) if field.name != "index")
"""What is stored of a request; its index is its position."""
VALUES = tuple(attrgetter(name) for name in FIELDS)
NAMED: Mapping[str, Callable[[Iterable[Any]], Any]] = {"resets": Reset._make, "retention": RetentionRange._make}
"""Fields that are tuples of named tuples, which are stored as plain ones, and what makes these named again."""


class StoredRequests(ReadRequests):
    """Requests that are read from a temporary file when they are asked for. They are numbered by position.

    The file has a column of values for each field, part by part, so that one field of all requests is read quickly. Whatever is
    changed in a request that was read is lost, at ``forget`` at the latest.
    """

    def __init__(self, requests: Iterable[Request], content: bytes = b"") -> None:
        """Take each request once; ``content`` is what the file begins with. Raises UsageError if it cannot be written."""
        self._length = 0
        self._ends = array("Q", [0])
        """Where each column ends in the file: ``len(FIELDS)`` numbers for each part, behind a 0."""
        self._parts: OrderedDict[int, list[Request]] = OrderedDict()
        try:
            self._file = TemporaryFile(prefix="kvsim-")  # noqa: SIM115  # as long as this object
            finalize(self, _close, self._file)
            self._file.write(content)
            left = iter(requests)
            while part := list(islice(left, PART)):
                self._write(part)
            self._file.flush()
        except OSError as error:
            raise UsageError(
                f"the trace does not fit in memory and cannot be stored in {_folder()}: {error.strerror or error}; set TMPDIR "
                "to a folder with more room"
            ) from None

    def _write(self, part: Sequence[Request]) -> None:
        end = self._ends[-1]
        for name, value in zip(FIELDS, VALUES, strict=True):
            column = list(map(value, part))
            if name in NAMED:
                column = [tuple(map(tuple, items)) for items in column]
            is_same = all(map(is_, column, repeat(column[0])))
            end += self._file.write(marshal.dumps((column[0],) if is_same else column, 2))
            self._ends.append(end)
        self._length += len(part)

    def _column(self, part: int, field: int) -> Iterable[Any]:
        """Read the values of a field in a part."""
        at = part * len(FIELDS) + field
        begin, end = self._ends[at], self._ends[at + 1]
        values = marshal.loads(os.pread(self._file.fileno(), end - begin, begin))
        if make := NAMED.get(FIELDS[field]):
            values = type(values)(tuple(map(make, items)) for items in values)
        size = min(PART, self._length - part * PART)
        return repeat(values[0], size) if isinstance(values, tuple) else values

    def _read(self, part: int) -> list[Request]:
        """Return the requests of a part."""
        known = self._parts.get(part)
        if known is None:
            columns = [self._column(part, field) for field in range(len(FIELDS))]
            known = self._parts[part] = [
                Request(index=index, **dict(zip(FIELDS, row, strict=True)))
                for index, row in enumerate(zip(*columns, strict=True), part * PART)
            ]
            while len(self._parts) > PARTS_KEPT:
                self._parts.popitem(last=False)
        self._parts.move_to_end(part)
        return known

    def values(self, name: str) -> Iterator[Any]:
        if name == "index":
            return iter(range(self._length))
        field = FIELDS.index(name)
        return chain.from_iterable(self._column(part, field) for part in range(-(-self._length // PART)))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._between(start, stop) if step == 1 else [self[at] for at in range(start, stop, step)]
        at = range(self._length)[index]
        return self._read(at // PART)[at % PART]

    def _between(self, start: int, stop: int) -> list[Request]:
        found: list[Request] = []
        for part in range(start // PART, -(-stop // PART)):
            first = part * PART
            found += self._read(part)[max(0, start - first) : max(0, stop - first)]
        return found

    def __iter__(self) -> Iterator[Request]:
        for part in range(-(-self._length // PART)):
            yield from self._read(part)

    def __reduce__(self) -> tuple[Callable[..., "StoredRequests"], tuple[int, bytes, bytes]]:
        """A copy has a file of its own."""
        size, number = self._ends[-1], self._file.fileno()
        content = b"".join([os.pread(number, min(AT_ONCE, size - at), at) for at in range(0, size, AT_ONCE)])
        return _restored, (self._length, self._ends.tobytes(), content)

    def __repr__(self) -> str:
        return f"<{self._length:,} requests in a file>"

    def forget(self) -> None:
        """Lose what has been changed in requests that were read."""
        self._parts.clear()

    def changed(self, change: Callable[[Request], None]) -> "StoredRequests":
        """Return the requests, each changed by a function."""
        return StoredRequests(self._each(change))

    def _each(self, change: Callable[[Request], None]) -> Iterator[Request]:
        for request in self:
            change(request)
            yield request
        self.forget()

    def in_order(self) -> "StoredRequests":
        """Return the requests sorted by arrival; ``after`` and ``joins``, positions here, become those there."""
        arrivals = np.fromiter(self.values("arrival_s"), np.float64, self._length)
        if (arrivals[1:] >= arrivals[:-1]).all():
            return self
        order = np.argsort(arrivals, kind="stable")
        place = np.empty(self._length, dtype=np.int64)
        place[order] = np.arange(self._length)
        return StoredRequests(self._placed(order, place))

    def _placed(self, order: np.ndarray, place: np.ndarray) -> Iterator[Request]:
        """Yield the requests in another order; a part is read for every ``SORTED_AT_ONCE`` requests that have some of it."""
        for first in range(0, self._length, SORTED_AT_ONCE):
            wanted = order[first : first + SORTED_AT_ONCE]
            found: list[Request | None] = [None] * len(wanted)
            for position in np.sort(wanted).tolist():
                request = self[position]
                request.after = int(place[request.after]) if 0 <= request.after < self._length else -1
                if request.joins:
                    request.joins = tuple(place[list(request.joins)].tolist())
                found[int(place[position]) - first] = request
            self.forget()
            yield from filter(None, found)


def _folder() -> str:
    """Return the folder for temporary files; where none can be written, only words for it."""
    try:
        return gettempdir()
    except OSError:
        return "a folder for temporary files"


def _restored(length: int, ends: bytes, content: bytes) -> StoredRequests:
    """Make requests anew from what another object's file has."""
    made = StoredRequests((), content)
    made._length, made._ends = length, array("Q", ends)
    return made


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # what could not be written before cannot be written now
        file.close()


def gathered(requests: Iterable[Request]) -> list[Request] | StoredRequests:
    """Return requests in a list or, if they would take too much memory, in a file. Raises UsageError if that has no room."""
    if isinstance(requests, StoredRequests):
        return requests
    kept: list[Request] = []
    left, room = iter(requests), MOST_IN_MEMORY
    for request in left:
        kept.append(request)
        room -= OF_A_REQUEST + len(request.runs) + len(request.output_runs or ())
        if room < 0:
            return StoredRequests(chain(_emptied(kept), left))
    return kept


def _emptied(requests: list[Request]) -> Iterator[Request]:
    """Yield the requests of a list, which gives them up on the way."""
    requests.reverse()
    while requests:
        yield requests.pop()


def changed(requests: list[Request] | StoredRequests, change: Callable[[Request], None]) -> list[Request] | StoredRequests:
    """Return requests of which each has been changed by a function: the same list, or another file."""
    if isinstance(requests, StoredRequests):
        return requests.changed(change)
    for request in requests:
        change(request)
    return requests


def from_first_arrival(requests: list[Request] | StoredRequests, rate: float) -> list[Request] | StoredRequests:
    """Return requests whose first arrival is at time 0, at ``rate`` times the speed."""
    begin_s = min(values_of(requests, "arrival_s"))

    def shift(request: Request) -> None:
        request.arrival_s = (request.arrival_s - begin_s) / rate

    return changed(requests, shift)
