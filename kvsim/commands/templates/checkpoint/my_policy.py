"""MyPolicy: name the source of the rule."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.numbers import Whole, check_settings
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class MyPolicy(CheckpointPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    prompt   at the end of the known prefix and after the last full page, if at least min_pages are computed
    answer   nothing
    """

    min_pages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(1), "min_pages")

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return (prefill.known, prefill.full) if prefill.full - prefill.start >= self.min_pages else ()
