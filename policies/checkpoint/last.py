"""Checkpoints where a conversation continues."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class Last(CheckpointPolicy):
    """Suits conversations, whose next prompt begins with this one and its answer. A shared system prompt alone never hits.

    prompt   after the last full page
    answer   after the last full page
    """

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return (prefill.full,)

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        return (pages,)
