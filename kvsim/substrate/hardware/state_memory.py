"""The recurrent states in a GPU's memory, and their copies there."""

from collections.abc import Sequence

import numpy as np
import torch

from kvsim.errors import UsageError
from kvsim.kernels.page_copy import check_pools
from kvsim.substrate.hardware.memory.available import gib
from kvsim.substrate.hardware.memory.patterns import Patterns, upload
from kvsim.substrate.hardware.model.recurrence import state_layer_bytes
from kvsim.substrate.hardware.orders import GpuDemand, StateCopy


class StateMemory:
    """The states of running requests and kept ones, ``states``, and the pool in which states are saved.

    The pool holds states alone (``own_pool``), or is that of the pages, where a state takes several. ``states`` is
    ``[layer, slot, bytes]``. A state that is saved is overwritten with a pattern first, as pages hold patterns in place of keys
    and values, so it can be verified wherever it has been copied to when a request begins from it.
    """

    def __init__(self, demand: GpuDemand, pages: torch.Tensor, device: torch.device) -> None:
        """Allocate the memory; ``pages`` is the pool of pages. Raises UsageError if memory is insufficient."""
        self.device, self.names, model = device, demand.names, demand.model
        shape = (model.recurrent_layers, demand.state_slots, state_layer_bytes(model))
        try:
            self.states = torch.zeros(shape, dtype=torch.uint8, device=device)
            self.own_pool = None
            if demand.gpu_states:
                self.own_pool = torch.zeros(shape[0], demand.gpu_states, shape[2], dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"engine.max_running_requests: the GPU cannot allocate {gib(demand.state_bytes)} for states; decrease it"
            ) from error
        if self.own_pool is not None:
            try:
                check_pools(self.own_pool.transpose(0, 1))
            except ValueError as error:
                raise UsageError(f"model.state_heads: {error}: set tiers.gpu.states=shared") from error
        self.pool = pages if self.own_pool is None else self.own_pool
        self.units = -(-model.state_bytes // (self.pool.shape[0] * self.pool.shape[2]))
        self._states, self._slots = (pool.view(torch.int64) for pool in (self.states, self.pool.transpose(0, 1)))
        """In words of 8 bytes, which are copied several times as fast as bytes."""
        self.patterns = Patterns(self.states)

    def carry_out(self, copies: Sequence[StateCopy]) -> None:
        """Enqueue copies on the current stream, one after another."""
        if not copies:
            return
        slots = upload([np.array([copy.slot]) for copy in copies], torch.int32, self.device)
        pages = [self.names.state_patterns(np.array([copy.page])) for copy in copies]
        numbers = upload([*pages, *(copy.saved for copy in copies)], torch.int64, self.device)
        for copy, slot, number, saved in zip(copies, slots, numbers, numbers[len(copies) :], strict=False):
            if copy.kind == "save":
                self.patterns.fill(slot, number)
                self._save(copy.slot, saved)
                continue
            if copy.kind == "load":
                self._load(copy.slot, saved)
            else:
                self.states[:, copy.slot].copy_(self.states[:, copy.source])
            self.patterns.verify(slot, number)

    def _save(self, slot: int, saved: torch.Tensor) -> None:
        """Copy a request's state, layer by layer, to these slots of the pool, one after another; the last may have room left."""
        layers, _, words = self._states.shape
        pieces = torch.empty(len(saved), *self._slots.shape[1:], dtype=torch.int64, device=self.device)
        pieces.flatten()[: layers * words].view(layers, words).copy_(self._states[:, slot])
        self._slots.index_copy_(0, saved, pieces)

    def _load(self, slot: int, saved: torch.Tensor) -> None:
        """Copy what ``_save`` wrote to the state of a request."""
        layers, _, words = self._states.shape
        pieces = self._slots.index_select(0, saved)
        self._states[:, slot].copy_(pieces.flatten()[: layers * words].view(layers, words))

    def warm_up(self) -> None:
        """Compile what copies use. Overwrites states and pages."""
        saved = np.arange(self.units) % self.pool.shape[1]
        self.carry_out([StateCopy(kind="save", slot=0, page=0, saved=saved), StateCopy(kind="load", slot=0, page=0, saved=saved)])
        self.carry_out([StateCopy(kind="share", slot=self.states.shape[1] - 1, page=0, source=0)])
        self.patterns.reset()
