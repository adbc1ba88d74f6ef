"""A server of kvsim's own for tests: speaks vLLM's or SGLang's dialect on a port of this machine, and answers by simulation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong. Requests are numbered in the order in which they reach the server, from 0."""

    status: dict[int, int] | None = None
    """The HTTP status that answers a request, by its number."""
    cut: frozenset[int] = frozenset()
    """Requests whose stream is cut after the first token."""
    silent: frozenset[int] = frozenset()
    """Requests that are never answered."""
    without_usage: bool = False
    without_reset: bool = False
    dies_after: int | None = None
    """The server stops when it has this many requests."""


NO_FAULTS = Faults()


@contextmanager
def emulated(
    overrides: Sequence[str], *, dialect: str = "vllm", speed: float = 1.0, faults: Faults = NO_FAULTS, model: str = "emulated"
) -> Iterator[str]:
    """Serve with the simulation that these overrides of ``kvsim simulate`` describe, ``speed`` times as fast as in real time.

    Yields the server's address.
    """
    raise NotImplementedError
    yield ""
