"""The contract of autoscaling policies: how many engines of a cluster serve."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, nan
from typing import Final, Protocol

from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import MOST_SECONDS, Real, check_settings
from kvsim.policies.autoscaling.context import AutoscalingContext


class ClusterStatus(Protocol):
    """What an autoscaler knows when it is asked: how many engines there are, and what their metrics say.

    An engine starts (its model is being loaded), is up, drains (it gets no more requests and ends those that it has), and stops.
    """

    @property
    def now(self) -> float:
        """The time, in seconds from the start of the run."""

    @property
    def interval_s(self) -> float:
        """Seconds since the last question, or since the start of the run."""

    @property
    def up(self) -> int:
        """Engines that get requests."""

    @property
    def starting(self) -> int:
        """Engines that load the model."""

    @property
    def draining(self) -> int:
        """Engines that stop when their requests have ended."""

    @property
    def least_engines(self) -> int:
        """Fewest engines that may be up or starting."""

    @property
    def most_engines(self) -> int:
        """Most engines that may be up, starting or draining."""

    @property
    def waiting_requests(self) -> int:
        """Requests in the queues of engines that are up, and before the router, now."""

    @property
    def running_requests(self) -> int:
        """Requests that engines that are up have admitted and that have not ended, now."""

    @property
    def kv_use(self) -> float:
        """Share of the KV capacity that requests use, now: the mean of the engines that are up, 0 to 1. 0 if it is unlimited."""

    @property
    def mean_requests(self) -> float:
        """Requests that have arrived and not ended, wherever they are: their mean number over the interval."""

    @property
    def arrived_requests(self) -> int:
        """Requests that have arrived in the interval."""

    @property
    def arrived_tokens(self) -> int:
        """Tokens of their prompts."""

    @property
    def begun_tokens(self) -> int:
        """Tokens of the prompts whose first token was generated in the interval."""

    @property
    def hit_tokens(self) -> int:
        """Those of them that were reused from any tier."""

    @property
    def ended_requests(self) -> int:
        """Requests that were answered in the interval."""

    @property
    def ended_tokens(self) -> int:
        """Tokens of their answers."""

    @property
    def ttft_s(self) -> Sequence[float]:
        """Times to first token of the requests whose first token was generated in the interval, in order of that."""

    @property
    def tpot_s(self) -> Sequence[float]:
        """Mean times per output token after the first, of requests answered in the interval with more than one token."""


SHORTEST_S: Final = 0.001
"""The shortest time between two questions, in seconds."""


@mypyc_attr(allow_interpreted_subclasses=True)
class AutoscalingPolicy(metaclass=ABCMeta):
    """Says how many engines of a cluster should serve. It is asked at regular times, and knows what metrics of servers tell.

    The cluster starts engines, which takes them ``cluster.start_s`` seconds, or stops some: those that start, then those that
    have been up for the shortest time. These get no more requests, and stop when the ones that they have are answered. An
    engine begins with an empty cache.
    """

    @property
    def asked_every_s(self) -> float:
        """Seconds from one question to the next, at least 0.001; infinite: the policy is never asked, and all engines serve."""
        return 15.0

    def bind(self, context: AutoscalingContext) -> None:
        """Called once, before the run. Raises ValueError if something is missing."""

    def without_effect(self) -> Sequence[str]:
        """Return the names of settings that have no effect because of the others: an error if the user gives one."""
        return ()

    @abstractmethod
    def engines(self, status: ClusterStatus) -> int:
        """Return how many engines should be up or starting; below ``least_engines`` and above ``most_engines``, these count.

        Draining engines cannot be kept. While they take up room within ``most_engines``, those that are missing start later.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class RegularAutoscaling(AutoscalingPolicy):
    """A policy with the time between two questions as its setting."""

    interval_s: float = 15.0

    def __post_init__(self) -> None:
        check_settings(self, Real(least=SHORTEST_S, most=MOST_SECONDS), "interval_s")

    @property
    def asked_every_s(self) -> float:
        return self.interval_s


def current(status: ClusterStatus) -> int:
    """Return the engines that are up or starting."""
    return status.up + status.starting


def within(status: ClusterStatus, engines: int) -> int:
    """Return the number that counts for an answer."""
    return min(max(engines, status.least_engines), status.most_engines)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of these values that at least this share of them, above 0, does not exceed; nan without any."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else nan
