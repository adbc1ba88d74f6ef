"""SGLang's unified cache as its scheduler calls it in time: what GPU and host have, and the copies between them."""

from collections.abc import Iterable
from typing import Any, cast

from simpy import Event

from kvsim.core.plain_lower import PlainLower
from kvsim.core.rules import CacheSetup
from kvsim.core.tier import GPU, Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.tree import Node
from kvsim.core.watch import Watch
from kvsim.engine.job import Job
from kvsim.engine.queue import JobQueue
from kvsim.engine.schedule import Parts
from kvsim.engine.substrate import Work
from kvsim.engines.sglang.carriers import UNTIL_LANDED, Landing, Storing
from kvsim.engines.sglang.moving_nodes import MovingNodeCache
from kvsim.engines.sglang.node_check import check_nodes
from kvsim.engines.sglang.node_copies import NodeCopies
from kvsim.engines.sglang.stepped import NodesLease, SteppedNodes


class NodeTransfer(Transfer):
    """Pages of nodes that are copied as one. ``landing`` is told of its end; None: nobody waits for that."""

    __slots__ = ("landing",)

    def __init__(self, edge: Edge, node: Node, landing: Landing | None, *, goes_down: bool) -> None:
        super().__init__(edge, [node], goes_down=goes_down)
        self.landing = landing


class HostLower(PlainLower):
    """The host below a GPU: a pass acknowledges the ends of copies, and decides what is read from storage."""

    def __init__(self, gpu: Tier, watches: list[Watch]) -> None:
        super().__init__(gpu, watches)
        self.views[gpu.index].fetches_to = None

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        landing = cast(NodeTransfer, transfer).landing
        following = NO_TRANSFERS if landing is None else landing.landed(pages_arrived)
        super().abort(transfer, pages_arrived, now)
        return following


class TimedNodes(MovingNodeCache):
    """``MovingNodeCache`` whose copies take time."""

    def __init__(self, setup: CacheSetup, load_min_tokens: int) -> None:
        super().__init__(setup, copy_steps=UNTIL_LANDED, load_min_tokens=load_min_tokens)
        self.written_back: list[int] = []
        """Pages of each node that has been copied at its eviction."""

    def wrote_back(self, node: Node) -> None:
        self.written_back.append(node.pages)

    def store_copied(self) -> None:
        """Do nothing: someone else writes what ``take_to_store`` returns."""

    def take_to_store(self) -> list[Storing]:
        """Return what has been copied to the host since the last call and is to be stored."""
        to_store, self._to_store = self._to_store, []
        return to_store


class HostedSteps(SteppedNodes):
    """``SteppedNodes`` with a host. Its tree and its rules are those of a replay (``MovingNodeCache``).

    match     finds nodes on the GPU, then those that only the host has
    admit     loads the latter, all or none
    copies    decides about copies while nodes are entered and evicted; ``transfer`` makes one of them
    """

    def __init__(self, setup: CacheSetup, *, caches_answers: bool, load_min_tokens: int) -> None:
        self.moving = TimedNodes(setup, load_min_tokens)
        super().__init__(setup.tiers[GPU], setup.page_tokens, caches_answers=caches_answers, nodes=self.moving)
        self.lower = HostLower(self.gpu, self.watches)
        self._edge = setup.edges[0]

    def copies(self, parts: Parts, queue: JobQueue) -> "HostCopies":
        return HostCopies(self, parts)

    def transfer(self, pages: int, landing: Landing | None, *, goes_down: bool, edge: Edge | None = None) -> NodeTransfer:
        """Return the transfer that copies so many pages over an edge, by default that between GPU and host."""
        return NodeTransfer(edge or self._edge, Node((), pages, 0, None, self.tree, 0.0), landing, goes_down=goes_down)

    def _on_gpu(self, path: list[Node]) -> list[Node]:
        return [node for node in path if node.state[GPU]]

    def _load(self, lease: NodesLease) -> None:
        lease.loaded_pages = self.moving.load_back(lease, lease.request, lease.path[lease.gpu_nodes :])

    def make_room(self, pages: int) -> bool:
        self.moving.make_room(pages, self.residency.now)
        return self.gpu.pool.free >= pages

    def hold(self, leases: Iterable[NodesLease], more_tokens: int) -> None:
        size, holding = self.page_tokens, list(leases)
        self.moving.check_room(sum([-(-(lease.tokens + more_tokens) // size) + (-lease.tokens // size) for lease in holding]))
        super().hold(holding, more_tokens)

    def store(self, lease: NodesLease, tokens: int, now: float) -> None:
        request = lease.request
        self.residency.tick(now)
        self.moving.enter(lease, self._pages_of(request, tokens), lease.counted_pages)
        lease.counted_pages = max(lease.counted_pages, lease.kept_pages)
        if tokens > request.prompt_tokens:
            self._follow(request, request.prompt_tokens)

    def reset(self, gpu: Tier | None = None, now: float = 0.0) -> None:
        self.moving.settle()
        self._forget()
        super().reset(gpu, now)

    def _forget(self) -> None:
        """Give up what waits for the next pass, since the cache is about to be emptied."""

    def check(self) -> None:
        for lease in self.leases:
            held = cast(NodesLease, lease)
            own = self.gpu.pool.count(held.slots)
            assert held.kept_pages + own == -(-held.tokens // self.page_tokens), "a request has too few or too many pages"
        self._check_nodes()

    def _check_nodes(self) -> None:
        check_nodes(self.moving, list(self.leases))


class HostCopies(NodeCopies):
    """The copies between GPU and host, which run beside the steps.

    writes      those of a step's results are one copy, which begins after the step that is under way by then
    loads       those of a pass are one copy, which begins with its step
    write-back  begins after the step under way; the pass waits for it
    """

    def __init__(self, cache: HostedSteps, parts: Parts) -> None:
        self.cache = cache
        self._mover = parts.mover
        self._wake = parts.wake
        self._following: list[Transfer] = []
        """Begin when the step under way has ended."""
        self._written_back: list[Transfer] = []
        """What this pass has to wait for."""
        self._is_computing = False
        self._computed: Event | None = None
        """The end of the step that has begun last."""

    @property
    def is_moving(self) -> bool:
        return self.cache.moving.is_moving

    def begin_pass(self, new: list[Job], *, is_computing: bool) -> None:
        self._is_computing = is_computing
        self.decided(is_computing=is_computing)
        self.cache.moving.take_step()

    def decided(self, *, is_computing: bool) -> None:
        batch = self.cache.moving.send_copies()
        if batch is not None:
            self._submit(self.cache.transfer(batch.pages, batch, goes_down=True), is_computing=is_computing)

    def _submit(self, transfer: Transfer, *, is_computing: bool) -> None:
        if is_computing:
            self._following.append(transfer)
            self._wake()  # a leap ends with its first step, which the copy follows
        else:
            self._mover.submit([transfer])

    def loads(self) -> list[Transfer]:
        batch = self.cache.moving.send_loads()
        if batch is None:
            return []
        load = self.cache.transfer(batch.pages, batch, goes_down=False)
        load.after = self._take_written_back().copy()
        self._submit(load, is_computing=self._is_computing)
        return [load]

    def _take_written_back(self) -> list[Transfer]:
        """Return the write-backs of this pass so far."""
        moving = self.cache.moving
        self._written_back += [self.cache.transfer(pages, None, goes_down=True) for pages in moving.written_back]
        moving.written_back = []
        return self._written_back

    def carry_out(self, *, is_idle: bool) -> Any:
        copies, self._written_back = self._take_written_back(), []
        if copies and self._is_computing and self._computed is not None and not self._computed.processed:
            yield self._computed
        self._mover.submit(copies)
        for copy in copies:
            if not copy.done:
                yield self._mover.end_of(copy)

    def mark(self, work: Work) -> None:
        work.has_copies = self._mover.begins_copies(self.cache.gpu.owner)

    def began(self, done: Event) -> None:
        self._computed = done

    def step_ended(self) -> None:
        following, self._following = self._following, []
        self._mover.submit(following)

    def stop(self) -> None:
        self._following, self._written_back, self._computed = [], [], None
