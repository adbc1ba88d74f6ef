"""How engines tell of their caches: a row for each."""

from typing import NamedTuple

from kvsim.core.tier import Tier
from kvsim.kv_events.hashes import SGLANG, VLLM, BlockHashing


class Teller(NamedTuple):
    """What an engine puts in its events, and when it joins what belongs together."""

    dialect: str
    """The encoding that it writes now, a name of ``DIALECTS``."""
    hashing: BlockHashing
    media: tuple[str, ...]
    """What it calls the tiers, by their levels; the last stands for all below."""
    group_idx: int | None = None
    """The group of layers that its blocks belong to."""
    spec_kind: str | None = None
    has_extra_keys: bool = False
    """Whether the cache salt is among a block's extra keys; else the event has it."""
    removes_singly: bool = False
    """Whether each block removed from the GPU is an event, the last of a path first; else those that are removed one after
    another are joined."""
    offloads_blindly: bool = False
    """Whether blocks below the GPU are told one by one, and without tokens and parents unless ``self_describing``."""
    reports_hits: bool = False
    """Whether a request can ask for its hits to be told."""

    def medium(self, tier: Tier) -> str:
        """Return what it calls a tier."""
        return self.media[min(tier.level, len(self.media) - 1)]


TELLERS = {
    "vllm": Teller(
        "vllm",
        VLLM,
        ("GPU", "CPU", "STORAGE"),
        group_idx=0,
        spec_kind="full_attention",
        has_extra_keys=True,
        removes_singly=True,
        offloads_blindly=True,
        reports_hits=True,
    ),
    "sglang": Teller("sglang", SGLANG, ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")),
}
