"""The rules of FastDeploy's prefix cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsim.core.fan_out import AT_ONCE, FanOut
from kvsim.core.request import Request
from kvsim.core.rules import OWN, CacheSetup, Rules
from kvsim.core.tier import DISK, GPU, Edge
from kvsim.engines.fastdeploy.stepped import SteppedSwaps
from kvsim.engines.fastdeploy.swapping import SwappingCache


@dataclass(frozen=True, kw_only=True)
class FastDeployRules(Rules):
    """The rules of FastDeploy's scheduler V1 and prefix cache (April 2026), request by request: ``SwappingCache`` in a replay,
    ``SteppedSwaps`` in time, with kvsim's own schedule. ``kvsim validate`` uses kvsim's own rules with the same settings.
    """

    engine: ClassVar[str] = "FastDeploy"
    fixed_settings: ClassVar[Sequence[str]] = ("cache_chunks",)
    knows_images: ClassVar[bool] = True
    knows_resets: ClassVar[bool] = True
    knows_persistent: ClassVar[bool] = True
    samples: ClassVar[FanOut | None] = AT_ONCE
    covered_tiers: ClassVar[Sequence[str]] = ("gpu", "cpu", "disk")

    def covers(self, command: str, tiers: Sequence[str]) -> bool:
        return command != "validate" and super().covers(command, tiers)

    def check_requests(
        self, requests: Sequence[Request], pages: Sequence[int], capacities: Mapping[str, int | None], page_tokens: int
    ) -> None:
        cpu_pages = capacities.get("cpu")
        if cpu_pages is None:
            return
        gpu_pages = capacities["gpu"]
        prompts = [
            min(taken, request.pages_for(request.prompt_tokens, page_tokens))
            for request, taken in zip(requests, pages, strict=True)
            if gpu_pages is None or taken <= gpu_pages
        ]
        longest = max(prompts, default=0)
        if longest > cpu_pages:
            raise ValueError(
                f"FastDeploy loses slots if a prompt has more pages than CPU memory: the longest has {longest:,}, and "
                f"tiers.cpu.capacity is {cpu_pages:,}; increase it, set it to 0, {OWN}"
            )

    def server(self, setup: CacheSetup) -> SwappingCache:
        return SwappingCache(self.cache(setup))

    def cache(self, setup: CacheSetup) -> SteppedSwaps:
        if sum([tier.level == GPU for tier in setup.tiers]) > 1:
            raise ValueError(
                "engines of FastDeploy share no tier here: set tiers.cpu.scope=engine and, with a disk tier, "
                f"cluster.engines_per_host=1, {OWN}"
            )
        for tier in setup.tiers:
            if tier.level != DISK and not tier.eviction.orders_by_last_use():
                kind = type(tier.eviction).__name__
                raise ValueError(f"FastDeploy evicts what was used least recently, not by {kind}: set eviction=lru, {OWN}")
        for edge in setup.edges:
            if edge.lower.level == DISK:
                _check_storage(edge)
            elif edge.keeps_loaded() or edge.copies_after_use or edge.watermark():
                kind = type(edge.placement).__name__
                raise ValueError(f"FastDeploy swaps pages, which {kind} does not: set placement=exclusive, {OWN}")
        return SteppedSwaps(
            setup.tiers,
            setup.edges,
            setup.page_tokens,
            recompute_last_token=self.recompute_last_token,
            cache_output=bool(self.cache_output),
        )


def _check_storage(edge: Edge) -> None:
    """Raise ValueError unless the disk tier is directly below the GPU and its placement policy copies node by node."""
    if edge.upper.level != GPU:
        raise ValueError(f"FastDeploy's storage is beside CPU memory, not below it: set tiers.disk.below=gpu, {OWN}")
    if not (edge.copies_nodes and edge.keeps_loaded()) or edge.wants_requests or edge.watermark():
        kind = type(edge.placement).__name__
        raise ValueError(
            f"FastDeploy copies the pages of finished requests to storage, which {kind} does not: "
            f"set placement@tiers.disk.placement=write_through, {OWN}"
        )
