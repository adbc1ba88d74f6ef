"""The duration of steps that check drafts, which have to be made first."""

from kvsim.engine.speculation import Speculation
from kvsim.engine.substrate import Work
from kvsim.substrate.simulated.compute import Steps


class DraftedSteps(Steps):
    """Adds the time of the drafts: their tokens come one after another, each for all decoding requests of the step."""

    def __init__(self, steps: Steps, speculation: Speculation) -> None:
        self._steps = steps
        self._share = speculation.tokens * speculation.draft_cost
        """Time of a draft, as a share of a decode step's."""

    def leap_s(self, work: Work, steps: int) -> float:
        seconds = self._steps.leap_s(work, steps)
        if not work.decode_requests or not self._share:
            return seconds
        plain = Work(
            decode_requests=work.decode_requests,
            decode_context_tokens=work.decode_context_tokens,
            repeated_context_tokens=work.repeated_context_tokens,
            decode_step=work.decode_step,
            engine=work.engine,
        )
        return seconds + self._share * self._steps.leap_s(plain, steps)
