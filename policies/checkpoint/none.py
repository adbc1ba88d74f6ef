"""No checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class NoCheckpoint(CheckpointPolicy):
    """Saves no states: a hybrid model then reuses nothing; models without recurrent layers need none.

    every request   no state
    """

    def __post_init__(self) -> None:
        if self.detached or self.max_states_per_path is not None or self.detached_states is not None:
            raise ValueError("none saves no states, so it takes no settings")

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return ()
