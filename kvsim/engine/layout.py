"""Which engines there are, and what they share."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The engines of a run, numbered from 0, with the number of the host and of the disk that each uses."""

    hosts: tuple[int, ...] = (0,)
    disks: tuple[int, ...] = (0,)
    prefill_engines: int = 0
    """How many engines, the first ones, only compute prompts; the others only decode. 0: every engine does both."""

    @property
    def engines(self) -> int:
        return len(self.hosts)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs (prefill engine, decode engine) between which pages move; none if every engine does both."""
        first = self.prefill_engines
        return [(sender, receiver) for sender in range(first) for receiver in range(first, self.engines)]

    def role(self, engine: int) -> str:
        """Return what an engine does: ``both``, ``prefill`` or ``decode``."""
        if not self.prefill_engines:
            return "both"
        return "prefill" if engine < self.prefill_engines else "decode"


ONE_ENGINE = Layout()
