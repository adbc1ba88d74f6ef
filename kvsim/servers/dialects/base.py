"""The contract of dialects: how an engine is asked, and how its answers are read."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsim.results.observed import ServerFacts
from kvsim.servers.answer import Answer
from kvsim.servers.http import Http


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a server before a run."""

    facts: ServerFacts
    models: Sequence[str] = ()
    """The names of its models; empty if it does not list them."""
    longest_tokens: int | None = None
    """The most tokens of a prompt and its answer together."""
    engines: int = 1
    """Copies of the model behind this address, each with a cache of its own (data parallelism)."""


def kept(flags: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """Return the flags of these names that are numbers or words. The others may be keys, addresses and paths of the server."""
    return {name: value for name, value in flags.items() if name in names and not isinstance(value, dict | list)}


class Dialect(ABC):
    """What one engine speaks. Has no state."""

    engine: ClassVar[str]
    path: ClassVar[str]
    """Where requests are sent."""
    tells_cached: ClassVar[str]
    """How to make the server say how many tokens of a prompt were cached."""
    omits_zero: ClassVar[bool] = False
    """Whether some versions do not say it of a prompt of which none was."""

    @abstractmethod
    def body(self, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        """Return the body of a request for exactly ``output_tokens`` tokens, streamed."""

    @abstractmethod
    def read(self, event: bytes, answer: Answer) -> bool:
        """Take an event of the stream into the answer. Returns whether it brings tokens.

        Raises Failed if it reports a failure, and ValueError if it is no such event.
        """

    @abstractmethod
    async def know(self, http: Http) -> Known:
        """Ask the server about itself. Raises UsageError if it does not answer."""

    @abstractmethod
    async def reset(self, http: Http) -> str:
        """Empty the server's cache. Returns a line if it may not be empty, else nothing. Raises UsageError if it is not."""
