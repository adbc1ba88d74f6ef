"""The settings of a replay."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.fan_out import TOGETHER, FanOut
from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings

PREFILL_CHUNK_TOKENS = 8192
"""What SGLang and vLLM compute of a prompt in one step on large GPUs."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How requests overlap in a replay, where nothing has a duration, and in what pieces their prompts are computed."""

    in_flight: int = 1
    """Number of unfinished requests at a time: the oldest finishes when one more arrives, or earlier if room is needed."""
    hold_output: bool = True
    """Whether the answer's pages take room until the request finishes."""
    prefill_chunk_tokens: int | None = None
    """Prompt tokens that one step computes, under rules that prefill in chunks; 0: whole prompts, None: 8,192 for a model with
    recurrent layers or by rules for sliding windows, whole prompts for others."""
    copy_steps: int = 0
    """Steps from the beginning of a copy or a load to its acknowledgement, under rules that count steps; 0, as 1: the next step
    acknowledges it."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "in_flight")
        check_settings(self, Whole(), "copy_steps")
        check_settings(self, Whole(), "prefill_chunk_tokens", or_null=True, hint="0 computes whole prompts")

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens that one step computes of a model with recurrent layers, or by rules for sliding windows; 0: whole
        prompts."""
        return PREFILL_CHUNK_TOKENS if self.prefill_chunk_tokens is None else self.prefill_chunk_tokens

    def pages_taken(self, requests: Sequence[Request], page_tokens: int, samples: FanOut = TOGETHER) -> list[int]:
        """Return the pages that each request takes in all while it runs, or one of its samples if these are apart."""
        of_samples = [request.pages_of_sample(page_tokens, hold_output=self.hold_output) for request in requests]
        return [samples.pages(request, pages, page_tokens) for request, pages in zip(requests, of_samples, strict=True)]
