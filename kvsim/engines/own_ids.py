"""Page ids for answers that a trace does not tell, where an engine keeps them all the same."""

from typing import Final

from kvsim.core.request import Request

STRIDE: Final = 1 << 32
"""Distance between the ids of two requests. No trace has as many tokens in all answers to a prompt."""


def own_ids(request: Request) -> int:
    """Return the first of the page ids that only the answer of this request, or of this sample, has; they are below 0."""
    return request.sample * (request.output_tokens + 1) - STRIDE * (1 + request.index)
