"""Times of logs: numbers in the unit of the log, or dates in ISO 8601, which are in UTC unless they have an offset."""

import re
from datetime import UTC, datetime, timedelta

from kvsim.numbers import MOST_SECONDS, Real
from kvsim.trace.records import Record, shown

BEGINS_AS_DATE = re.compile(r"[0-9]{4}-")
FRACTION = re.compile(r"(\.[0-9]{6})[0-9]+")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def is_date(record: Record, name: str) -> bool:
    """Whether a field has a date rather than a number."""
    value = record.fields.get(name)
    return isinstance(value, str) and BEGINS_AS_DATE.match(value) is not None


def stamp(record: Record, name: str, unit_s: float) -> float:
    """Return a field that must be a time, in units of ``unit_s`` seconds; that of a date is from 1970. Raises TraceError."""
    if is_date(record, name):
        return date_s(record, name) / unit_s
    return record.number(name, Real(least=0, most=MOST_SECONDS / unit_s))


def date_s(record: Record, name: str) -> float:
    """Return a field that must be a date, as seconds from 1970; digits after the microseconds are left out. Raises TraceError."""
    text = FRACTION.sub(r"\1", str(record.name(name)))
    try:
        if not text.isascii():
            raise ValueError
        date = datetime.fromisoformat(text)
        since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - EPOCH
    except (ValueError, OverflowError):
        raise record.error(f"{name} must be a date such as 2023-11-16 18:15:46.68, not {shown(record.fields[name])}") from None
    return since // timedelta(microseconds=1) / 1_000_000
