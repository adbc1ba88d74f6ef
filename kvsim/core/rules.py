"""Rules in which real engines differ from each other. An engine that differs more deeply has a subclass with its own cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvsim.core.edge import Edge
    from kvsim.core.request import Request
    from kvsim.core.serving import HybridServingCache, ServedCache, ServingCache
    from kvsim.core.tier import Tier
    from kvsim.policies.checkpoint.base import CheckpointPolicy


@dataclass(frozen=True, kw_only=True)
class HybridSettings:
    """What the cache of a model with recurrent layers needs to know about states and prefills."""

    checkpoint: "CheckpointPolicy"
    """Bound already."""
    state_tiers: "list[Tier] | None"
    """Tiers of states only, from the GPU down, whose slots hold one state each; None if states take slots of the page tiers."""
    state_pages: int
    """Slots that a state takes: 1 in tiers of states only."""
    state_bytes: int
    grid_pages: int
    """States exist only after multiples of this number of pages."""
    prefill_chunk_tokens: int
    """Prompt tokens that one step computes, for rules that prefill in chunks; 0: whole prompts."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """kvsim's own rules."""

    engine: ClassVar[str] = ""
    """The engine whose rules these are; empty for kvsim's own."""

    has_own_cache: ClassVar[bool] = False
    """Whether these rules belong to one engine and have a cache of their own (``serving_cache``)."""

    serves_hybrid_models: ClassVar[bool] = False
    """Whether the engine's own cache is for models with recurrent layers (``hybrid_cache``) instead of for others."""

    prefills_in_chunks: ClassVar[bool] = False
    """Whether the engine's own cache depends on the chunks in which a prompt is computed (``replay.prefill_chunk_tokens``)."""

    decides_checkpoints: ClassVar[bool] = False
    """Whether the engine itself decides where states are saved, so that no checkpoint policy is asked."""

    has_coarse_pages: ClassVar[bool] = False
    """Whether the CPU tier may have larger pages than the GPU (``tiers.cpu.page_tokens``)."""

    pauses_after_retraction: ClassVar[bool] = True
    """Whether, after a retraction, no request is admitted until one has finished; otherwise, none is in the same step."""

    schedules_by_priority: ClassVar[bool] = False
    """Whether the engine's schedule, if it has its own, tries waiting requests by arrival or priority and in no other order."""

    has_bigram_keys: ClassVar[bool] = False
    """Whether an engine's own cache can have keys of token pairs (``trace.bigram``). kvsim's own rules take any keys."""

    recompute_last_token: bool = True
    """The last prompt token is always computed, so a fully cached prompt that ends on a page boundary loses its last page."""

    cache_output: bool = False
    """The answer of a finished request is cached too: the full pages of prompt and answer, without the answer's last token,
    whose KV is never computed. Needs a trace with the tokens of its answers."""

    def for_command(self, command: str, tiers: Sequence[str]) -> "Rules":
        """Return the rules that apply to a command with the tiers of these names.

        An engine's rules may give way to kvsim's own where they do not apply, such as those without a clock. Raises ValueError
        for one of their settings that then has no effect.
        """
        return self

    def check(self, command: str, tiers: Sequence[str]) -> None:
        """Raise ValueError if the rules do not support ``command`` or one of the tiers with these names."""

    def check_requests(
        self, requests: "Sequence[Request]", pages: Sequence[int], capacities: Mapping[str, int | None], page_tokens: int
    ) -> None:
        """Raise ValueError if the rules cannot replay these requests, which take ``pages`` pages each while they run.

        ``capacities`` are those of the tiers, by name and in pages; None is unlimited.
        """

    def served_cache(self, tiers: "list[Tier]", edges: "list[Edge]", page_tokens: int) -> "ServedCache | None":
        """Return an empty cache by whose rules a serving engine serves requests; None for kvsim's own cache."""
        return None

    def serving_cache(self, tiers: "list[Tier]", edges: "list[Edge]", page_tokens: int) -> "ServingCache | None":
        """Return an empty cache that replays requests by these rules if ``has_own_cache``; otherwise None, and a replay uses the
        same cache as ``simulate``."""
        return None

    def hybrid_cache(
        self, tiers: "list[Tier]", edges: "list[Edge]", page_tokens: int, hybrid: HybridSettings
    ) -> "HybridServingCache | None":
        """Return an empty cache for a model with recurrent layers if ``serves_hybrid_models``, as ``serving_cache`` does for
        others."""
        return None
