"""Orders for a GPU and its answers: plain records, so that they can travel to another process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from kvsim.hardware.copy_rule import CopyRule
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.page_names import PageNames

NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class GpuDemand:
    """What a run requires of one GPU."""

    number: int
    """Position among the machine's GPUs."""
    model: ModelSpec
    """What this GPU has of the model: all of it, or its rank's share."""
    page_tokens: int
    gpu_pages: int
    cpu_pages: int
    """Pages of the host's pool; 0 without one."""
    unit_pages: int = 1
    """Pages that the host's pool stores as one larger page."""
    gpu_states: int = 0
    """Slots of a pool of recurrent states; 0 if they are saved in pages, or if there are none."""
    cpu_states: int = 0
    """States of the host's pool of states; 0 without one."""
    kept_states: int = 0
    """States kept outside the pools, beside those of running requests."""
    copy_rule: CopyRule
    max_batch_tokens: int
    max_running_requests: int
    is_layerwise: bool
    seed: int
    names: PageNames
    rank: int = 0
    """Which share of each page this GPU has."""
    ranks: int = 1
    host_file: int | None = None
    """File descriptor of the host's pool if several processes share it."""
    host_states_file: int | None = None
    """The same for the host's pool of states."""
    step_file: int | None = None
    """File descriptor of what keeps several ranks in step."""
    pool_file: int | None = None
    """File descriptor of the GPU's pool where there is no GPU and other processes access it."""

    @property
    def fragment_bytes(self) -> int:
        """Bytes of this GPU's share of a page in one layer."""
        return self.model.page_bytes(self.page_tokens) // self.model.attention_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of this GPU's share of a page."""
        return self.fragment_bytes * self.model.attention_layers

    @property
    def state_slots(self) -> int:
        """Slots of states outside the pools: one per request, the kept ones, and one that belongs to none."""
        return self.max_running_requests + self.kept_states + 1 if self.model.is_hybrid else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all states in GPU memory, whether of requests, kept or in their own pool."""
        return (self.state_slots + self.gpu_states) * self.model.state_bytes


@dataclass(frozen=True, kw_only=True)
class CopyOrder:
    """Copy pages between the GPU's pool and the host's. Slots are int64, in the order in which the pages arrive."""

    number: int
    is_load: bool
    """To the GPU; otherwise to the host."""
    gpu_slots: np.ndarray
    host_slots: np.ndarray
    of_states: bool = False
    """Whether the slots are those of the pools of states."""
    after: Sequence[int] = ()
    """Numbers of orders for states that must have ended before."""


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """One recurrent state that is copied within the GPU.

    save    from a request's slot, where its pattern is written first, to ``saved``: slots of the pool of states or pages
    load    from ``saved`` to a request's slot, or to one where it is kept; verified there
    share   from ``source``, where it is kept, to a request's slot; verified there
    """

    kind: Literal["save", "load", "share"]
    slot: int
    """Slot of a request, or where the state is kept."""
    page: int
    """The page after which the state was saved: its name."""
    saved: np.ndarray = field(default_factory=lambda: NOTHING)
    source: int = -1


@dataclass(frozen=True, kw_only=True)
class StateOrder:
    """Copy states, in order, after the steps ordered before and before those ordered later."""

    number: int
    copies: Sequence[StateCopy]


@dataclass(frozen=True, kw_only=True)
class SendOrder:
    """Copy pages to another GPU's pool."""

    number: int
    peer: int
    """Number of the other GPU."""
    sources: np.ndarray
    targets: np.ndarray
    """Slots in the other GPU's pool."""


@dataclass(frozen=True, kw_only=True)
class ChunkPages:
    """A prefill chunk. Arrays are int64."""

    tokens: int
    start: int
    is_sampled: bool
    """Whether it produces the request's next token."""
    slots: np.ndarray
    """Slots of all pages up to the chunk's end."""
    reused: np.ndarray
    """Indices into ``slots`` of pages that were present or are being loaded; empty except in the first chunk after admission."""
    reused_ids: np.ndarray
    filled_slots: np.ndarray
    """Slots of the pages that this chunk completes."""
    filled_ids: np.ndarray
    """Ids of the pages that this chunk completes."""
    state: int = 0
    """Slot of the request's recurrent state, if the model has one."""
    begins: StateCopy | None = None
    """The saved state that the request begins from."""


@dataclass(frozen=True, kw_only=True)
class DecodePages:
    """A decoding request, before the first step of a leap."""

    request: int
    """Number of the request's hold on the cache."""
    context_tokens: int
    slots: np.ndarray | None
    """Slots of all its pages; None if they are those of the order before, in which it decoded as well."""
    filled_slots: np.ndarray
    """Slots of the pages that are complete after the last step of the leap."""
    filled_ids: np.ndarray
    """Ids of these pages."""
    state: int = 0
    """Slot of the request's recurrent state, if the model has one."""
    reused_slots: np.ndarray = field(default_factory=lambda: NOTHING)
    """Slots of the prompt's pages, in the first leap of a request whose prompt another GPU has computed."""
    reused_ids: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """Compute one step, or several decode steps, after the orders for steps given before."""

    number: int
    chunks: Sequence[ChunkPages]
    decodes: Sequence[DecodePages]
    loads: Sequence[int]
    """Numbers of the copy orders that the step follows layer by layer; those that have ended do not matter."""
    steps: int
    state_loads: Sequence[int] = ()
    """Numbers of the copy orders that bring recurrent states, which must have ended before the step."""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """What a GPU has verified."""

    device: str
    verified_pages: int
    wrong_words: int
    """Of pages and states."""
    wrong_pages: int
    verified_states: int = 0
    wrong_states: int = 0


@dataclass(frozen=True, kw_only=True)
class PoolAddress:
    """Where other processes find a GPU's pool: a CUDA IPC handle and an offset in that allocation, or a shared file."""

    pages: int
    handle: bytes = b""
    offset: int = 0
    file: int | None = None


class Answers(Protocol):
    """What a GPU or a disk link answers, from any thread. Times are those of ``perf_counter``, which all processes share."""

    def ended(self, number: int, value: int, start_s: float, end_s: float) -> None:
        """An order has ended: ``value`` is the number of pages that arrived, or of steps done."""

    def failed(self, error: BaseException) -> None:
        """An order cannot be carried out, which ends the run."""

    def lost(self) -> None:
        """The process of the GPU has ended; all its orders end after that."""


class Gpu(Protocol):
    """A GPU in this process or another one. No method but ``report`` and ``close`` waits for the GPU."""

    def copy(self, order: CopyOrder) -> None:
        """Copy pages; the answer is the number that arrived, all or none."""

    def copy_states(self, order: StateOrder) -> None:
        """Copy recurrent states within the GPU; the answer is their number."""

    def send(self, order: SendOrder) -> None:
        """Copy pages to another GPU; the answer is the number that arrived."""

    def compute(self, order: StepOrder) -> None:
        """Compute a step; the answer is the number of steps done."""

    def cancel(self, number: int) -> None:
        """Drop a copy that has not begun."""

    def stop(self, number: int) -> None:
        """End an order for several steps at the next boundary between two."""

    def report(self) -> GpuReport:
        """Return what was verified so far, once all steps have ended."""

    def abandon(self) -> None:
        """Lose this GPU on purpose, since another rank of its engine is lost."""

    def loss(self) -> Exception:
        """Return the error that says how a lost GPU was lost."""

    def close(self) -> bool:
        """Drop all orders and free the memory. Returns whether nothing accesses the host's pool any more."""
