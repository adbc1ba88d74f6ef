"""Lines of a trace that reset the cache, as after an update of the model's weights."""

from collections.abc import Callable, Iterable, Iterator
from math import nan

from kvsim.core.request import RESETS, Request, Reset
from kvsim.trace.records import Record, shown
from kvsim.trace.timetable import Timetable


def read_requests(
    records: Iterable[Record], times: Timetable, read: Callable[[Record], Request], *, is_limited: bool
) -> Iterator[Request]:
    """Yield a request for each record, in order; a line ``{"reset": "drain"}`` becomes part of the request after it.

    ``is_limited`` says that the records are not the whole file, so that a reset may come last. Raises TraceError.
    """
    resets: tuple[Reset, ...] = ()
    record, is_first = None, True
    for record in records:
        if "reset" in record.fields:
            if is_first:
                raise record.error("reset before the first request has no effect: leave this line out")
            resets = (*resets, read_reset(record, times))
            continue
        request = read(record)
        request.resets, resets, is_first = resets, (), False
        yield request
    if resets and not is_limited and record is not None:
        raise record.error("reset after the last request has no effect: leave this line out")


def read_reset(record: Record, times: Timetable) -> Reset:
    """Return the reset of a line with ``reset`` and, optionally, ``timestamp``."""
    mode = record.fields["reset"]
    if mode not in RESETS:
        raise record.error(f"reset must be {' or '.join(RESETS)}, not {shown(mode)}")
    if others := sorted(record.fields.keys() - {"reset", "timestamp"}):
        raise record.error(f"a line with reset may also have a timestamp, but not {others[0]:.40}: put that on a line of its own")
    at_s = times.timestamp_s(record)
    return Reset(str(mode), nan if at_s is None else at_s)
