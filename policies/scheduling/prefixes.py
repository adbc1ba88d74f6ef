"""What policies that look at shared prefixes have in common: in-batch prefix caching, as in SGLang
(managers/schedule_policy.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.queue_view import Round, Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Whole, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.fields import keep_types
from kvsim.policies.scheduling.base import BoundedScheduling
from kvsim.policies.scheduling.branches import Branch

CHOICES = ("last", "equal")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class PrefixScheduling(BoundedScheduling):
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

    def duplicates(self, round: Round) -> set[Waiting]:
        """Return the requests to try last, because another one computes what they share."""
        found = set[Waiting]()
        if self.in_batch_duplicates == "equal":
            return found
        prompts = Branch(0, 0)
        for one in round.waiting:
            if round.gpu_tokens(one) <= self.check_up_to_tokens:
                extents = one.request.runs
                if prompts.shared_pages(extents) * self._page_tokens >= self.shared_tokens:
                    found.add(one)
                else:
                    prompts.add(extents)
        return found


keep_types(PrefixScheduling, fcfs_above=int | None)
