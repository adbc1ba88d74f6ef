"""Rates of a machine as functions of size, interpolated between measured points."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import exp, log
from operator import itemgetter
from typing import Any

from kvsim.numbers import MOST_SECONDS, Real, Whole, check_number, shown

Rows = list[Any]
"""Lists of numbers above 0. ``check_rows`` checks them, because OmegaConf rejects an integer where a list holds floats."""


@dataclass(kw_only=True)
class LinkCurves:
    """Copies between pinned host memory and one GPU, by fragment size: the bytes of one page in one layer.

    A copy of ``n`` bytes takes ``latency_s + n / bytes_per_s``. The first term dominates copies of a few fragments, the second
    copies of many; both depend on the fragment size.
    """

    host_to_device: list[Any]
    """Rows of [fragment_bytes, latency_s, bytes_per_s]."""
    device_to_host: list[Any]
    """Rows of [fragment_bytes, latency_s, bytes_per_s]."""
    both_directions: list[Any]
    """Rows of [fragment_bytes, bytes_per_s]: total rate while both directions are busy."""

    def __post_init__(self) -> None:
        for name in ("host_to_device", "device_to_host"):
            check_rows(f"link_curves.{name}", getattr(self, name), "fragment_bytes", "latency_s", "bytes_per_s")
        check_rows("link_curves.both_directions", self.both_directions, "fragment_bytes", "bytes_per_s")

    def to_device(self, fragment_bytes: float) -> tuple[float, float]:
        """Return the rate in bytes per second and the latency in seconds of copies to the GPU."""
        return _rate_and_latency(self.host_to_device, fragment_bytes)

    def to_host(self, fragment_bytes: float) -> tuple[float, float]:
        """Return the rate in bytes per second and the latency in seconds of copies to the host."""
        return _rate_and_latency(self.device_to_host, fragment_bytes)

    def total_bytes_per_s(self, fragment_bytes: float) -> float:
        """Return the total rate of both directions while both are busy."""
        return interpolated(self.both_directions, fragment_bytes)


@dataclass(kw_only=True)
class DiskCurves:
    """A disk that reads and writes whole pages, one I/O request per page, several requests at a time."""

    read: list[Any]
    """Rows of [depth, page_bytes, bytes_per_s]; depth is the number of concurrent requests."""
    write: list[Any]
    """Rows of [depth, page_bytes, bytes_per_s]."""
    both: list[Any] | None = None
    """Rows of [depth, page_bytes, bytes_per_s]: total rate of concurrent reads and writes, ``depth`` requests of each.
    None: reads and writes do not slow each other down."""
    depth: int = 4
    """Concurrent requests in the current run: the number of its disk threads."""

    def __post_init__(self) -> None:
        for name in ("read", "write"):
            self._check(name)
        if self.both is not None:
            self._check("both")
        check_number("disk_curves.depth", Whole(1), self.depth)

    def read_bytes_per_s(self, page_bytes: float) -> float:
        return interpolated_twice(self.read, self.depth, page_bytes)

    def write_bytes_per_s(self, page_bytes: float) -> float:
        return interpolated_twice(self.write, self.depth, page_bytes)

    def total_bytes_per_s(self, page_bytes: float) -> float | None:
        """Return the limit on the total rate of concurrent reads and writes, or None if there is no limit."""
        return None if self.both is None else interpolated_twice(self.both, self.depth, page_bytes)

    def _check(self, name: str) -> None:
        check_rows(f"disk_curves.{name}", getattr(self, name), "depth", "page_bytes", "bytes_per_s", keys=2)


@dataclass(kw_only=True)
class ComputeCurves:
    """The parts of a step on one GPU. A step takes their sum plus ``step_overhead_s``.

    The points are measured with one model but keyed by what determines the speed of each part, so they hold for other models.
    """

    linear: list[Any]
    """All matrix products: rows of [flops_per_byte, flops_per_s], by the step's FLOPs per byte of weights that it reads.
    For a dense bf16 model this equals the number of tokens: few tokens are bound by memory, many by compute."""
    prefill_attention: list[Any]
    """Attention of a chunk: rows of [query_rows, context_tokens, flops_per_s]. A chunk's query rows are its tokens times the
    query heads; its context includes the chunk. Below the smallest measured number of rows the time stays the same, because a
    GPU processes that many rows at once."""
    decode_attention: list[Any]
    """Attention of all decoding requests: rows of [bytes, bytes_per_s], by the bytes of keys and values that one layer reads."""
    repeated_context_share: float = 1.0
    """Time of attention over context that another decoding request has in common, after the first of them, as a fraction of that
    over context of its own: a GPU may find it in its cache. 1: it makes no difference."""
    repeated_context_bytes: float | None = None
    """Keys and values of one layer that the GPU's cache holds: if different contexts are longer together, only this share of what
    is repeated is read faster. None: all of it."""
    scan: list[Any] | None = None
    """Recurrence of a chunk: rows of [tokens, elements_per_s], where each token counts all elements of a sequence's state once.
    Below the smallest measured number of tokens the time stays the same. None: the recurrence is counted as matrix products, and
    states are read and written at the rate of GPU memory."""
    state_update: list[Any] | None = None
    """Recurrence of all decoding requests: rows of [bytes, bytes_per_s], by the bytes of states that one layer reads and writes.
    None if ``scan`` is."""
    pads_chunks: bool = False
    """Whether the attention of each chunk takes as long as for the queries of the longest chunk of its step. So does SGLang's
    Triton kernel (0.5.15, ``extend_attention.py``): it starts as many blocks of queries for each chunk, and none ends early."""
    prefill_tile_tokens: int = 1
    """Steps with prefill, and the attention of each chunk, take as long as for the next multiple of this many tokens: matrix
    products are padded (beyond 16,384 tokens to coarser multiples, which is not simulated), and kernels work in tiles."""
    rested_prefill_share: float = 1.0
    """Duration of a step with prefill on a rested GPU, as a fraction of its duration on a busy GPU, which the curves give."""
    warming_s: float = 0.5
    """Time constant with which prefill turns a rested GPU into a busy one, and with which a busy GPU rests otherwise."""

    def __post_init__(self) -> None:
        check_number("compute_curves.repeated_context_share", Real(least=0, most=1), self.repeated_context_share)
        if self.repeated_context_bytes is not None:
            check_number("compute_curves.repeated_context_bytes", Real(above=0), self.repeated_context_bytes)
        check_number("compute_curves.prefill_tile_tokens", Whole(1), self.prefill_tile_tokens)
        check_number("compute_curves.rested_prefill_share", Real(above=0, most=1), self.rested_prefill_share)
        check_number("compute_curves.warming_s", Real(above=0, most=MOST_SECONDS), self.warming_s)
        check_rows("compute_curves.linear", self.linear, "flops_per_byte", "flops_per_s")
        check_rows(
            "compute_curves.prefill_attention", self.prefill_attention, "query_rows", "context_tokens", "flops_per_s", keys=2
        )
        check_rows("compute_curves.decode_attention", self.decode_attention, "bytes", "bytes_per_s")
        if (self.scan is None) != (self.state_update is None):
            raise ValueError("compute_curves.scan and compute_curves.state_update: set both or neither")
        if self.scan is not None and self.state_update is not None:
            check_rows("compute_curves.scan", self.scan, "tokens", "elements_per_s")
            check_rows("compute_curves.state_update", self.state_update, "bytes", "bytes_per_s")
        seconds = [n_bytes / rate for n_bytes, rate in self.decode_attention]
        if seconds != sorted(seconds):
            raise ValueError("compute_curves.decode_attention: more bytes must not take less time than fewer bytes")

    def repeated_saving(self, different_bytes: float) -> float:
        """Return the share of the time of repeated context that is saved; a layer has so many bytes of different contexts."""
        kept = self.repeated_context_bytes
        held = 1.0 if kept is None or different_bytes <= kept else kept / different_bytes
        return held * (1.0 - self.repeated_context_share)

    def tiled(self, tokens: int) -> int:
        """Round the tokens of a step with prefill, or of a chunk, up to whole tiles."""
        return -(-tokens // self.prefill_tile_tokens) * self.prefill_tile_tokens

    def linear_flops_per_s(self, flops_per_byte: float) -> float:
        return interpolated(self.linear, flops_per_byte)

    def prefill_attention_flops_per_s(self, query_rows: float, context_tokens: float) -> float:
        fewest: float = self.prefill_attention[0][0]
        return interpolated_twice(self.prefill_attention, query_rows, context_tokens) * min(1.0, query_rows / fewest)

    def scan_elements_per_s(self, tokens: int) -> float:
        """Return the rate of the recurrence of a chunk of ``tokens`` tokens; ``scan`` must not be None."""
        assert self.scan is not None
        fewest: float = self.scan[0][0]
        return interpolated(self.scan, tokens) * min(1.0, tokens / fewest)

    def state_bytes_per_s(self, n_bytes: float) -> float:
        """Return the rate at which a layer reads and writes ``n_bytes`` of states; ``state_update`` must not be None."""
        assert self.state_update is not None
        return interpolated(self.state_update, n_bytes)


def interpolated(rows: Rows, x: float, column: int = 1, along: int = 0) -> float:
    """Interpolate ``column`` where column ``along`` is ``x``: linear between the logarithms of both, constant outside the rows.

    Below the device's peak, a rate grows like a power of the size; at the peak it is constant. Both are straight lines in
    logarithms.
    """
    index = bisect_right(rows, x, key=itemgetter(along))
    if index == 0 or index == len(rows):
        return float(rows[min(index, len(rows) - 1)][column])
    below, above = rows[index - 1], rows[index]
    return _between(below[along], below[column], above[along], above[column], x)


def interpolated_twice(rows: Rows, x: float, y: float) -> float:
    """Interpolate the last of three columns at ``x`` and ``y``: along ``y`` at both neighbours of ``x``, then between them."""
    index = bisect_right(rows, x, key=itemgetter(0))
    if index == 0 or index == len(rows):
        return _along(rows, rows[min(index, len(rows) - 1)][0], y)
    below, above = rows[index - 1][0], rows[index][0]
    return _between(below, _along(rows, below, y), above, _along(rows, above, y), x)


def check_rows(name: str, rows: Rows, *columns: str, keys: int = 1) -> None:
    """Raise ValueError unless ``rows`` are rows of positive numbers with these columns, ascending by the first ``keys``."""
    form = f"{name} must be rows of [{', '.join(columns)}]"
    if not rows:
        raise ValueError(f"{form}, at least one")
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns) or not all(Real(above=0).holds(value) for value in row):
            raise ValueError(f"{form} with all values above 0, not {shown(row)}")
    order = [tuple(row[:keys]) for row in rows]
    if order != sorted(set(order)):
        raise ValueError(f"{form} in ascending order of {' and '.join(columns[:keys])}, without duplicates")


def _rate_and_latency(rows: Rows, fragment_bytes: float) -> tuple[float, float]:
    return interpolated(rows, fragment_bytes, 2), interpolated(rows, fragment_bytes, 1)


def _along(rows: Rows, first: float, y: float) -> float:
    begin, end = (bisect(rows, first, key=itemgetter(0)) for bisect in (bisect_left, bisect_right))
    return interpolated(rows[begin:end], y, column=2, along=1)


def _between(x0: float, y0: float, x1: float, y1: float, x: float) -> float:
    return y0 * exp(log(y1 / y0) * log(x / x0) / log(x1 / x0))
