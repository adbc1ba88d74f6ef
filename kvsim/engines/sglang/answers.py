"""The pages of a prompt and its answer, as SGLang inserts them when a request finishes."""

from kvsim.core.request import Request
from kvsim.engines.own_ids import own_ids
from kvsim.pages.extents import Extent, append_extent, count_pages, join_extents


def join_answer(request: Request) -> tuple[Extent, ...]:
    """Return the page ids of the prompt and, as far as they are known, of the answer."""
    return join_extents(request.runs, request.output_runs or ())


def pad(path: tuple[Extent, ...], request: Request, pages: int) -> tuple[Extent, ...]:
    """Extend a request's path to ``pages`` pages, by page ids below 0 that no other request has."""
    missing = pages - count_pages(path)
    if missing <= 0:
        return path
    padded = list(path)
    append_extent(padded, own_ids(request), missing)
    return tuple(padded)
