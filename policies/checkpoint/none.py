"""No checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.policies.checkpoint.base import CheckpointPolicy


@dataclass(kw_only=True, eq=False)
class NoCheckpoint(CheckpointPolicy):
    """Saves nothing: right for models whose layers are all attention, where the KV cache alone is enough.

    any prompt   no state
    """

    def save_after(self, request: Request, reused_pages: int) -> Sequence[int]:
        return ()
