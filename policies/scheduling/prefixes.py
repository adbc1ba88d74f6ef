"""What policies that look at shared prefixes have in common: in-batch prefix caching, as in SGLang
(managers/schedule_policy.py)."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.kept_order import KeptOrder, KeptScheduling
from kvsim.policies.scheduling.prefix_order import PrefixOrder

CHOICES = ("last", "equal")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class PrefixScheduling(KeptScheduling):
    """Requests that share a prefix that is not computed yet: the first computes it, the others come last and may hit.

    They are tried in the same round as all others, after them; those that still wait after the step find the prefix.

    A request is a duplicate if at most ``check_up_to_tokens`` of its prompt are on the GPU and it shares at least
    ``shared_tokens`` with a waiting request before it that is no duplicate itself. SGLang compares tokens; here only full pages
    count, which are all that can be reused: 40 shared tokens are 32 with pages of 16 tokens, and none with pages of 64.
    """

    in_batch_duplicates: str = "last"
    check_up_to_tokens: int = 32
    shared_tokens: int = 32
    fcfs_above: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_batch_duplicates not in CHOICES:
            raise ValueError(f"in_batch_duplicates must be one of {', '.join(CHOICES)}, not {self.in_batch_duplicates}")
        check_settings(self, Whole(), "check_up_to_tokens")
        check_settings(self, Whole(1), "shared_tokens")
        check_settings(self, Whole(), "fcfs_above", or_null=True, hint="null sets no limit")
        self._page_tokens = 1

    def bind(self, context: PolicyContext) -> None:
        self._page_tokens = context.page_tokens

    def without_effect(self) -> Sequence[str]:
        return ("check_up_to_tokens", "shared_tokens") if self.in_batch_duplicates == "equal" else ()

    @property
    @abstractmethod
    def goes_by_entry(self) -> bool:
        """Whether equals are tried in the order in which they began to wait, instead of that of the last round."""

    @abstractmethod
    def amount(self, waiting: Waiting, cached_tokens: int, is_duplicate: bool) -> int:
        """Return what decides between requests that are both duplicates or both not: the least is tried first."""

    def kept_order(self) -> KeptOrder:
        finds_duplicates = self.in_batch_duplicates == "last"
        return PrefixOrder(
            self.amount,
            goes_by_entry=self.goes_by_entry,
            shared_pages=-(-self.shared_tokens // self._page_tokens) if finds_duplicates else None,
            check_up_to_tokens=self.check_up_to_tokens,
        )


keep_types(PrefixScheduling, fcfs_above=int | None)
