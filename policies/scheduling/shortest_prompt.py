"""Shortest job first, by the part of its length that is known on arrival."""

from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.scheduling.base import BoundedScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class ShortestPrompt(BoundedScheduling):
    """Short prompts first: the least mean waiting time, if prefill is what requests wait for and little is cached.

    order             fewest prompt tokens first, cached or not; of equals, by arrival
    after retraction  by the tokens of the prompt and of the answer so far, which are computed again
    """

    def rank(self, waiting: Waiting) -> float:
        return waiting.target_tokens
