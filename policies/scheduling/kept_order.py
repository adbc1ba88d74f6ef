"""Orders that are kept up to date: for policies that would otherwise sort all waiting requests anew in each round."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence

from kvsim.core.queue_view import LookUps, Round, Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.scheduling.base import BoundedScheduling


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptOrder(metaclass=ABCMeta):
    """The order of one engine's waiting requests, from round to round. Each call should cost little, however many wait."""

    @abstractmethod
    def add(self, waiting: Waiting) -> None:
        """Add a request that begins to wait: it is tried after all others until the next ``update``."""

    @abstractmethod
    def remove(self, waiting: Waiting) -> None:
        """Take out a request that waits no more; the order of the others stays."""

    @abstractmethod
    def update(self, changed: Sequence[Waiting], look_ups: LookUps) -> None:
        """Bring the order up to date at the beginning of a round of admission.

        ``changed`` are, in any order, all new requests, and those of which the cache may have more or less than before.
        """

    @abstractmethod
    def first(self) -> Waiting | None:
        """Return the request to try first; one waits. None, if the policy ``may_hold``: nobody is to be admitted now."""

    @abstractmethod
    def in_order(self) -> list[Waiting]:
        """Return all requests in their order."""


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptScheduling(BoundedScheduling, metaclass=ABCMeta):
    """A policy whose order is kept up to date: it defines ``kept_order`` in place of ``order``."""

    @abstractmethod
    def kept_order(self) -> KeptOrder:
        """Return the order of an engine where nothing waits yet."""

    def order(self, round: Round) -> Sequence[Waiting]:
        kept = self.kept_order()
        for one in round.waiting:
            kept.add(one)
        kept.update(round.waiting, round.look_ups)
        return kept.in_order()
