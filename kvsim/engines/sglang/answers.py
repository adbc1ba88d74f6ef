"""The pages of a prompt and its answer, as SGLang inserts them when a request finishes."""

from kvsim.core.request import Request
from kvsim.pages.extents import Run, append_run, count_pages, join_runs

STRIDE = 1 << 32
"""Distance between the page ids generated for two requests. No answer has this many pages."""


def join_answer(request: Request) -> tuple[Run, ...]:
    """Return the page ids of the prompt and, as far as they are known, of the answer."""
    answer = request.output_runs or ()
    return join_runs(request.runs, answer) if request.runs and answer else request.runs or answer


def pad(path: tuple[Run, ...], request: Request, pages: int) -> tuple[Run, ...]:
    """Extend a request's path to ``pages`` pages, by page ids below 0 that no other request has."""
    missing = pages - count_pages(path)
    if missing <= 0:
        return path
    padded = list(path)
    append_run(padded, -STRIDE * (1 + request.index), missing)
    return tuple(padded)
