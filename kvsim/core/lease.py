"""One request's hold on the cache."""

from typing import TYPE_CHECKING, Any

from kvsim.core.request import Request
from kvsim.core.runs import Run
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import Node

if TYPE_CHECKING:
    from kvsim.core.hybrid import StateLease


class Lease:
    """What a request can reuse and, once it is admitted, what it holds of the cache until it is released.

    match    ``path``: ``gpu_pages`` that are on the GPU or arriving there, then ``cpu_pages`` and ``disk_pages`` that only
             tiers below have (``disk_pages``: only the disk)
    admit    the path is pinned down to ``node``; ``slots`` (or a promise of ``promised_pages`` of them) for all other pages
    load     ``loaded_pages`` come from tiers below, ``loaded_disk_pages`` of them straight from disk
    insert   computed pages are in the tree and pinned too: ``slots`` keeps the partial page's and the answer's
    """

    __slots__ = (
        "cpu_pages", "disk_pages", "epoch", "gpu", "gpu_nodes", "gpu_pages", "hits", "is_finishing", "is_known_prompt",
        "is_resumed", "leading_cpu_pages", "loaded_disk_pages", "loaded_pages", "loading", "node", "path", "promised_pages",
        "request", "rest", "slots", "states", "waits",
    )  # fmt: skip

    def __init__(self, request: Request, gpu: Tier, root: Node) -> None:
        self.request = request
        self.gpu = gpu
        """The GPU tier that serves the request."""
        self.node = root
        """The deepest node of the pinned path, after admission."""
        self.path: list[Node] = []
        self.gpu_nodes = 0
        """How many nodes of ``path`` are on the GPU."""
        self.gpu_pages = 0
        self.cpu_pages = 0
        self.disk_pages = 0
        self.leading_cpu_pages = 0
        """Pages of the CPU tier that come before the first that only the disk has."""
        self.rest: tuple[Run, ...] = ()
        """The prompt's pages after the path; after admission, after the pinned path."""
        self.slots: Any = None
        self.promised_pages = 0
        self.loading: Node | None = None
        """The last node to be loaded, until the load is made."""
        self.loaded_pages = 0
        self.loaded_disk_pages = 0
        self.waits: list[Transfer] = []
        """Write-downs that make room for this request."""
        self.epoch = 0
        """How often the cache had been reset at admission."""
        self.hits: tuple[int, int, int] = (0, 0, 0)
        """Hit pages by tier (gpu, cpu, disk), in a replay."""
        self.is_finishing = False
        """The answer is there: what is inserted now is not a prompt."""
        self.is_resumed = False
        """The request was admitted before and gave everything back: what it finds again does not count as used once more."""
        self.is_known_prompt = False
        """The prompt was computed before, by the same request: policies that count prompts have been told."""
        self.states: StateLease | None = None
        """What the request holds of recurrent states, on a hybrid model."""

    def set_match(self, path: list[Node], pages: int, rest: tuple[Run, ...]) -> None:
        """A match of ``pages`` pages, all of them on the GPU as far as is known."""
        self.path = path
        self.gpu_nodes = len(path)
        self.gpu_pages = pages
        self.cpu_pages = self.disk_pages = self.leading_cpu_pages = 0
        self.rest = rest

    @property
    def has_load(self) -> bool:
        """Whether there is something to load that has not been started."""
        return self.loading is not None or self.states is not None and self.states.is_below

    @property
    def lower_pages(self) -> int:
        """Pages that would have to be loaded."""
        return self.cpu_pages + self.disk_pages
