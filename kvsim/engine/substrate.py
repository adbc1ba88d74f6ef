"""The contract of substrates: what makes time pass and bytes move."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from simpy import Environment, Event

from kvsim.core.transfer import Transfer
from kvsim.engine.job import Job
from kvsim.engine.outcome import LinkUse


@dataclass(slots=True, kw_only=True)
class Work:
    """One step of a batch: prefill chunks and a token for each decoding request; or several decode steps in one leap.

    Step ``j`` (0, 1, ...) of a leap attends over ``decode_context_tokens + j * decode_requests`` cached tokens. The numbers
    are all that arithmetic needs. A substrate with real memory reads from ``prefilling`` and ``decoding`` which slots and
    pages the work is about: they are the engine's own lists, to be read before ``compute`` returns.
    """

    chunks: list[tuple[int, int]] = field(default_factory=list)
    """Prefill chunks as (tokens, position of the first one in its prompt)."""
    sampled_tokens: int = 0
    """First tokens that this step's chunks give, besides one for each decoding request."""
    decode_requests: int = 0
    decode_context_tokens: int = 0
    max_steps: int = 1
    stop: Event | None = None
    """If it happens, the leap ends at the next boundary between two steps."""
    prefilling: list[tuple[Job, int]] = field(default_factory=list)
    """The requests of ``chunks`` in the same order, each with the tokens of its chunk; ``computed`` is not counted up yet."""
    decoding: Collection[Job] = ()
    """The requests that decode."""
    decode_step: int = 0
    """Decode steps of the engine before this work: see ``Job.cached_tokens``."""


class Substrate(Protocol):
    """Runs a model's work and moves its pages. Each call returns at once, with an event for its end."""

    env: Environment

    def copy(self, transfer: Transfer) -> Event:
        """Move a transfer's pages; the event's value is the number of pages that arrived.

        Several ranks, each of which moves its part of every page, answer with a number each; the least counts. If the first
        page that did not arrive cannot be read any more, ``transfer.has_fault`` says so before the event.
        """

    def cancel(self, transfer: Transfer) -> None:
        """End a copy early: its event happens soon, with the whole pages that have arrived by then."""

    def queued_s(self, link: str) -> float:
        """Seconds until a link (``disk-cpu``) has carried all that it was given so far."""

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        """Run a step or a leap; layer l starts when layer l of the loads has landed. The event's value is the steps done."""

    def link_use(self) -> dict[str, LinkUse]:
        """What each link has carried so far."""

    def findings(self) -> dict[str, Any]:
        """What a run on real memory has found out, for its record; nothing if there was none."""

    def close(self) -> None:
        """Give back what the run needed."""
