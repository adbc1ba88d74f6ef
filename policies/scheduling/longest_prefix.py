"""Longest prefix match: SGLang's ``lpm`` (Zheng et al., SGLang, 2024; managers/schedule_policy.py)."""

from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.base import PREFIX
from kvsim.policies.scheduling.prefixes import PrefixScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class LongestPrefix(PrefixScheduling):
    """Uses what is cached before it is evicted.

    order                      most tokens of the prompt on the GPU and, after these, in the CPU tier first; duplicates last; of
                               equals, in the order of the last round, new requests at the end
    after retraction           as a new request: it has usually most of its prompt cached
    more than fcfs_above wait  the order stays as it is, new requests at the end

    A duplicate shares a prefix with a request before it, and has little cached: the other one computes it for both.
    """

    fcfs_above: int | None = 128

    @property
    def goes_by_entry(self) -> bool:
        return False

    def amount(self, waiting: Waiting, cached_tokens: int, is_duplicate: bool) -> int:
        return 0 if is_duplicate else -cached_tokens

    def goes_by(self) -> str:
        return PREFIX


keep_types(LongestPrefix, fcfs_above=int | None)
