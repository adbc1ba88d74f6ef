"""Directives of how long to keep what a request has used, as a line of a trace may have them."""

from itertools import pairwise
from math import inf
from typing import Any

from kvsim.core.request import RetentionRange
from kvsim.numbers import MOST_SECONDS
from kvsim.trace.records import Record, shown

MOST_PRIORITY = 100
"""TensorRT-LLM's scale begins at 0."""


def retention_of(record: Record, prompt_tokens: int) -> tuple[RetentionRange, ...]:
    """Return the directives of ``retention`` and ``decode_retention``; () if both are absent or null.

    ``retention`` is a list of [begin, end, priority, duration_ms] over tokens of the prompt, without overlaps; a null as the end
    means that of the prompt, one as the duration that the priority stays. ``decode_retention`` is [priority, duration_ms] for
    the answer. Names and meaning are those of TensorRT-LLM's KvCacheRetentionConfig. Raises TraceError.
    """
    ranges = [_range(record, item, prompt_tokens) for item in record.items("retention")] if record.has("retention") else []
    ranges.sort()
    for before, after in pairwise(ranges):
        if after.begin < before.end:
            raise record.error(f"retention must not overlap: one begins at token {after.begin}, before {before.end}")
    if record.has("decode_retention"):
        item = record.items("decode_retention")
        if len(item) != 2 or not _is_priority(item[0]) or not _is_duration(item[1]):
            raise record.error(f"decode_retention must be [priority, duration_ms], not {shown(item)}")
        ranges.append(RetentionRange(prompt_tokens, 1 << 60, item[0], _seconds(item[1])))
    return tuple(one for one in ranges if one.begin < one.end)


def _range(record: Record, item: Any, prompt_tokens: int) -> RetentionRange:
    if isinstance(item, list) and len(item) == 4:
        begin, end, priority, duration_ms = item
        is_stretch = type(begin) is int and begin >= 0 and (end is None or type(end) is int and end > begin)
        if is_stretch and _is_priority(priority) and _is_duration(duration_ms):
            last = prompt_tokens if end is None or end > prompt_tokens else end
            return RetentionRange(min(begin, last), last, priority, _seconds(duration_ms))
    raise record.error(
        "retention must be a list of [begin, end, priority, duration_ms] with begin < end and a priority from 0 to "
        f"{MOST_PRIORITY}, not {shown(item)}"
    )


def _is_priority(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_PRIORITY


def _is_duration(value: Any) -> bool:
    return value is None or type(value) in (int, float) and 0 <= value <= 1000 * MOST_SECONDS


def _seconds(duration_ms: float | None) -> float:
    return inf if duration_ms is None else duration_ms / 1000


def fields_of(ranges: tuple[RetentionRange, ...], prompt_tokens: int) -> dict[str, Any]:
    """Return the fields of a line that say the same; none without directives."""
    prompt = [[*one[:3], _milliseconds(one)] for one in ranges if one.begin < prompt_tokens]
    answer = [[one.priority, _milliseconds(one)] for one in ranges if one.begin >= prompt_tokens]
    return {**({"retention": prompt} if prompt else {}), **({"decode_retention": answer[0]} if answer else {})}


def _milliseconds(one: RetentionRange) -> float | None:
    return None if one.duration_s == inf else round(one.duration_s * 1000, 9)
