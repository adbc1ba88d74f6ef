"""Files whose objects are runs, with a list by request of each value, as benchmark clients of vLLM and SGLang write them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.results.observed import ObservedRun
from kvsim.servers.results.rows import Row, observed


class Lists(msgspec.Struct):
    """The lists that all of them have; times in seconds."""

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    errors: list[str]


AnyLists = TypeVar("AnyLists", bound=Lists)


def read_lists(
    path: Path,
    documents: Sequence[Mapping[str, Any]],
    requests: Sequence[Request],
    *,
    kind: type[AnyLists],
    row_of: Callable[[AnyLists, int], Row],
    client: str,
    details: str,
) -> list[ObservedRun]:
    """Return the run of each object.

    Raises UsageError for an object without lists, with ``details``, how to get them, and ValidationError for lists of different
    lengths.
    """
    runs = []
    for document in documents:
        if "ttfts" not in document:
            raise UsageError(f"results: {path} has no details of requests: repeat {details}")
        lists = msgspec.convert(document, kind)
        rows = [_row(lists, row_of, number) for number in range(len(lists.input_lens))]
        runs.append(observed(path, client, rows, requests))
    return runs


def _row(lists: AnyLists, row_of: Callable[[AnyLists, int], Row], number: int) -> Row:
    try:
        return row_of(lists, number)
    except IndexError:
        raise msgspec.ValidationError(f"its lists are not of the same length (request {number})") from None
