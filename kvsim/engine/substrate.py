"""The contract of substrates: what makes time pass and bytes move."""

from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from simpy import Environment, Event

from kvsim.core.tier import Edge
from kvsim.core.transfer import Transfer
from kvsim.engine.adapters import AdapterWork
from kvsim.engine.job import Job, Send
from kvsim.engine.link_use import LinkUse

LOST: Final = -1
"""Value of ``compute``'s event if the engine's GPU was lost."""


class Work:
    """One step of a batch (prefill chunks and a token for each decoding request), or several decode steps in one leap.

    Step ``j`` (0, 1, ...) of a leap attends over ``decode_context_tokens + j * decode_requests`` cached tokens. A simulation
    needs only the numbers. A substrate with real memory finds slots and pages through ``prefilling`` and ``decoding``, the
    engine's own collections, which it must read before ``compute`` returns.
    """

    __slots__ = (
        "chunks", "sampled_tokens", "decode_requests", "decode_context_tokens", "repeated_context_tokens", "max_steps", "stop",
        "prefilling", "decoding", "stalled_s", "exchange_s", "stages_s", "decode_step", "engine", "forms_each_step", "has_copies",
        "is_cut", "tokens_per_decode", "adapters",
    )  # fmt: skip

    def __init__(
        self,
        *,
        chunks: list[tuple[int, int]] | None = None,
        sampled_tokens: int = 0,
        decode_requests: int = 0,
        decode_context_tokens: int = 0,
        repeated_context_tokens: int = 0,
        max_steps: int = 1,
        prefilling: list[tuple[Job, int]] | None = None,
        decoding: Collection[Job] = (),
        decode_step: int = 0,
        engine: int = 0,
        forms_each_step: bool = False,
        has_copies: bool = False,
        tokens_per_decode: int = 1,
    ) -> None:
        self.chunks: list[tuple[int, int]] = [] if chunks is None else chunks
        """Prefill chunks as (tokens, position of the first token in its prompt)."""
        self.sampled_tokens = sampled_tokens
        """First tokens of answers that this step's chunks yield, in addition to one per decoding request."""
        self.decode_requests = decode_requests
        self.decode_context_tokens = decode_context_tokens
        self.repeated_context_tokens = repeated_context_tokens
        """Those of ``decode_context_tokens`` that are counted for another decoding request already, which has the same pages. Set
        by ``count_repeated``, which a substrate calls if they make a difference."""
        self.max_steps = max_steps
        self.stop: Event | None = None
        """If this event occurs, the leap ends at the next boundary between two steps."""
        self.prefilling: list[tuple[Job, int]] = [] if prefilling is None else prefilling
        """The jobs of ``chunks``, in the same order, each with its chunk's tokens, which ``computed`` does not include yet."""
        self.decoding: Collection[Job] = decoding
        """The decoding jobs."""
        self.stalled_s = 0.0
        """Set by the substrate by the end of a step with loads: how much of it had to wait for them. A simulation sets by how
        much the step would have been shorter without them. On hardware, where layers are not timed, it is the time until the last
        of them had landed, although some layers were computed in it."""
        self.exchange_s = 0.0
        """Set by a substrate with pipeline or expert parallelism: seconds of each step in which GPUs exchange activations instead
        of computing, on average over the stages."""
        self.stages_s = 0.0
        """Set by a substrate with several stages: the seconds that the step takes of each of them, on average."""
        self.decode_step = decode_step
        """Decode steps of the engine before this work; see ``Job.cached_tokens``."""
        self.engine = engine
        """Number of the engine that does the work."""
        self.forms_each_step = forms_each_step
        """Whether the engine forms each step of a leap by itself: each takes what a leap takes beyond its steps, and there is no
        leap if the engine reports after each step."""
        self.has_copies = has_copies
        """Whether copies from or to the engine's GPU begin at the same time."""
        self.is_cut = False
        """Set when the engine fails: the rest of it is not computed."""
        self.tokens_per_decode = tokens_per_decode
        """Tokens that a step computes of each decoding request: more than 1 if it checks a draft. Then there is no leap."""
        self.adapters: AdapterWork | None = None
        """What LoRA adapters add to each step."""

    def times_formed(self, steps: int) -> int:
        """Return how often the engine forms the first ``steps`` steps: once for a leap, unless it forms each step."""
        return steps if self.forms_each_step else 1

    def count_repeated(self, page_tokens: int) -> None:
        """Set ``repeated_context_tokens``. The cost grows with the nodes on the paths of decoding requests, each counted once."""
        pages, seen = 0, set[int]()
        for job in self.decoding if self.decode_requests > 1 else ():
            assert job.lease is not None
            node = job.lease.node
            while node.parent is not None and id(node) not in seen:
                seen.add(id(node))
                node = node.parent
            pages += node.depth + node.pages
        self.repeated_context_tokens = pages * page_tokens


class Substrate(Protocol):
    """Runs a model's work and moves its pages. ``copy`` and ``compute`` return at once, with an event for their end."""

    env: Environment

    def request_s(self, prompt_tokens: int) -> float:
        """Return the time from a request's arrival until an engine hears of it, in a server around the engines."""

    def copy(self, transfer: Transfer) -> Event:
        """Move a transfer's pages. The event's value is the number of pages that arrived.

        With several ranks, each moving its part of every page, the value may have one number per rank; the lowest counts. If the
        first page that did not arrive can no longer be read, ``transfer.has_fault`` is set before the event.
        """

    def cancel(self, transfer: Transfer) -> None:
        """End a copy early: its event occurs soon, with the whole pages that have arrived by then."""

    def follows(self, load: Transfer) -> bool:
        """Return whether a step can follow a load that has begun layer by layer."""

    def queued_s(self, edge: Edge) -> float:
        """Return the seconds until everything queued so far has been carried up over an edge."""

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        """Run a step or a leap; layer l starts when layer l of the loads has arrived.

        With several stages, steps follow one another through them: others of the engine may be under way.

        The event's value is the number of steps done, or ``LOST`` if the engine's GPU was lost before the end.
        """

    def steps_done(self, work: Work, elapsed_s: float) -> int:
        """Return how many steps of a leap are complete after ``elapsed_s``, when its engine fails. The leap has not ended."""

    def hand_over(self, send: Send) -> Event:
        """Send what is left of a computed prompt's KV from one GPU to another. The event occurs when everything has landed.

        A substrate may have begun earlier, in ``compute``: the jobs of a step carry their ``send``.
        """

    def withdraw(self, send: Send) -> None:
        """Stop sending, since an engine has failed; the event of ``hand_over`` need not occur."""

    def on_loss(self, lost: Callable[[int], None]) -> None:
        """Call ``lost`` with the number of an engine when its GPU is lost, before the events of its copies and steps occur."""

    def link_use(self) -> list[LinkUse]:
        """Return what each link has carried so far; links that have carried nothing are left out."""

    def findings(self) -> dict[str, Any]:
        """Return what a run on real memory has measured and verified, for its record; empty for any other run."""

    def close(self) -> None:
        """Release the resources of the run."""


def request_of(transfer: Transfer) -> int:
    """Return the index of the request that a transfer reads for, or whose prompt it writes down; -1 if there is none."""
    return -1 if transfer.request is None else transfer.request.index
