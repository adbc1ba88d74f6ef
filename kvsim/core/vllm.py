"""vLLM's rules: its GPU block pool, and its CPU offloading tier below it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.block_pool import BlockPool, HeldBlocks
from kvsim.core.offload import OffloadCounts, OffloadTier
from kvsim.core.pages import split_runs
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier

OWN = "or say rules=default, kvsim's own rules for the same policies"


@dataclass(frozen=True, kw_only=True)
class VLLMRules(Rules):
    """As vLLM 0.33 plays a sequence of requests, request by request.

    gpu   pages are found from admission on; recency is that of the request that finished last; a page computed twice is
          there twice; pages without a key (partial tail, answer) are reused first
    cpu   pages are offered by every request and stored one by one, whatever the GPU has of them (``OffloadTier``)
    """

    has_own_cache: ClassVar[bool] = True

    def check(self, command: str, tiers: Sequence[str]) -> None:
        if command != "replay":
            raise ValueError(f"vLLM's rules have no clock: say kvsim replay instead of kvsim {command}, {OWN}")
        if "disk" in tiers:
            raise ValueError(f"vLLM's rules have no disk tier: set tiers.disk.capacity=0, {OWN}")
        if self.cache_output:
            raise ValueError(f"cache_output is not for vLLM's rules, which cache prompts: say rules.cache_output=false, {OWN}")

    def serving_cache(self, tiers: list[Tier], page_tokens: int) -> "VLLMCache":
        return VLLMCache(tiers, self, page_tokens)


class VLLMCache:
    """Serves requests from a GPU block pool and, if there is a second tier, from CPU memory."""

    def __init__(self, tiers: list[Tier], rules: Rules, page_tokens: int) -> None:
        self.tiers = tiers
        self.page_tokens = page_tokens
        self.pool = BlockPool(tiers[0], len(tiers))
        self.tree = self.pool.tree
        self.counts = OffloadCounts()
        self.offload = OffloadTier(tiers[1], self.counts) if len(tiers) > 1 else None
        self._recompute_last_token = rules.recompute_last_token

    def serve(self, request: Request, pages: int, now: float) -> HeldBlocks | None:
        """Match, admit with room for ``pages`` pages in all, load, store. None, and nothing changed but a cut, without room."""
        runs, usable = request.runs, request.prompt_pages
        if self._recompute_last_token and (most := (request.prompt_tokens - 1) // self.page_tokens) < usable:
            usable = most
            runs = split_runs(runs, usable)[0]
        path, rest = self.pool.match(runs)
        hit_pages = path[-1].depth + path[-1].pages if path else 0
        if runs is not request.runs:
            rest = split_runs(request.runs, hit_pages)[1]
        held = self.pool.admit(request, path, rest, pages, now)
        if held is None:
            return None
        if self.offload is None:
            held.hits = hit_pages, 0, 0
        else:
            held.offload = use = self.offload.use(request.runs, hit_pages, usable)
            held.hits = hit_pages, use.loaded_pages, 0
        return held

    def finish_request(self, held: HeldBlocks) -> None:
        """The request has its answer: what it used becomes the most recent."""
        self.pool.finish(held)
        if self.offload is not None:
            self.offload.finish(held.offload)
