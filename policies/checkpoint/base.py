"""The contract of checkpoint policies: after which pages a recurrent state is saved."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvsim.core.request import Request


class CheckpointPolicy(ABC):
    """Says where the recurrent state of a hybrid model is saved. Models without recurrent layers take ``none`` only."""

    @abstractmethod
    def save_after(self, request: Request, reused_pages: int) -> Sequence[int]:
        """Numbers of prompt pages, ascending, after which a state is saved; the first ``reused_pages`` are not computed."""
