"""Runs steps and leaps on the GPU, one after another, in their own thread and stream."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event as Flag
from time import perf_counter

import numpy as np
import torch

from kvsim.substrate.hardware.memory.flight import Flight
from kvsim.substrate.hardware.memory.patterns import Patterns, upload
from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots
from kvsim.substrate.hardware.model.rank_share import Lockstep
from kvsim.substrate.hardware.model.transformer import Transformer
from kvsim.substrate.hardware.orders import Answers, ChunkPages, DecodePages, StateOrder, StepOrder
from kvsim.substrate.hardware.page_names import PageNames
from kvsim.substrate.hardware.state_memory import StateMemory
from kvsim.substrate.hardware.turn import Turn
from kvsim.substrate.hardware.worker import Worker


@dataclass(eq=False)
class Leap:
    """One step, or several decode steps, with the loads that it follows."""

    order: StepOrder
    loads: list[Flight]
    state_loads: list[Flight]
    """Loads that must have ended before the first step."""
    is_stopped: bool = False
    """Set when the leap shall end at the next step boundary."""


class Compute:
    """Runs leaps, and copies of recurrent states between them, in the order in which they are sent.

    The host waits for the end of each step, like an engine that needs its tokens. Within a step it does not wait for the GPU:
    layer l starts on the GPU when layer l of the loads has arrived. After a request's first chunk, all pages it reuses are
    verified; pages that a step completes are filled.
    """

    def __init__(
        self,
        answers: Answers,
        transformer: Transformer,
        patterns: Patterns,
        names: PageNames,
        turn: Turn,
        device: torch.device,
        lockstep: Lockstep,
        states: StateMemory | None = None,
    ) -> None:
        self.answers = answers
        self.transformer = transformer
        self.patterns = patterns
        self.states = states
        self.names = names
        self.lockstep = lockstep
        self.turn = turn
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._tables: dict[int, torch.Tensor] = {}
        """Slots of each request that decoded in the last leap."""
        self._leaps: dict[int, Leap] = {}
        """Leaps that have not ended, by the number of their order."""
        self._state_orders: dict[int, Flag] = {}
        """Set when an order for states that is under way has ended."""
        self._worker: Worker[Leap | StateOrder] = Worker("compute", self._run, self._fail, device)

    def send(self, leap: Leap) -> None:
        """Run a leap after those sent before it."""
        self._leaps[leap.order.number] = leap
        self._worker.give(leap)

    def copy_states(self, order: StateOrder) -> None:
        """Copy states after the leaps sent before."""
        self._state_orders[order.number] = Flag()
        self._worker.give(order)

    def state_order(self, number: int) -> Flag | None:
        """Return the event set at the end of an order for states; None if it has ended already."""
        return self._state_orders.get(number)

    def stop(self, number: int) -> None:
        """End a leap at the next step boundary."""
        if (leap := self._leaps.get(number)) is not None:
            leap.is_stopped = True

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run a function in the steps' thread and stream, and wait for it."""

        def run() -> None:
            with self._active():
                function()

        self._worker.call(run)

    def close(self) -> bool:
        """Drop queued leaps and end the thread. Returns whether it has ended; only then are the weights freed."""
        has_ended = self._worker.close()
        for ended in list(self._state_orders.values()):
            ended.set()
        if not has_ended:
            return False
        del self.transformer, self.patterns, self.states
        self._tables.clear()
        return True

    def _run(self, task: Leap | StateOrder) -> None:
        start_s = perf_counter()
        if isinstance(task, StateOrder):
            with self._active(), self.turn:
                self._copy_states(task)
            self._end_states(task)
            self.answers.ended(task.number, len(task.copies), start_s, perf_counter())
            return
        with self._active():
            steps = self._compute(task)
        del self._leaps[task.order.number]
        self.answers.ended(task.order.number, steps, start_s, perf_counter())

    def _fail(self, task: Leap | StateOrder, error: BaseException) -> None:
        if isinstance(task, StateOrder):
            self._end_states(task)
        self.answers.failed(error)

    def _copy_states(self, order: StateOrder) -> None:
        assert self.states is not None
        self.states.carry_out(order.copies)
        if self.stream is not None:
            self.stream.synchronize()

    def _end_states(self, order: StateOrder) -> None:
        """Let the copies go ahead that wait for an order."""
        self._state_orders.pop(order.number).set()

    def _active(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def _compute(self, leap: Leap) -> int:
        """Run the steps and return how many were run."""
        order = leap.order
        tables, reused, filled = self._upload(order)
        chunks = [
            ChunkSlots(chunk.tokens, chunk.start, table, chunk.state) for chunk, table in zip(order.chunks, tables, strict=True)
        ]
        self._begin(leap)
        sampled = sum(chunk.is_sampled for chunk in order.chunks)
        for step in range(order.steps):
            decodes = [DecodeSlots(item.context_tokens + step, self._tables[item.request], item.state) for item in order.decodes]
            with self.turn:
                self.transformer.step(chunks, decodes, self._waiting(leap.loads), sampled_tokens=sampled)
                if not step:
                    self._stamp(reused, filled)
            if self.stream is not None:
                self.stream.synchronize()
            if self.lockstep.ends(leap.is_stopped or self._worker.is_closing, lambda: self._worker.is_closing):
                break
        return step + 1

    def _begin(self, leap: Leap) -> None:
        """Let requests begin from saved states, once these have been loaded."""
        copies = [chunk.begins for chunk in leap.order.chunks if chunk.begins is not None]
        if self.states is None or not copies:
            return
        with self.turn:
            for load in leap.state_loads:
                load.await_end(self.stream, self.turn)
            self.states.carry_out(copies)

    def _stamp(self, reused: list[torch.Tensor], filled: list[torch.Tensor]) -> None:
        """Verify the reused pages, then fill the new ones."""
        if len(reused[0]):
            self.patterns.verify(*reused)
        if len(filled[0]):
            self.patterns.fill(*filled)

    def _waiting(self, loads: list[Flight]) -> "WaitLayer | None":
        return WaitLayer(loads, self.stream, self.turn) if loads else None

    def _upload(self, order: StepOrder) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Upload the chunks' slots, and the slots and pattern numbers of the pages to verify and to fill.

        The slots of decoding requests are uploaded only if they have changed.
        """
        chunks = order.chunks
        changed = {item.request: item.slots for item in order.decodes if item.slots is not None}
        known = {item.request: self._tables[item.request] for item in order.decodes if item.slots is None}
        everyone: list[ChunkPages | DecodePages] = [*chunks, *order.decodes]
        reused = joined([*(chunk.slots[chunk.reused] for chunk in chunks), *(item.reused_slots for item in order.decodes)])
        reused_ids = joined([item.reused_ids for item in everyone])
        filled = joined([item.filled_slots for item in everyone])
        filled_ids = joined([item.filled_ids for item in everyone])
        lists = [*(chunk.slots for chunk in chunks), *changed.values(), reused, filled]
        *tables, reused_slots, filled_slots = upload(lists, torch.int32, self.device)
        numbers = [self.lockstep.of_rank(self.names.patterns(ids)) for ids in (reused_ids, filled_ids)]
        reused_numbers, filled_numbers = upload(numbers, torch.int64, self.device)
        self._tables = known | dict(zip(changed, tables[len(chunks) :], strict=True))
        return tables[: len(chunks)], [reused_slots, reused_numbers], [filled_slots, filled_numbers]


@dataclass(frozen=True, slots=True)
class WaitLayer:
    """Makes a stream wait for a layer of all loads."""

    loads: list[Flight]
    stream: "torch.cuda.Stream | None"
    turn: Turn

    def __call__(self, layer: int) -> None:
        for load in self.loads:
            load.await_layer(layer, self.stream, self.turn)


def joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate the arrays to one int64 array."""
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])
