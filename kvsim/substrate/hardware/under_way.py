"""A copy that has not ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from simpy import Event


class Carrier(Protocol):
    """Whoever carries an order for a copy."""

    def cancel(self, number: int) -> None:
        """End the copy early."""


@dataclass(eq=False)
class UnderWay:
    """A copy that has not ended: its order, and who carries it."""

    number: int
    carriers: Sequence[Carrier]
    done: Event
    is_state: bool = False
    """Whether a recurrent state is copied."""
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End the copy early."""
        self.is_cancelled = True
        for carrier in self.carriers:
            carrier.cancel(self.number)
