"""The graph of tiers as one GPU tier sees it."""

from kvsim.core.lease import Lease
from kvsim.core.tier import Edge, Tier
from kvsim.core.tree import READY, Node


class Source:
    """A tier that a GPU tier can be given pages from, and the tier between, which they pass through; None: directly."""

    __slots__ = ("between", "load", "read", "tier")

    def __init__(self, load: Edge, read: Edge | None = None) -> None:
        self.load = load
        """The edge over which the GPU gets them."""
        self.read = read
        """The edge over which they come into the tier between."""
        self.tier = load.lower if read is None else read.lower
        self.between = None if read is None else load.lower


class View:
    """The tiers below a GPU tier, and where it can read from."""

    def __init__(self, gpu: Tier) -> None:
        self.gpu = gpu
        self.edges: list[Edge] = list(gpu.below)
        """From the top down."""
        for edge in self.edges:
            self.edges += [below for below in edge.lower.below if below not in self.edges]
        self.copying: list[Edge] = [edge for edge in self.edges if edge.copies_after_use]
        """Those over which pages may be copied after a request has used them."""
        self.sources: list[Source] = [Source(edge) for edge in gpu.below]
        """In order of preference."""
        for edge in gpu.below:
            self.sources += [Source(edge, below) for below in edge.lower.below]
        self.lower: list[Tier] = list(dict.fromkeys([source.tier for source in self.sources]))
        self.levels = 1 + max([tier.level for tier in self.lower], default=0)
        """Number of levels down to the deepest of these tiers."""
        between = [source.between for source in self.sources if source.between is not None]
        self.fetches_to: Tier | None = between[0] if between else None
        """The tier that prefetch reads into; None if there is none."""

    def source_of(self, node: Node) -> Source | None:
        """Return where a node can be read from now; None if the GPU has it or is getting it, or if no tier below can give it."""
        state = node.state
        if not state[self.gpu.index]:
            for source in self.sources:
                if state[source.tier.index] == READY and (source.between is None or not state[source.between.index]):
                    return source
        return None

    def first_read(self, lease: Lease) -> Edge | None:
        """Return the edge that a fetch for a match would begin with; None if there is nothing to read into memory."""
        for node in lease.path[lease.gpu_nodes :]:
            source = self.source_of(node)
            if source is not None and source.between is not None and source.between is self.fetches_to:
                return source.read
        return None

    def room_to_fetch(self, lease: Lease) -> int:
        """Return how many pages could be fetched for a request now: what the tier that prefetch reads into can take after
        evicting everything evictable but the copies there of the lease's own path. The lease must be fresh from ``match``."""
        into = self.fetches_to
        if into is None:
            return 0
        index, room = into.index, into.available_pages
        for node in lease.path:
            if node.state[index] == READY and not node.pins[index]:
                room -= node.pages
        return max(0, room)
