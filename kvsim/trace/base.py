"""The contract of traces: settings that load as requests in order of arrival."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from operator import mul
from typing import ClassVar

import xxhash

from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.errors import TraceError, UsageError
from kvsim.numbers import MOST_SECONDS, Real, Whole, check_settings, refusal
from kvsim.pages.extents import Extent
from kvsim.trace.stored import StoredRequests

TAILS = ("full", "all")
MAX_TOKENS = 1 << 24
"""Beyond the longest contexts of models, of 10 million tokens."""


@dataclass(kw_only=True, eq=False, repr=False)
class Trace:
    """Requests in order of arrival, with prompts cut into pages of ``page_tokens`` tokens."""

    name: str
    """Name shown in tables: that of the file or the generator."""
    requests: Sequence[Request]
    """A list or, of a long trace, ``StoredRequests``, which reads them again whenever they are asked for."""
    page_tokens: int
    block_tokens: int | None
    """Tokens per block of a file that describes prompts by block ids; None if it contains tokens."""
    note: str = ""
    """What is synthetic because the file does not contain it; shown with every result."""
    origin: tuple[str, ...] = ()
    """Overrides that load the trace again, if it was loaded from Python."""
    content: str = ""
    """Digest of the requests that these overrides load (``content_of``); empty if nobody can have changed them since."""
    source: "TraceSource | None" = None
    """What it was loaded from, if that is in memory, so that its overrides alone cannot load it again."""

    def __repr__(self) -> str:
        facts = ", ".join(f"{number} {what}" for what, number in self._facts().items())
        return f"Trace({self.name}: {facts}, pages of {self.page_tokens})"

    def _repr_html_(self) -> str:
        facts = self._facts() | {"tokens per page": f"{self.page_tokens:,}"}
        rows = "".join(f"<tr><td>{what}</td><td>{number}</td></tr>" for what, number in facts.items())
        return f"<p><b>{escape(self.name)}</b></p><table><tbody>{rows}</tbody></table>"

    def _facts(self) -> dict[str, str]:
        prompts = sum(values_of(self.requests, "prompt_tokens"))
        answers = sum(map(mul, values_of(self.requests, "output_tokens"), values_of(self.requests, "samples")))
        numbers = {"requests": len(self.requests), "prompt tokens": prompts, "output tokens": answers}
        return {what: f"{number:,}" for what, number in numbers.items()}


@dataclass(kw_only=True)
class TraceSource(ABC):
    """Reads or generates one trace. Its fields are its settings; ``__post_init__`` raises ValueError for a bad one.

    Whatever the page size, the cost of loading grows with the extents of page ids, not with pages. Page ids are non-negative;
    requests that share a page id share all pages before it. A request that waits for others (``after``, ``joins``) has the higher
    index.
    Page ids are the same in every process and do not depend on the settings in ``OF_ARRIVALS``.
    """

    OF_ARRIVALS: ClassVar[tuple[str, ...]] = ("limit", "rate", "max_tokens")
    """Settings on which page ids do not depend. A class names its own; those of the classes above it are added."""
    IN_MEMORY: ClassVar[bool] = False
    """Whether ``load`` returns requests that a program has and may change, so that nothing may keep them in its place."""

    limit: int | None = None
    """Number of requests to keep, from the first; None keeps all."""
    max_tokens: int = MAX_TOKENS
    """The most tokens of a prompt, and of a request's answers. More are an error: a wrong file would take for ever."""
    rate: float = 1.0
    """Divisor of arrival times; nothing else depends on it."""
    bigram: bool = False
    """EAGLE's keys: a page is known by its tokens and the one after it. So n tokens have (n - 1) // page_tokens full pages, and
    of a common prefix that ends with a page, that page is shared only if the next token is the same, too."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "limit", or_null=True, hint="null reads all requests")
        check_settings(self, Whole(1), "max_tokens")
        check_settings(self, Real(above=0), "rate", hint="1 keeps the recorded arrivals")

    @property
    def draws_at_random(self) -> bool:
        """Whether requests depend on the setting ``seed``."""
        return hasattr(self, "seed")

    @abstractmethod
    def load(self, page_tokens: int) -> Trace:
        """Load the trace with pages of ``page_tokens`` tokens.

        Raises TraceError for a file that cannot be used, and UsageError for a page size that does not fit the file's blocks.
        """

    def resolved(self) -> "TraceSource":
        """Return the source that is meant: another one where these settings leave the format open.

        Raises TraceError, and ValueError for a bad setting.
        """
        return self

    def files(self) -> list[str]:
        """Return the paths of the files that determine the requests; the first is the trace itself."""
        return []

    def page_names(self, page_tokens: int) -> dict[int, str]:
        """Return the tokens of each page id that ``load`` assigns, as text; empty if the trace does not contain tokens."""
        return {}

    def page_keys(self, page_tokens: int) -> Callable[[int], bytes]:
        """Return a function from page id to a 16-byte key, for pages that outlive the process.

        Equal keys mean equal pages with equal prefixes, across processes. Within one trace, ids already guarantee this, so the
        key hashes the id together with everything that determines ids: the page size, the settings except those of
        arrivals, and the content (not the path) of the file. Raises TraceError if the file cannot be read.
        """
        others = {name for cls in type(self).__mro__ for name in vars(cls).get("OF_ARRIVALS", ())}
        settings = {name: value for name, value in asdict(self).items() if name not in others}
        source = xxhash.xxh3_128(repr((type(self).__name__, page_tokens, sorted(settings.items()))).encode())
        for path in self.files():
            update_with_file(source, path)
        name = source.digest()
        return lambda page: xxhash.xxh3_128_digest(name + page.to_bytes(8, "little"))


def update_with_file(content: xxhash.xxh3_128, path: str) -> None:
    """Feed the bytes of a file to a hash."""
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                content.update(block)
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None


def name_pages(prompts: Iterable[tuple[Sequence[object], Iterable[Extent]]], page_tokens: int) -> dict[int, str]:
    """Return the text of each page, by page id; each prompt is given by its tokens and its extents of page ids."""
    names: dict[int, str] = {}
    for tokens, extents in prompts:
        pages = [start + at for start, length in extents for at in range(length)]
        for at, page in enumerate(pages):
            names.setdefault(page, " ".join(map(str, tokens[at * page_tokens : (at + 1) * page_tokens])))
    return names


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless a setting's value is one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


OF_MAX_TOKENS = "max_tokens sets the most"


def refuse_bigram(bigram: bool) -> None:
    """Raise ValueError if ``bigram`` is set for a trace of block ids."""
    if bigram:
        raise ValueError(
            "bigram must be false for traces of block ids: a page would be known by the token after it, too, which block ids do "
            "not tell; use trace=tokens or trace=synthetic"
        )


def check_page_tokens(page_tokens: int) -> None:
    """Raise UsageError unless a page has at least one token."""
    if not Whole(1).holds(page_tokens):
        raise UsageError(refusal("page_tokens", Whole(1), page_tokens))


def in_order_of_arrival(requests: list[Request] | StoredRequests) -> list[Request] | StoredRequests:
    """Return the requests sorted by arrival and numbered; ``after`` and ``joins``, positions in ``requests``, become indices.

    Raises UsageError for arrivals and delays that are no times.
    """
    check_times(requests)
    if isinstance(requests, StoredRequests):
        return requests.in_order()
    order = sorted(range(len(requests)), key=lambda position: requests[position].arrival_s)
    index_of = {position: index for index, position in enumerate(order)}
    for position, request in enumerate(requests):
        request.index = index_of[position]
        request.after = index_of.get(request.after, -1)
        if request.joins:
            request.joins = tuple(index_of[joined] for joined in request.joins)
    return [requests[position] for position in order]


def check_times(requests: Sequence[Request]) -> None:
    """Raise UsageError unless all arrivals and delays are times of at most ``MOST_SECONDS``."""
    for arrival_s, delay_s in zip(values_of(requests, "arrival_s"), values_of(requests, "delay_s"), strict=True):
        if 0 <= arrival_s <= MOST_SECONDS and 0 <= delay_s <= MOST_SECONDS:
            continue
        wrong = arrival_s if 0 <= delay_s <= MOST_SECONDS else delay_s
        raise UsageError(
            f"a request arrives after {wrong:g} s, but a trace may be {MOST_SECONDS:g} s long: check its times and the rate"
        )
