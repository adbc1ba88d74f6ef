"""PRISM's query-aware scheduling, as far as it is public (Qu et al.: PRISM: Fast online LLM serving via scheduling-memory
co-design, 2026, arXiv:2605.08581)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.queue_view import Round, Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Whole, check_settings
from kvsim.pages.extent_counts import PageCounts
from kvsim.pages.extents import split_extents
from kvsim.policies.context import PolicyContext
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.base import BoundedScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Prism(BoundedScheduling):
    """Computes first what costs each waiting request least: pages that several wait for are shared out among them.

    share                      sum of page_tokens / (waiting requests whose prompts contain the page) over the pages that are
                               neither on the GPU nor, after these, in the tier below it; tokens after the last full page, and
                               those of an answer before a retraction, count whole
    order                      least share first; of equals, in the order of the last round, new requests at the end
    more than fcfs_above wait  the order stays as it is, new requests at the end

    The paper aligns who is admitted with what is kept: ``eviction=prism`` keeps what waiting requests ask for. What is public of
    it (the abstract) names a scheduler that knows the queue and the cache, and hot segments, but no formula: this one is chosen
    here. It is Smith's rule for the mean time to first token, shortest work first, where work that serves several is split
    evenly. If all prompts differ, it is ``shortest_prefill``.
    """

    fcfs_above: int | None = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(), "fcfs_above", or_null=True, hint="null sets no limit")

    def bind(self, context: PolicyContext) -> None:
        self._page_tokens = context.page_tokens

    def order(self, round: Round) -> Sequence[Waiting]:
        demand = PageCounts()
        for waiting in round.waiting:
            demand.add(waiting.request.runs)
        shares = {waiting: self._share(waiting, round.cached_tokens(waiting), demand) for waiting in round.waiting}
        return sorted(round.waiting, key=shares.__getitem__)

    def _share(self, waiting: Waiting, cached_tokens: int, demand: PageCounts) -> float:
        """Return the tokens to compute for a request, each divided by how many wait for it, to a millionth of a token."""
        request, page_tokens = waiting.request, self._page_tokens
        cached = cached_tokens // page_tokens
        full = max(cached, request.prompt_tokens // page_tokens)
        missing = split_extents(split_extents(request.runs, full)[0], cached)[1]
        return round(demand.shares(missing) * page_tokens + waiting.target_tokens - full * page_tokens, 6)


keep_types(Prism, fcfs_above=int | None)
