"""Shortest prefill first: SGLang's ``shortest-prefill-first`` (managers/schedule_policy.py)."""

from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.scheduling.prefixes import PrefixScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ShortestPrefill(PrefixScheduling):
    """Short prefills first, whatever the prompt's length: ``shortest_prompt`` that knows the cache.

    order             fewest tokens that are neither on the GPU nor, after these, in the CPU tier first; duplicates after all
                      others; of equals, the one that began to wait first
    after retraction  by the same order, the answer so far included

    A duplicate shares a prefix with a request before it, and has little cached: the other one computes it for both. SGLang also
    shortens the chunk of a long prefill under way for shorter requests that wait; here, chunks stay as they are.
    """

    @property
    def goes_by_entry(self) -> bool:
        return True

    def amount(self, waiting: Waiting, cached_tokens: int, is_duplicate: bool) -> int:
        return max(1, waiting.target_tokens - cached_tokens)
