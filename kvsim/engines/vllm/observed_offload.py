"""vLLM's CPU offloading tier for requests that overlap as they did in a real run: step by step, but without a clock."""

from collections.abc import Sequence
from typing import NamedTuple

from kvsim.core.request import Request
from kvsim.engines.vllm.offload import Found, OffloadTier
from kvsim.engines.vllm.versions import Version
from kvsim.pages.extents import Extent, count_pages, split_extents
from kvsim.policies.eviction.offload_order import OffloadUse


class Ending(NamedTuple):
    """A copy that is under way, and the step before which its end takes effect."""

    step: int
    loads: Request | None
    """The request that loads; None: it is a store."""
    chunks: Sequence[Extent]


class ObservedOffload:
    """What requests load, and offer chunk by chunk of their prompts. A copy is short: it ends within a step.

    A store begins at the end of the step that computes what it reads; a load does so, too, or with the pass that decides it. The
    end is seen when a later step is launched, and takes effect with that step's results, which with the overlap loop come one
    step later. Where steps have not been seen, copies end with the pass that decides them.
    """

    def __init__(self, tier: OffloadTier, version: Version, page_tokens: int, *, is_ahead: bool) -> None:
        self.tier = tier
        self._version = version
        self._page_tokens = page_tokens
        self._store_steps = 5 if is_ahead else 3
        self._load_steps = self._store_steps if version.loads_follow_steps else 3 if is_ahead else 2
        self._steps = 0
        self._found: dict[Request, Found] = {}
        """What requests have found in this pass."""
        self._endings: list[Ending] = []
        self._offers: dict[Request, int] = {}
        """Tokens up to which the step that is being formed computes requests."""
        self._uses: dict[Request, OffloadUse] = {}
        self._next: dict[Request, int] = {}
        """By request, the position in its path of the first chunk of its next offer."""

    def end_pass(self, *, is_step: bool) -> None:
        """Offer what the step computes that has been formed. ``is_step``: whether steps are seen."""
        offers, self._offers = self._offers, {}
        for request, tokens in offers.items():
            self._offer(request, tokens)
        self._found.clear()
        self._steps += 1
        ended = [ending for ending in self._endings if ending.step <= self._steps or not is_step]
        self._endings = [ending for ending in self._endings if ending not in ended]
        for ending in ended:
            self._end(ending)

    def _end(self, ending: Ending) -> None:
        (self.tier.end_store if ending.loads is None else self.tier.end_load)(list(ending.chunks))

    def _begin(self, chunks: Sequence[Extent], loads: Request | None) -> None:
        steps = self._store_steps if loads is None else self._load_steps
        self._endings.append(Ending(self._steps + steps, loads, chunks))

    # --- requests ------------------------------------------------------------------------------------------------------------

    def look_up(self, request: Request, path: tuple[Extent, ...], hit_pages: int) -> Found:
        """Look up a request by the pages of its known tokens, once in a pass, behind its hit on the GPU."""
        found = self._found.get(request)
        if found is None:
            found = self._found[request] = self.tier.look_up(path, hit_pages)
            self.tier.order.look_up(path)
        return found

    def load(self, request: Request, chunks: list[Extent], hit_pages: int) -> int:
        """Load what an admitted request has found behind its hit on the GPU. Returns the pages."""
        use = self._uses.get(request) or self._uses.setdefault(request, OffloadUse(request.runs))
        pages = count_pages(chunks)
        if self._version.restarts_offers:
            self._next[request] = 0
        if pages:
            self._next[request] = hit_pages + pages
            self.tier.begin_load(use, chunks, hit_pages)
            self.tier.counts.loaded_pages += pages
            self._begin(chunks, request)
        return pages

    def is_loading(self, request: Request) -> bool:
        """Whether a request's load is under way."""
        return any(ending.loads is request for ending in self._endings)

    def compute(self, request: Request, tokens: int) -> None:
        """Take note that the step computes a request up to its first ``tokens`` tokens."""
        self._offers[request] = tokens

    def _offer(self, request: Request, tokens: int) -> None:
        """Offer the pages among a request's first ``tokens`` tokens, those of its prompt."""
        first, use = self._next.get(request, 0), self._uses[request]
        last = min(tokens, request.prompt_tokens) // self._page_tokens
        stored = self.tier.offer(use, first, last, split_extents(use.path, request.prompt_pages)[0]) if last > first else []
        if stored is not None:
            self._next[request] = last
        if stored:
            self._begin([run for run, _ in stored], None)

    def finish(self, request: Request) -> None:
        """End a request whose answer is complete."""
        tokens = self._offers.pop(request, 0)
        if tokens or self._version.offers_at_end:
            self._offer(request, request.prompt_tokens if self._version.offers_at_end else tokens)
        self._next.pop(request, None)
        self.tier.finish(self._uses.pop(request))
