"""What a machine does at other sizes than those at which it is fastest: rates as curves through measured points."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import exp, log
from operator import itemgetter
from typing import Any

Rows = list[Any]
"""Lists of numbers above 0. ``check_rows`` looks at them; OmegaConf would take no whole number for a float inside a list."""


@dataclass(kw_only=True)
class LinkCurves:
    """Copies between pinned host memory and one GPU, by the bytes that a page has in one layer (a fragment).

    A copy of ``n`` bytes takes ``latency_s + n / bytes_per_s``; a few fragments are slow because of the first, many small ones
    because of the second.
    """

    host_to_device: list[Any]
    """Rows of [fragment_bytes, latency_s, bytes_per_s]."""
    device_to_host: list[Any]
    """The same."""
    both_directions: list[Any]
    """Rows of [fragment_bytes, bytes_per_s]: the sum while both directions are busy."""

    def __post_init__(self) -> None:
        for name in ("host_to_device", "device_to_host"):
            check_rows(f"link_curves.{name}", getattr(self, name), "fragment_bytes", "latency_s", "bytes_per_s")
        check_rows("link_curves.both_directions", self.both_directions, "fragment_bytes", "bytes_per_s")

    def to_device(self, fragment_bytes: float) -> tuple[float, float]:
        """Rate in bytes a second and latency in seconds."""
        return _rate_and_latency(self.host_to_device, fragment_bytes)

    def to_host(self, fragment_bytes: float) -> tuple[float, float]:
        """Rate in bytes a second and latency in seconds."""
        return _rate_and_latency(self.device_to_host, fragment_bytes)

    def total_bytes_per_s(self, fragment_bytes: float) -> float:
        """Limit of the sum of both directions while both are busy."""
        return interpolated(self.both_directions, fragment_bytes)


@dataclass(kw_only=True)
class DiskCurves:
    """A disk that reads or writes whole pages, each by a request of its own, several at once."""

    read: list[Any]
    """Rows of [depth, page_bytes, bytes_per_s]; the depth is how many requests are under way."""
    write: list[Any]
    """The same."""
    both: list[Any] | None = None
    """Rows of [depth, page_bytes, bytes_per_s]: the sum while pages are read and others written, so many of each at once.
    None: reading and writing do not slow each other down."""
    depth: int = 4
    """Requests under way at once in the run at hand: the threads of its disk tier."""

    def __post_init__(self) -> None:
        for name in ("read", "write"):
            self._check(name)
        if self.both is not None:
            self._check("both")
        if self.depth < 1:
            raise ValueError(f"disk_curves.depth must be at least 1, not {self.depth}")

    def read_bytes_per_s(self, page_bytes: float) -> float:
        return interpolated_twice(self.read, self.depth, page_bytes)

    def write_bytes_per_s(self, page_bytes: float) -> float:
        return interpolated_twice(self.write, self.depth, page_bytes)

    def total_bytes_per_s(self, page_bytes: float) -> float | None:
        """Limit of the sum while pages are read and written at once, if there is one."""
        return None if self.both is None else interpolated_twice(self.both, self.depth, page_bytes)

    def _check(self, name: str) -> None:
        check_rows(f"disk_curves.{name}", getattr(self, name), "depth", "page_bytes", "bytes_per_s", keys=2)


@dataclass(kw_only=True)
class ComputeCurves:
    """The parts of a step on one GPU. A step takes their sum and ``step_overhead_s``.

    The points are of one model, and described so that they hold for others: by what decides how fast a part runs.
    """

    linear: list[Any]
    """All matrix products: rows of [flops_per_byte, flops_per_s], by FLOPs of the step for each byte of weights that it reads.
    With bf16 weights of a dense model that is the number of tokens; few are bound by memory, many by compute."""
    prefill_attention: list[Any]
    """Attention of a chunk: rows of [query_rows, context_tokens, flops_per_s]. A chunk has its tokens times the query heads
    as rows; the context ends with the chunk. Fewer rows than the fewest measured take as long: a GPU does them at once."""
    decode_attention: list[Any]
    """Attention of all decoding requests: rows of [bytes, bytes_per_s], by the bytes of keys and values that one layer reads."""
    prefill_tile_tokens: int = 1
    """A step with prefill, and the attention of each chunk, take as long as for the next multiple of so many tokens: products are
    filled up (beyond 16,384 tokens to coarser steps, which is not simulated), and kernels work in tiles."""
    rested_prefill_share: float = 1.0
    """What a step with prefill takes on a GPU that has rested, as a share of what the curves say of one that is busy."""
    warming_s: float = 0.5
    """Time constant with which prefill makes a rested GPU a busy one, and anything else a busy one rest."""

    def __post_init__(self) -> None:
        if self.prefill_tile_tokens < 1:
            raise ValueError(f"compute_curves.prefill_tile_tokens must be at least 1, not {self.prefill_tile_tokens}")
        if not 0 < self.rested_prefill_share <= 1:
            raise ValueError(f"compute_curves.rested_prefill_share must be above 0, 1 at most, not {self.rested_prefill_share}")
        if not 0 < self.warming_s < float("inf"):
            raise ValueError(f"compute_curves.warming_s must be above 0, not {self.warming_s}")
        check_rows("compute_curves.linear", self.linear, "flops_per_byte", "flops_per_s")
        check_rows(
            "compute_curves.prefill_attention", self.prefill_attention, "query_rows", "context_tokens", "flops_per_s", keys=2
        )
        check_rows("compute_curves.decode_attention", self.decode_attention, "bytes", "bytes_per_s")
        seconds = [n_bytes / rate for n_bytes, rate in self.decode_attention]
        if seconds != sorted(seconds):
            raise ValueError("compute_curves.decode_attention: more bytes must take longer than fewer")

    def tiled(self, tokens: int) -> int:
        """``tokens`` of a step with prefill, or of a chunk, filled up to whole tiles."""
        return -(-tokens // self.prefill_tile_tokens) * self.prefill_tile_tokens

    def linear_flops_per_s(self, flops_per_byte: float) -> float:
        return interpolated(self.linear, flops_per_byte)

    def prefill_attention_flops_per_s(self, query_rows: float, context_tokens: float) -> float:
        fewest: float = self.prefill_attention[0][0]
        return interpolated_twice(self.prefill_attention, query_rows, context_tokens) * min(1.0, query_rows / fewest)


def interpolated(rows: Rows, x: float, column: int = 1, along: int = 0) -> float:
    """The value of ``column`` at ``x`` of column ``along``: a straight line between the logarithms of both, constant outside.

    Rates grow like a power of the size where something else than the device's peak limits them, and saturate: on logarithms
    both are straight.
    """
    index = bisect_right(rows, x, key=itemgetter(along))
    if index == 0 or index == len(rows):
        return float(rows[min(index, len(rows) - 1)][column])
    below, above = rows[index - 1], rows[index]
    return _between(below[along], below[column], above[along], above[column], x)


def interpolated_twice(rows: Rows, x: float, y: float) -> float:
    """The last of three columns at ``x`` and ``y``: along ``y`` for the neighbours of ``x``, then between these."""
    index = bisect_right(rows, x, key=itemgetter(0))
    if index == 0 or index == len(rows):
        return _along(rows, rows[min(index, len(rows) - 1)][0], y)
    below, above = rows[index - 1][0], rows[index][0]
    return _between(below, _along(rows, below, y), above, _along(rows, above, y), x)


def check_rows(name: str, rows: Rows, *columns: str, keys: int = 1) -> None:
    """Raise ValueError unless there are rows of numbers above 0 with these columns, ascending by the first ``keys``."""
    form = f"{name} must be rows of [{', '.join(columns)}]"
    if not rows:
        raise ValueError(f"{form}, one at least")
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns) or not all(_is_positive(value) for value in row):
            raise ValueError(f"{form}, all above 0, not {row}")
    order = [tuple(row[:keys]) for row in rows]
    if order != sorted(set(order)):
        raise ValueError(f"{form}, ascending by {' and '.join(columns[:keys])}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _rate_and_latency(rows: Rows, fragment_bytes: float) -> tuple[float, float]:
    return interpolated(rows, fragment_bytes, 2), interpolated(rows, fragment_bytes, 1)


def _along(rows: Rows, first: float, y: float) -> float:
    begin, end = (bisect(rows, first, key=itemgetter(0)) for bisect in (bisect_left, bisect_right))
    return interpolated(rows[begin:end], y, column=2, along=1)


def _between(x0: float, y0: float, x1: float, y1: float, x: float) -> float:
    return y0 * exp(log(y1 / y0) * log(x / x0) / log(x1 / x0))
