"""Rules in which real engines differ from each other. An engine that differs more deeply has a subclass with its own cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvsim.core.edge import Edge
    from kvsim.core.request import Request
    from kvsim.core.serving import ServingCache
    from kvsim.core.tier import Tier


@dataclass(frozen=True, kw_only=True)
class Rules:
    """kvsim's own rules."""

    has_own_cache: ClassVar[bool] = False
    """Whether these rules belong to one engine and have a cache of their own (``serving_cache``)."""

    has_coarse_pages: ClassVar[bool] = False
    """Whether the CPU tier may have larger pages than the GPU (``tiers.cpu.page_tokens``)."""

    has_bigram_keys: ClassVar[bool] = False
    """Whether an engine's own cache can have keys of token pairs (``trace.bigram``). kvsim's own rules take any keys."""

    recompute_last_token: bool = True
    """The last prompt token is always computed, so a fully cached prompt that ends on a page boundary loses its last page."""

    cache_output: bool = False
    """The answer of a finished request is cached too: the full pages of prompt and answer, without the answer's last token,
    whose KV is never computed. Needs a trace with the tokens of its answers."""

    def for_command(self, command: str, tiers: Sequence[str]) -> "Rules":
        """Return the rules that apply to a command with the tiers of these names.

        An engine's rules may give way to kvsim's own where they do not apply, such as those without a clock.
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

    def serving_cache(self, tiers: "list[Tier]", edges: "list[Edge]", page_tokens: int) -> "ServingCache | None":
        """Return an empty cache that replays requests by these rules if ``has_own_cache``; otherwise None, and a replay uses the
        same cache as ``simulate``."""
        return None
