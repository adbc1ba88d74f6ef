"""How many engines of a cluster there were over time, where a policy decides it."""

from dataclasses import dataclass, field
from typing import Final

OFF: Final = "off"
STARTING: Final = "starting"
UP: Final = "up"
DRAINING: Final = "draining"
"""What an engine is: not there; loading the model; serving; without new requests, until those that it has are answered."""


@dataclass(slots=True, kw_only=True)
class Scaling:
    """When engines were started and stopped. An engine is there, and paid for, while it starts, is up or drains."""

    engines: int
    """Most engines."""
    start_s: float
    """Seconds that an engine takes to start."""
    changes: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(time, engines up, starting, draining) after each change; the first one is the start of the run."""
    starts: int = 0
    stops: int = 0

    def note(self, now: float, up: int, starting: int, draining: int) -> None:
        """Take note of the engines that are there from now on."""
        if self.changes and self.changes[-1][0] == now:
            self.changes.pop()
        self.changes.append((now, up, starting, draining))

    def engine_s(self, until_s: float) -> float:
        """Return for how many seconds engines were there until then, added up."""
        total_s = 0.0
        for at, (time_s, up, starting, draining) in enumerate(self.changes):
            end_s = min(self.changes[at + 1][0], until_s) if at + 1 < len(self.changes) else until_s
            total_s += (up + starting + draining) * max(0.0, end_s - time_s)
        return total_s
