"""The contract of traces: settings that load as requests in the order of their arrival."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsim.core.pages import Run
from kvsim.core.request import Request
from kvsim.errors import UsageError

TAILS = ("full", "all")


@dataclass(kw_only=True, eq=False)
class Trace:
    """Requests in the order of their arrival, their prompts cut into pages of ``page_tokens`` tokens."""

    name: str
    """What a table calls it: the file's name, or the generator's."""
    requests: list[Request]
    page_tokens: int
    block_tokens: int | None
    """Tokens of the blocks in which the file names its prompts; None if it names tokens."""
    origin: tuple[str, ...] = ()
    """The overrides that load it again, if it was loaded from Python."""


@dataclass(kw_only=True)
class TraceSource(ABC):
    """Reads or generates one trace. Its fields are its settings; ``__post_init__`` raises ValueError for a bad one.

    Whatever the page size, loading costs per run of page ids, never per page. Page ids are non-negative; requests that share
    a page id share all before it. A request that waits for another (``after``) has a higher index than that one.
    """

    limit: int | None = None
    """Keep this many requests, the first ones; None keeps all."""
    rate: float = 1.0
    """Arrival times are divided by it, and nothing else is."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}; null reads all requests")
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate must be positive, not {self.rate}; 1 keeps the recorded arrivals")

    @abstractmethod
    def load(self, page_tokens: int) -> Trace:
        """The trace with pages of ``page_tokens`` tokens.

        Raises TraceError for a file that cannot be used and UsageError for a page size that does not fit the file's blocks.
        """

    def page_names(self, page_tokens: int) -> dict[int, str]:
        """The tokens of each page id that ``load`` gives out, as text; empty if the trace does not tell them."""
        return {}


def name_pages(prompts: Iterable[tuple[Sequence[object], Iterable[Run]]], page_tokens: int) -> dict[int, str]:
    """The text of each page of prompts, given by their tokens and page ids."""
    names: dict[int, str] = {}
    for tokens, runs in prompts:
        pages = [start + at for start, length in runs for at in range(length)]
        for at, page in enumerate(pages):
            names.setdefault(page, " ".join(map(str, tokens[at * page_tokens : (at + 1) * page_tokens])))
    return names


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if a setting is none of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_page_tokens(page_tokens: int) -> None:
    """Raise UsageError for a page without tokens."""
    if page_tokens < 1:
        raise UsageError(f"page_tokens must be at least 1, not {page_tokens}")


def in_order_of_arrival(requests: list[Request]) -> list[Request]:
    """The requests sorted by arrival and numbered; ``after``, a position in ``requests``, becomes an index."""
    order = sorted(range(len(requests)), key=lambda position: requests[position].arrival_s)
    index_of = {position: index for index, position in enumerate(order)}
    for position, request in enumerate(requests):
        request.index = index_of[position]
        request.after = index_of.get(request.after, -1)
    return [requests[position] for position in order]
