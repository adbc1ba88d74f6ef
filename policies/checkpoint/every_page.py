"""A checkpoint after every page: the baseline that Marconi calls vLLM+ (Pan et al., MLSys 2025, section 5.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class EveryPage(CheckpointPolicy):
    """Reuses everything that the KV allows, as long as all these states fit; most are never used.

    prompt   after every page that is computed
    answer   after every page
    """

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return range(prefill.start + 1, prefill.full + 1)

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        return range(prompt_pages + 1, pages + 1)
