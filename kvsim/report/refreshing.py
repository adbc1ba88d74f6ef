"""What a page says while what it shows still runs: when the browser loads it again, how far that is, and when it is overdue."""

from datetime import datetime
from typing import NamedTuple


class Refreshing(NamedTuple):
    """A page that will be replaced."""

    at_s: float
    """When it was made, in Unix time."""
    every_s: float
    """Seconds to the next one."""
    patience_s: float
    """Seconds after which the page says that nothing new has come."""
    overdue: str
    """What it says then."""
    progress: str = ""
    """How far the work is."""
    ended: int = 0
    """Parts of the work that have ended, of ``parts``; drawn as a bar if their number is known."""
    parts: int | None = None

    @property
    def seconds(self) -> int:
        """After how many whole seconds the browser loads the page again."""
        return max(1, round(self.every_s))

    @property
    def patience_ms(self) -> int:
        return round(1000 * self.patience_s)

    @property
    def made(self) -> str:
        return clock_time(self.at_s)


def clock_time(at_s: float) -> str:
    """Format a moment in Unix time as clocks show it here."""
    return datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M:%S")
