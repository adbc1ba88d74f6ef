"""The switches in which real engines differ from one another; what an engine does altogether differently is a subclass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvsim.core.edge import Edge
    from kvsim.core.serving import ServingCache
    from kvsim.core.tier import Tier


@dataclass(frozen=True, kw_only=True)
class Rules:
    """kvsim's own rules."""

    has_own_cache: ClassVar[bool] = False
    """Whether these are an engine's rules, played by a cache of their own (``serving_cache``)."""

    recompute_last_token: bool = True
    """The last prompt token is always computed, so a fully cached, aligned prompt loses its last page."""

    cache_output: bool = False
    """A finished request's answer is cached too: the full pages of prompt and answer without its last token, whose KV is never
    computed. Needs a trace that knows the tokens of its answers."""

    def check(self, command: str, tiers: Sequence[str]) -> None:
        """Raise ValueError if ``command``, or one of the tiers with these names, cannot keep to the rules."""

    def serving_cache(self, tiers: "list[Tier]", edges: "list[Edge]", page_tokens: int) -> "ServingCache | None":
        """An empty cache that replays requests by these rules, if ``has_own_cache``; else None: it is that of ``simulate``."""
        return None
