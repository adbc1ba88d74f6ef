"""Checkpoints as vLLM retains them for hybrid models (docs.vllm.ai, automatic prefix caching of Mamba layers)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.numbers import Whole, check_settings
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class Retention(CheckpointPolicy):
    """Saves the states that a second request is likely to begin from, or one state per interval.

    interval_tokens = 0   where the prompt departs from known paths, and after the last page that the same prompt could reuse
    interval_tokens > 0   after every interval_tokens tokens (rounded down to full pages); after every page if a page is longer
    """

    interval_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(), "interval_tokens", hint="0 keeps states at junctions only")

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        if not self.interval_tokens:
            return prefill.known, prefill.replay
        return self.multiples(self.interval_tokens, prefill.start, prefill.full)

    def after_answer(self, prompt_pages: int, pages: int) -> Sequence[int]:
        return self.multiples(self.interval_tokens, prompt_pages, pages) if self.interval_tokens else ()

    def retention_interval_tokens(self) -> int:
        if self.max_states_per_path is not None or self.detached:
            raise ValueError(
                "vLLM neither limits the states of a path nor detaches any: leave out checkpoint.max_states_per_path and "
                "checkpoint.detached"
            )
        return self.interval_tokens
