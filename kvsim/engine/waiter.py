"""What waits for an event."""

from typing import Any


class Waiter:
    """Is called when an event happens, like any other entry of the event's ``callbacks``, but at less cost."""

    __slots__ = ()

    def __call__(self, event: Any) -> None:
        self.happened(event)

    def happened(self, event: Any) -> None:
        """Do what is due, since the event has happened."""
        raise NotImplementedError
