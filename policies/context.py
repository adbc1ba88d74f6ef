"""What a policy may know about its run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.requests import values_of
from kvsim.core.tier import GPU
from kvsim.hardware.tier_kinds import kind_of

if TYPE_CHECKING:
    from kvsim.core.request import Request
    from kvsim.hardware.spec import HardwareSpec
    from kvsim.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """Passed to ``bind`` before a run."""

    tier: int = 0
    """Index of the policy's tier: position in a node's ``state``, ``pins`` and ``children_in``, from the top for one engine."""
    level: int = -1
    """The tier's kind, by its place in ``kvsim/hardware/tier_kinds.py``; -1: equal to its position."""
    upper_tier: int = -1
    """Position of the tier above, like ``tier``; -1: the one before it."""
    upper_level: int = -1
    """That of the tier above; -1: one level above this tier."""
    tier_name: str = "gpu"
    lower_tier_name: str | None = None
    """The tier below, from which evicted pages may be loaded again; None if there is none."""
    capacity_pages: int | None = None
    """Capacity of the policy's tier; None if unlimited."""
    capacities: "Sequence[int | None]" = ()
    """Capacities of the tiers that an engine uses, top to bottom, in pages; None if unlimited."""
    position: int = -1
    """Position of the policy's tier among ``capacities``; -1: equal to ``tier``."""
    page_tokens: int = 16
    states_apart: bool = False
    """Whether recurrent states have their own memory, separate from the pages'."""
    model: "ModelSpec | None" = None
    hardware: "HardwareSpec | None" = None
    requests: "Sequence[Request]" = ()
    """All requests of the run. A deployable policy uses them only to check that the trace has what it needs (``require``)."""
    empty_cache: Callable[[Any], Any] | None = None
    """Returns an empty cache of kvsim's own with the given tier as its only one, for policies that try settings out."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Seeded; the policy's only source of randomness."""

    def __post_init__(self) -> None:
        if self.level < 0:
            object.__setattr__(self, "level", self.tier)
        if self.position < 0:
            object.__setattr__(self, "position", self.tier)
        if self.upper_tier < 0:
            object.__setattr__(self, "upper_tier", self.tier - 1)
        if self.upper_level < 0:
            object.__setattr__(self, "upper_level", self.level - 1)

    def saved_flops(self, start_tokens: int, tokens: int) -> float:
        """Return the FLOPs saved if tokens ``start_tokens ... tokens - 1`` of a prompt are cached, besides all tokens before."""
        if self.model is None:
            raise ValueError("needs a model")
        return self.model.prefill_flops(tokens, 0) - self.model.prefill_flops(start_tokens, 0)

    def recompute_s(self, start_tokens: int, tokens: int) -> float:
        """Return the seconds to recompute tokens ``start_tokens ... tokens - 1`` of a prompt, with all tokens before cached."""
        if self.hardware is None:
            raise ValueError("needs a machine")
        return self.saved_flops(start_tokens, tokens) / self.hardware.effective_flops_per_s

    def reload_s(self, tokens: int) -> float:
        """Return the seconds to bring back ``tokens`` evicted tokens: from the tier below or, without one, by computing them.

        From a disk directly below the GPU, the slower of disk and host link sets the rate.
        """
        if self.lower_tier_name is None:
            return self.recompute_s(0, tokens)
        if self.model is None or self.hardware is None:
            raise ValueError("needs a model and a machine")
        rate = self.hardware.total_host_to_device_bytes_per_s / self.model.kv_copies(self.hardware.attention_gpus)
        if kind_of(self.lower_tier_name).is_far:
            read, _ = self.hardware.read_link(self.lower_tier_name, self.model.page_bytes(self.page_tokens))
            rate = min(rate, read) if self.level == GPU else read
        return tokens * self.model.kv_bytes_per_token / rate

    def require(self, attribute: str, meaning: str) -> None:
        """Raise ValueError if ``attribute`` has its default value in every request of the trace."""
        unsaid = type(self.requests[0]).__dataclass_fields__[attribute].default if self.requests else None
        if self.requests and all(value == unsaid for value in values_of(self.requests, attribute)):
            raise ValueError(f"needs {meaning}, which this trace does not have: choose another trace or policy")

    def host_load_s(self, pages: int) -> float:
        """Return the seconds to load ``pages`` pages from host memory to the GPU over an idle link."""
        assert self.hardware is not None
        return self.hardware.host_latency_s + self._copied_bytes(pages) / self.hardware.total_host_to_device_bytes_per_s

    def host_write_s(self, pages: int) -> float:
        """Return the seconds to write ``pages`` pages from the GPU to host memory over an idle link."""
        assert self.hardware is not None
        return self.hardware.host_latency_s + self._copied_bytes(pages) / self.hardware.total_device_to_host_bytes_per_s

    def _copied_bytes(self, pages: int) -> int:
        """Return what all GPUs of an engine copy for so many pages, where several have the same KV."""
        assert self.model is not None and self.hardware is not None
        return pages * self.model.page_bytes(self.page_tokens) * self.model.kv_copies(self.hardware.attention_gpus)

    def read_s(self, tier: str, pages: int) -> float:
        """Return the seconds to read ``pages`` pages from an idle tier below host memory, such as the disk, to host memory."""
        assert self.model is not None and self.hardware is not None
        page_bytes = self.model.page_bytes(self.page_tokens)
        bytes_per_s, latency_s = self.hardware.read_link(tier, page_bytes)
        return latency_s + pages * page_bytes / bytes_per_s
