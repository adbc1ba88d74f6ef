"""How a trace is played against a server."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvsim.numbers import MOST_SECONDS, Real, Whole, check_settings
from kvsim.trace.base import check_choice

ENGINES = ("auto", "vllm", "sglang", "openai")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Which server is sent what, and when. A wrong value raises ValueError."""

    url: str
    """Its address, such as http://localhost:8000."""
    engine: str = "auto"
    """What it speaks: vllm, sglang, or openai for any other server with OpenAI's completions; auto asks it."""
    model: str | None = None
    """The name of the model that is to be asked; None: the one that the server has."""
    speed: float = 1.0
    """Divisor of the trace's times: arrivals, and pauses between the turns of a session. Only 1 with ``concurrency``."""
    concurrency: int | None = None
    """Requests under way at any time, in the order of the trace and without its times; None: they arrive when the trace says."""
    timeout_s: float = 600.0
    """Longest time that a request may take, from sending it to its last token."""
    reset: bool = True
    """Whether the server's cache is emptied before the run. A server that cannot do that is an error."""
    warmup_requests: int = 0
    """Requests before the run, of prompts that it does not have. The cache is emptied after them: nothing of them is left."""
    first_token_id: int = 1000
    """The lowest token id that prompts may have: special tokens of common models lie below, or above ``token_ids`` more."""
    token_ids: int = 29_000
    """How many consecutive token ids prompts may have."""
    max_late_s: float = 0.05
    """A run in which 1 of 100 requests was sent later than this, because of the client, is marked as the client's failure."""

    def __post_init__(self) -> None:
        check_address("url", self.url)
        check_choice("engine", self.engine, ENGINES)
        check_settings(self, Real(above=0), "speed", hint="1 keeps the trace's times")
        check_settings(self, Whole(1), "concurrency", or_null=True, hint="null sends requests when the trace says")
        check_settings(self, Real(above=0, most=MOST_SECONDS), "timeout_s", "max_late_s")
        check_settings(self, Whole(), "warmup_requests", "first_token_id")
        check_settings(self, Whole(2, most=1 << 30), "token_ids")
        if self.warmup_requests and not self.reset:
            raise ValueError("warmup_requests needs reset=true: the cache would begin with the warm-up's pages")
        if self.concurrency is not None and self.speed != 1:
            raise ValueError("speed has no effect with concurrency, which sends requests without the trace's times: drop one")


def check_address(name: str, url: str) -> None:
    """Raise ValueError, without a password in it, unless a setting is an address of HTTP without a user."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # which may be no number, or too large
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if "@" in (url.partition("//")[2] or url).partition("/")[0]:
        raise ValueError(f"{name} has a user or password, which pages and results would show: give the address without it")
    if not is_address:
        raise ValueError(f"{name} must be an address such as http://localhost:8000, not {url!r}")
