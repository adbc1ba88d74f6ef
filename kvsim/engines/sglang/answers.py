"""The pages of a prompt and its answer, as SGLang inserts them when a request finishes."""

from kvsim.core.request import Request
from kvsim.pages.extents import Extent, append_extent, count_pages, join_extents

STRIDE = 1 << 32
"""Distance between the page ids generated for two requests. No answer has this many pages."""


def join_answer(request: Request) -> tuple[Extent, ...]:
    """Return the page ids of the prompt and, as far as they are known, of the answer."""
    return join_extents(request.runs, request.output_runs or ())


def pad(path: tuple[Extent, ...], request: Request, pages: int) -> tuple[Extent, ...]:
    """Extend a request's path to ``pages`` pages, by page ids below 0 that no other request has."""
    missing = pages - count_pages(path)
    if missing <= 0:
        return path
    padded = list(path)
    append_extent(padded, -STRIDE * (1 + request.index), missing)
    return tuple(padded)
