"""A lease: one request's hold on the cache."""

from typing import Any

from kvsim.core.request import Request
from kvsim.core.state_lease import StateLease
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node
from kvsim.pages.extents import Run


class Lease:
    """What a request can reuse and, from admission to release, what it holds of the cache.

    match    ``path`` is what can be reused: ``gpu_pages`` on the GPU or arriving there, then ``cpu_pages`` and ``disk_pages``
             that only tiers below have (``disk_pages``: only the disk)
    admit    the path is pinned down to ``node``; the request has ``slots``, or a promise of ``promised_pages`` of them, for
             all other pages
    load     ``loaded_pages`` come from tiers below, ``loaded_disk_pages`` of them from disk
    insert   computed pages are in the tree and pinned too; ``slots`` keeps those of the partial page and the answer
    """

    __slots__ = (
        "cpu_pages", "disk_pages", "epoch", "gpu", "gpu_nodes", "gpu_pages", "hits", "is_finishing", "is_known_prompt",
        "is_reserved", "is_resumed", "leading_cpu_pages", "loaded_disk_pages", "loaded_pages", "loading", "missing_pages", "node",
        "path", "promised_pages", "request", "rest", "slots", "states", "waits",
    )  # fmt: skip

    def __init__(self, request: Request, gpu: Tier, root: Node) -> None:
        self.request = request
        self.gpu = gpu
        """The GPU tier that serves the request."""
        self.node = root
        """The deepest node of the pinned path, after admission."""
        self.path: list[Node] = []
        self.gpu_nodes = 0
        """Number of nodes at the head of ``path`` that are on the GPU."""
        self.gpu_pages = 0
        self.cpu_pages = 0
        self.disk_pages = 0
        self.leading_cpu_pages = 0
        """Pages in the CPU tier before the first page that only the disk has."""
        self.rest: tuple[Run, ...] = ()
        """The prompt's pages after the path; once admitted, after the pinned path."""
        self.slots: Any = None
        self.promised_pages = 0
        self.loading: Node | None = None
        """The last node to load, until the load is started."""
        self.loaded_pages = 0
        self.loaded_disk_pages = 0
        self.missing_pages = 0
        """Pages of the pinned path that loads, its own or those of other requests, have failed to bring: to be computed."""
        self.waits: list[Transfer] = []
        """Write-downs that make room for this request."""
        self.epoch = 0
        """The cache's ``epoch`` (number of resets) at admission."""
        self.hits: tuple[int, int, int] = (0, 0, 0)
        """Hit pages by tier (gpu, cpu, disk); set in a replay."""
        self.is_finishing = False
        """The answer is complete: pages inserted from now on are the answer's."""
        self.is_resumed = False
        """The request was admitted before and retracted; pages that it finds again are not counted as used again."""
        self.is_known_prompt = False
        """The same request has computed this prompt before; policies that count prompts have been notified already."""
        self.is_reserved = False
        """Another GPU computes the prompt, and notifies the tiers below of the request."""
        self.states: StateLease | None = None
        """The recurrent states that the request holds, on a hybrid model."""

    def set_match(self, path: list[Node], pages: int, rest: tuple[Run, ...]) -> None:
        """Record a match of ``pages`` pages, assuming that all are on the GPU."""
        self.path = path
        self.gpu_nodes = len(path)
        self.gpu_pages = pages
        self.cpu_pages = self.disk_pages = self.leading_cpu_pages = 0
        self.rest = rest

    @property
    def has_load(self) -> bool:
        """Whether the request still has a load to start."""
        return self.loading is not None or self.states is not None and self.states.is_below

    @property
    def lower_pages(self) -> int:
        """Matched pages that would have to be loaded from tiers below."""
        return self.cpu_pages + self.disk_pages
