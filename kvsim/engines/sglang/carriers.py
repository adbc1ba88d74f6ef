"""What is under way between GPU, host and storage in SGLang's unified cache."""

from collections.abc import Sequence
from typing import Final

from kvsim.core.pool import UNLIMITED
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.tree import Carrier

UNTIL_LANDED: Final = UNLIMITED
"""Instead of a number of steps: copies and loads are acknowledged when they have landed."""


class Copying(Carrier):
    """A node that is being copied to the host, in as many parts as it has been cut into since."""


class Loading(Carrier):
    """Nodes that are being loaded to the GPU, from the top down."""


class Storing(Carrier):
    """A node whose host copy has to stay for now, in as many parts as it has been cut into since."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Landing:
    """What is told that a transfer has ended."""

    def __init__(self) -> None:
        self.is_done = False
        """Whether all that belongs together has been moved, so that the next pass has something to acknowledge."""

    def landed(self, pages: int) -> list[Transfer]:
        """Take note that so many pages have arrived. Returns the transfers that follow."""
        raise NotImplementedError


class Batch(Landing):
    """Copies, or loads, that begin together and are acknowledged together, in the step ``due_step`` at the earliest."""

    def __init__(self, carriers: Sequence[Carrier], due_step: int) -> None:
        super().__init__()
        self.carriers = carriers
        self.due_step = due_step

    @property
    def pages(self) -> int:
        """Pages that are moved."""
        return sum([node.pages for carrier in self.carriers for node in carrier.nodes])

    def land(self) -> None:
        """Let it be acknowledged in the next step."""
        self.due_step, self.is_done = 0, True

    def landed(self, pages: int) -> list[Transfer]:
        self.land()
        return NO_TRANSFERS
