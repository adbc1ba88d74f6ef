"""How several answers to one prompt reach an engine."""

from dataclasses import dataclass
from typing import Final

from kvsim.core.request import Request


@dataclass(frozen=True, kw_only=True)
class FanOut:
    """What becomes of a request with several samples. A row of the results stands for all of them.

    kvsim's own    one request, which needs room for all samples; the others begin when the first has computed the prompt
    ``are_apart``  a request for each sample, which need no room together
    ``are_forked`` one request, whose samples share all of its prompt: none computes its last token again (``ServedCache.fork``)
    """

    are_apart: bool = False
    are_forked: bool = False
    has_warm_up: bool = False
    """Whether a request without an answer computes the prompt, and those of the samples come when it has ended."""

    def pages(self, request: Request, pages: int, page_tokens: int) -> int:
        """Return the pages for which there must be room at a time, if each sample takes ``pages``."""
        return pages if self.are_apart or request.samples == 1 else request.pages_with_all(pages, page_tokens)

    def first(self, request: Request) -> list[Request]:
        """Return the requests that it is to an engine when it arrives."""
        if not self.are_apart or request.samples == 1:
            return [request]
        return [request.prompt_only()] if self.has_warm_up else request.apart()

    def then(self, request: Request) -> list[Request]:
        """Return those that follow when these have ended."""
        return request.apart() if self.has_warm_up and request.samples > 1 else []


TOGETHER: Final = FanOut()
AT_ONCE: Final = FanOut(are_apart=True)
FORKED: Final = FanOut(are_forked=True)
AFTER_WARM_UP: Final = FanOut(are_apart=True, has_warm_up=True)
