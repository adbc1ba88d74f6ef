"""What a policy may know of the run it serves."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvsim.hardware import HardwareSpec
    from kvsim.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """Handed to ``bind`` before a run."""

    tier: int = 0
    """Position of the policy's tier, from the top: index into a node's ``copies``, ``pins`` and ``kids``."""
    tier_name: str = "gpu"
    capacity_pages: int | None = None
    """Of the policy's tier; None if unlimited."""
    page_tokens: int = 16
    model: "ModelSpec | None" = None
    hardware: "HardwareSpec | None" = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Seeded; the only source of chance."""
