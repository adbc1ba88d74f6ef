"""The contract of an engine's schedule: which requests a step computes, and what becomes of them at its end."""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from simpy import Event

from kvsim.core.request import Request
from kvsim.core.serving import ServedCache
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.adapters import AdapterSettings
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import Job
from kvsim.engine.mover import Mover
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.speculation import Speculation
from kvsim.engine.substrate import Work
from kvsim.engine.waiting import WaitingRequests
from kvsim.policies.scheduling.base import SchedulingPolicy

LOOPS: Final = ("overlap", "plain")
"""Loops of an engine: a step is formed while the one before it runs, without its results; or after it."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a schedule works with: those of its engine."""

    cache: ServedCache
    gpu: Tier
    mover: Mover
    prefetching: Prefetching
    max_batch_tokens: int
    """Tokens of a step; see ``EngineSettings``."""
    max_running_requests: int
    is_layerwise: bool
    """Whether a layer is computed as soon as its pages have arrived."""
    scheduling: SchedulingPolicy
    number: int
    """Of the engine."""
    wake: Callable[[], None]
    """Makes the engine plan again."""
    woken: Callable[[], Event]
    """Returns the event that happens when the engine is made to plan again."""
    speculation: Speculation = field(default_factory=Speculation)
    lora: AdapterSettings = field(default_factory=AdapterSettings)
    steps_in_flight: int = 1
    """Steps that may be under way at a time, as in a pipeline."""


class Step:
    """A step that is formed, or a leap of several: the work, and the loads that it waits for or follows."""

    __slots__ = ("loads", "work")

    def __init__(self, work: Work, loads: list[Transfer]) -> None:
        self.work = work
        self.loads = loads


PLAN_AGAIN: Final = Step(Work(), [])
"""Instead of a step: time has passed while it was formed, so that it must be formed anew."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Schedule(metaclass=ABCMeta):
    """Forms an engine's steps one after another. It takes and gives back pages; the engine makes time pass.

    form    the next step, whose memory is then taken; time may pass while it is formed
    ended   a step has been made: tokens appear, requests end

    A schedule that looks ahead forms a step as soon as the one before it has begun. That step's ``ended`` comes next, and then
    the step that was formed begins, unless all requests have ended. While a leap runs, this is the step after its first one; at
    the end of the leap, ``ended`` makes it the step after the last one.

    With several steps in flight, one is formed as long as there may be more, from requests whose tokens are not being computed.
    ``ended`` comes for each, in the order in which they began.
    """

    frontend: Frontend
    number: int
    """Of its engine."""
    waiting: WaitingRequests
    """Those that are not admitted."""
    looks_ahead: bool = False
    """Whether a step is formed while the one before it runs."""
    is_draining: bool = False
    """Set by a reset: no request is admitted until all running ones have finished; ``form`` then calls ``drained``."""

    @property
    def blocked(self) -> str:
        """Why the engine's rules let no request go on, and which setting to change; empty if they do."""
        return ""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of requests that hold pages or run."""

    @abstractmethod
    def report_to(self, frontend: Frontend) -> None:
        """Make this the frontend; called before the engine runs."""

    @property
    def claiming_s(self) -> float:
        """Time in which admitted requests waited for slots whose pages were being written down; 0 where that is not told."""
        return 0.0

    @property
    @abstractmethod
    def retractions(self) -> int:
        """How often a request had to give its pages back."""

    @property
    def drafts(self) -> dict[str, int]:
        """What drafts have come to, by name; empty without any."""
        return {}

    @property
    def adapter_use(self) -> dict[str, int]:
        """What LoRA adapters have come to, by name; empty where they cost nothing."""
        return {}

    @property
    @abstractmethod
    def admitted(self) -> int:
        """The number of requests that wait for slots, loads or the rest of their prefill."""

    def generated(self, job: Job) -> int:
        """Return how many tokens of a decoding request's answer there are; those of a leap under way come at its end."""
        return job.generated

    @abstractmethod
    def takes(self, request: Request) -> bool:
        """Whether a request could run here if no other did; otherwise it is rejected."""

    @abstractmethod
    def form(self) -> Any:
        """Form the next step. Returns a ``Step``, ``PLAN_AGAIN``, or None for no step.

        If time has to pass first, returns a generator of the events to wait for, which returns one of these.
        """

    def began(self, step: Step, done: Event) -> None:
        """A step has begun; ``done`` happens at its end. A hook of schedules whose copies follow steps.

        A step without work ends at once.
        """

    @abstractmethod
    def ended(self, step: Step, steps: int) -> None:
        """Record what a step has done; ``steps`` is the number of decode steps in it, 0 if no request decoded."""

    @property
    def awaits_transfers(self) -> bool:
        """Whether ``transfer_ended`` may do something for a transfer that is not to the engine's own GPU; by default always."""
        return True

    @abstractmethod
    def transfer_ended(self, transfer: Transfer) -> bool:
        """Go on with requests that waited for a transfer. Returns whether to plan again."""

    @abstractmethod
    def join(self, job: Job) -> None:
        """Let a request decode whose prompt has come from another engine."""

    @abstractmethod
    def drop(self, job: Job, *, is_up: bool) -> None:
        """Give up a request wherever it is: its pages, its place in the queue and its prefetch.

        On an engine that is up, a step under way that computes it keeps its pages until that step has ended.
        """

    def abort(self, job: Job) -> None:
        """End a request early, since nobody waits for its answer, on an engine that is up: ``ended`` tells the frontend.

        By default it is dropped at once: the cache keeps what it has stored so far.
        """
        self.drop(job, is_up=True)
        self.waiting.departs(job.request)
        self.frontend.ended(job.request, self.number)

    @abstractmethod
    def stop(self, steps: int) -> list[Job]:
        """Give up all requests, ``steps`` decode steps into the leap that is cut off. Returns them."""
