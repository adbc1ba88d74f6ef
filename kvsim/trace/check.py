"""Checks the requests of a trace that a program has made itself; readers and generators check theirs as they make them."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.numbers import SECONDS, Whole, refusal
from kvsim.pages.extents import Extent, count_pages
from kvsim.trace.base import MAX_TOKENS

PAGES = Whole()


def check_requests(requests: Sequence[Request], max_tokens: int = MAX_TOKENS) -> None:
    """Raise UsageError, naming the request, unless a replay and a simulation of the requests end with a result."""
    if not requests:
        raise UsageError("the trace has no requests: give at least one")
    arrival_s = 0.0
    for index, request in enumerate(requests):
        problem = _problem(request, max_tokens) or _problem_of_place(request, index, arrival_s)
        if problem:
            raise UsageError(f"request {index} of the trace: {problem}")
        arrival_s = request.arrival_s


def _problem(request: Request, max_tokens: int) -> str:
    """Say which number of a request cannot be; empty if all can."""
    tokens = Whole(1, max_tokens)
    if not tokens.holds(request.prompt_tokens):
        return refusal("prompt_tokens", tokens, request.prompt_tokens)
    answers = request.output_tokens * request.samples
    if request.samples < 1 or not Whole(0, max_tokens).holds(answers):
        return refusal("output_tokens, for all samples,", Whole(0, max_tokens), answers)
    for name in ("arrival_s", "delay_s"):
        if not SECONDS.holds(getattr(request, name)):
            return refusal(name, SECONDS, getattr(request, name))
    if not _are_pages(request.runs) or count_pages(request.runs) != request.prompt_pages:
        return f"runs must be of page ids of 0 or more, {request.prompt_pages} in all (prompt_pages)"
    return ""


def _problem_of_place(request: Request, index: int, arrival_s: float) -> str:
    """Say what of a request's place in the trace cannot be, after an arrival at ``arrival_s``; empty if all can."""
    if request.index != index:
        return f"index is {request.index}: requests are numbered in order of arrival"
    if request.arrival_s < arrival_s:
        return f"arrival_s is {request.arrival_s:g}, after {arrival_s:g}: requests must be in order of arrival"
    if request.after >= index:
        return f"after is {request.after}: a request can wait for an earlier one only"
    return _problem_of_joins(request, index) if request.joins else ""


def _problem_of_joins(request: Request, index: int) -> str:
    """Say what of the further requests that a request waits for cannot be; empty if all can."""
    if request.after < 0:
        return "joins are further requests to wait for: set after, too"
    if wrong := [joined for joined in request.joins if not Whole(0, index - 1).holds(joined)]:
        return f"joins has {wrong[0]!r:.40}: a request can wait for earlier ones only"
    if len(set(request.predecessors)) < len(request.predecessors):
        return f"after and joins name a request twice: {', '.join(map(str, request.predecessors))}"
    return ""


def _are_pages(extents: Sequence[Extent]) -> bool:
    return all(PAGES.holds(start) and PAGES.holds(start + pages) and pages > 0 for start, pages in extents)
