"""A GPU of this process: its pool, its links, its weights, and the threads that carry out orders."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from kvsim.errors import UsageError
from kvsim.substrate.hardware.compute import Compute, Leap
from kvsim.substrate.hardware.memory.copy_links import HostLink, Link, PeerLink
from kvsim.substrate.hardware.memory.flight import Flight
from kvsim.substrate.hardware.memory.gpu_pool import GpuPool, PeerPools
from kvsim.substrate.hardware.memory.host_pool import HostPool
from kvsim.substrate.hardware.memory.patterns import Patterns
from kvsim.substrate.hardware.memory.tier_copy import TierCopy
from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots
from kvsim.substrate.hardware.model.rank_share import Lockstep
from kvsim.substrate.hardware.model.transformer import Transformer
from kvsim.substrate.hardware.orders import (
    Answers,
    CopyOrder,
    GpuDemand,
    GpuReport,
    PoolAddress,
    SendOrder,
    StateOrder,
    StepOrder,
)
from kvsim.substrate.hardware.state_memory import StateMemory
from kvsim.substrate.hardware.turn import Turn

WARM_COPY_PAGES = (1, 2, 3, 5, 16, 17, 64, 256)
"""Numbers of pages to copy: separate kernels are compiled for few pages, many pages, and multiples of 16."""
WARM_CONTEXT_TOKENS = 1023
WARM_DECODES = (*range(1, 33), 64, 128, 256)
"""Numbers of decoding requests to warm up: the library chooses the kernels of their products on first use."""


class LocalGpu:
    """Carries out orders on a device of this process. Without a GPU, kernels are interpreted on the CPU.

    Each link and the steps have their own threads, which give ``answers``. Orders for steps run one after another; those for
    copies run one after another in each direction.
    """

    def __init__(
        self,
        demand: GpuDemand,
        host: HostPool | None,
        answers: Answers,
        device: torch.device,
        host_states: HostPool | None = None,
    ) -> None:
        """Allocate memory and start the threads. Raises UsageError if memory is insufficient."""
        model, self.demand, self.device, self.answers = demand.model, demand, device, answers
        self.host = host
        with ExitStack() as undo:
            for pool in (host, host_states):
                if pool is not None and device.type == "cuda":
                    pool.pin()
            self.pool = GpuPool(
                layers=model.attention_layers,
                pages=demand.gpu_pages,
                fragment_bytes=demand.fragment_bytes,
                weight_bytes=int(model.parameters * model.weight_dtype_bytes),
                state_bytes=demand.state_bytes,
                device=device,
                file=demand.pool_file,
            )
            undo.callback(self.pool.close)
            gpu = self.pool.pages
            self.states = StateMemory(demand, gpu, device) if model.is_hybrid else None
            try:
                states = None if self.states is None else self.states.states
                transformer = Transformer(model, gpu, demand.page_tokens, device=device, seed=demand.seed, states=states)
            except (ValueError, torch.OutOfMemoryError) as error:
                raise UsageError(f"model: {error}") from error
            undo.pop_all()
        self.turn = Turn(device)
        self.patterns = Patterns(gpu)
        lockstep = Lockstep(demand.step_file, demand.rank, demand.ranks)
        self.compute_queue = Compute(answers, transformer, self.patterns, demand.names, self.turn, device, lockstep, self.states)
        self.links: dict[str, Link] = {}
        if host is not None:
            share = host.share(model.attention_layers, demand.rank, demand.ranks, unit_pages=demand.unit_pages)
            self.tiers = TierCopy(gpu, share, demand.copy_rule, unit_pages=demand.unit_pages)
            self.state_tiers: TierCopy | None = None
            if host_states is not None and self.states is not None and self.states.own_pool is not None:
                self.state_tiers = TierCopy(
                    self.states.own_pool, host_states.share(model.recurrent_layers), demand.copy_rule
                )  # fmt: skip
            self._add_link("load", self.tiers, opposite="store")
            self._add_link("store", self.tiers, opposite="load")

    def _add_link(self, name: str, tiers: TierCopy, *, opposite: str) -> None:
        is_load = name == "load"
        self.links[name] = HostLink(
            self.answers,
            tiers,
            self.turn,
            lambda: self.links[opposite].is_busy,
            is_load=is_load,
            is_layerwise=is_load and self.demand.is_layerwise,
            states=self.state_tiers,
        )

    @property
    def address(self) -> PoolAddress:
        """Where other processes find this GPU's pool."""
        return self.pool.address

    def connect(self, addresses: dict[int, PoolAddress]) -> None:
        """Open the pools of other GPUs, by number, so that pages can be sent there. Raises UsageError if that is impossible."""
        peers = PeerPools(self.pool.pages, addresses)
        self.links["peer"] = PeerLink(self.answers, peers, self.turn, self.device)

    def copy(self, order: CopyOrder) -> None:
        sources, targets = order.gpu_slots, order.host_slots
        if order.is_load:
            sources, targets = targets, sources
        found = [self.compute_queue.state_order(number) for number in order.after]
        after = [flag for flag in found if flag is not None]
        flight = Flight(number=order.number, sources=sources, targets=targets, of_states=order.of_states, after=after)
        self.links["load" if order.is_load else "store"].send(flight)

    def copy_states(self, order: StateOrder) -> None:
        self.compute_queue.copy_states(order)

    def send(self, order: SendOrder) -> None:
        flight = Flight(number=order.number, sources=order.sources, targets=order.targets, peer=order.peer)
        self.links["peer"].send(flight)

    def compute(self, order: StepOrder) -> None:
        self.compute_queue.send(Leap(order, self._flights(order.loads), self._flights(order.state_loads)))

    def _flights(self, numbers: Sequence[int]) -> list[Flight]:
        """Return the loads of these numbers that have not ended."""
        flights = [self.links["load"].flight(number) for number in numbers]
        return [flight for flight in flights if flight is not None]

    def cancel(self, number: int) -> None:
        for link in self.links.values():
            link.cancel(number)

    def stop(self, number: int) -> None:
        self.compute_queue.stop(number)

    def report(self) -> GpuReport:
        wrong_words, wrong_pages = self.patterns.wrong()
        states = None if self.states is None else self.states.patterns
        state_words, wrong_states = (0, 0) if states is None else states.wrong()
        return GpuReport(
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            verified_pages=self.patterns.verified_pages,
            wrong_words=wrong_words + state_words,
            wrong_pages=wrong_pages,
            verified_states=0 if states is None else states.verified_pages,
            wrong_states=wrong_states,
        )

    def abandon(self) -> None:
        raise AssertionError("a GPU of this process has no other ranks")

    def loss(self) -> Exception:
        return AssertionError("a GPU of this process cannot be lost")

    def disconnect(self) -> bool:
        """Give up access to other GPUs' pools. Returns whether nothing is being sent any more."""
        peer = self.links.pop("peer", None)
        return peer is None or peer.close()

    def close(self) -> bool:
        """End all work and free memory. Other processes must have been disconnected from this GPU's pool."""
        parts: list[Callable[[], bool]] = [*(link.close for link in self.links.values()), self.compute_queue.close]
        has_ended = [close() for close in parts]
        if not all(has_ended):
            return False
        if self.host is not None:
            for tiers in (self.tiers, self.state_tiers):
                if tiers is not None:
                    tiers.close()
            del self.tiers, self.state_tiers
        del self.patterns, self.states
        self.links.clear()
        self.pool.close()
        return True

    # Warming up

    def warm_up(self) -> None:
        """Compile and load everything a run will need before its clock starts, in the threads that will use it.

        Overwrites the pools. Without a GPU there is nothing to compile. Raises UsageError if the largest step does not fit into
        memory next to the pools.
        """
        if self.device.type != "cuda":
            return
        demand = self.demand
        try:
            self.compute_queue.warm_up(self._warm_up_steps)
            most = min(demand.gpu_pages, demand.cpu_pages or demand.gpu_pages)
            for link in self.links.values():
                link.warm_up([count for count in WARM_COPY_PAGES if count <= most])
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError as error:
            raise UsageError(f"tiers.gpu.capacity leaves too little memory for a step: {error}; decrease it") from error

    def _warm_up_steps(self) -> None:
        demand, transformer, patterns = self.demand, self.compute_queue.transformer, self.patterns
        most = demand.gpu_pages
        slots = partial(torch.arange, dtype=torch.int32, device=self.device)
        for count in (count for count in WARM_COPY_PAGES if count <= most):
            patterns.fill(slots(count), slots(count).long())
            patterns.verify(slots(count), slots(count).long())
        if self.states is not None:
            self.states.warm_up()
        longest = max(2 * demand.max_batch_tokens, WARM_CONTEXT_TOKENS)
        table = slots(-(-longest // demand.page_tokens)) % most
        transformer.warm_up_products(demand.max_batch_tokens)
        for tokens in warm_sizes(demand.max_batch_tokens):
            for chunk in (
                (tokens, 0),
                (tokens, tokens),
                (tokens - 3, 0),
                (tokens - 3, 5),
            ):  # even and odd sizes, at the start of a prompt and later
                transformer.step([ChunkSlots(*chunk, table)], [], None, sampled_tokens=1)
        for decodes in (count for count in WARM_DECODES if count <= demand.max_running_requests):
            transformer.step([], [DecodeSlots(WARM_CONTEXT_TOKENS, table)] * decodes, None)
        transformer.record_decodes(demand.max_running_requests)
        if self.states is not None:
            self.states.patterns.reset()
        patterns.reset()  # other GPUs that warm up may have overwritten pages
        torch.cuda.synchronize(self.device)


def warm_sizes(most: int) -> Sequence[int]:
    """Return numbers of prompt tokens to warm up, doubling from 16 to ``most``."""
    sizes = [16]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes
