"""What a policy may know of the run it serves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvsim.core.request import Request
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
    requests: "Sequence[Request]" = ()
    """All requests of the run. A deployable policy looks at them only to see that the trace has what it needs (``require``)."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Seeded; the only source of chance."""

    def require(self, attribute: str, meaning: str) -> None:
        """Raise ValueError if no request of the trace says anything of its ``attribute``."""
        unsaid = type(self.requests[0]).__dataclass_fields__[attribute].default if self.requests else None
        if self.requests and all(getattr(request, attribute) == unsaid for request in self.requests):
            raise ValueError(f"needs {meaning}, which this trace does not have: choose another trace or policy")
