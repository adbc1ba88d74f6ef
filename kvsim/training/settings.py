"""The settings of ``kvsim train``."""

from dataclasses import dataclass
from typing import Final

from kvsim.numbers import Real, Whole, check_settings
from kvsim.suggest import closest

BELADY: Final = "belady"
REUSE: Final = "reuse"
TARGETS: Final = (BELADY, REUSE)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What a model learns, from how much of the trace, and how."""

    target: str = BELADY
    part: float = 0.5
    rounds: int = 6
    decisions: int = 30_000
    candidates: int = 32
    hidden: int = 32
    epochs: int = 10
    learning_rate: float = 0.003

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"target: there is no {self.target!r}{closest(self.target, TARGETS) or '; choose belady or reuse'}")
        check_settings(self, Real(above=0, most=1), "part", hint="it is the share of the requests to train on")
        check_settings(self, Whole(1), "rounds", "hidden", "epochs")
        check_settings(self, Whole(2), "candidates")
        check_settings(self, Whole(100), "decisions", hint="fewer teach nothing")
        if self.rounds > self.decisions:
            raise ValueError(f"rounds={self.rounds} share decisions={self.decisions}: set rounds to at most as many")
        check_settings(self, Real(above=0), "learning_rate")
