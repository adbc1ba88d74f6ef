"""Measures the rates of page copies between GPU and host, by fragment size."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import harmonic_mean

import numpy as np
import torch

from kvsim.calibration.method_rates import Pair, derived_rule, fewest_programs
from kvsim.hardware.copy_rule import METHODS, CopyRule, Method
from kvsim.hardware.curves import LinkCurves, Rows
from kvsim.substrate.hardware.memory.tier_copy import WAYS, TierCopy, Way
from kvsim.substrate.hardware.stopwatch import Stopwatch

LEAST_LATENCY_S = 1e-7
LOADS: tuple[Method, ...] = ("kernel", "staged")


class LinkRates:
    """Copies between two buffers of ``pool_bytes``, one in GPU memory and one pinned, used as pools of ``layers`` layers.

    Pages are in random order on both sides, as in a cache that has been in use. Use it in a ``with`` block.
    """

    def __init__(self, watch: Stopwatch, *, layers: int, pool_bytes: int, seed: int) -> None:
        device = watch.device
        self.watch, self.layers = watch, layers
        self.rng = np.random.default_rng(seed)
        self.gpu = torch.empty(pool_bytes, dtype=torch.uint8, device=device).random_(0, 256)
        self.host = torch.empty(pool_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.host.copy_(self.gpu)
        self.ways = Ways(device)
        self.rule = CopyRule()

    def __enter__(self) -> "LinkRates":
        return self

    def __exit__(self, *_: object) -> None:
        self.ways.close()

    def find_rule(
        self,
        fragments: Sequence[int],
        *,
        list_bytes: int,
        programs: Sequence[int],
        paces: Sequence[float],
        both_bytes_per_s: float,
    ) -> CopyRule:
        """Measure the methods with lists of ``list_bytes``, derive the rule, and use it from here on.

        ``paces`` are rates of a kernel that stores during loads, as shares of half of ``both_bytes_per_s``, the rate of plain
        copies both ways.
        """
        by_programs: dict[int, float] = {}
        for count in programs:
            self.rule = CopyRule(programs=count)
            rates = [self._rate(size, list_bytes, way, "kernel") for size in fragments for way in WAYS]
            by_programs[count] = harmonic_mean(rates)
        self.rule = CopyRule(programs=fewest_programs(by_programs))
        cells = [(way, method, size) for size in fragments for method in METHODS for way in WAYS]
        alone = {(way, method, size): self._rate(size, list_bytes, way, method) for way, method, size in cells}
        pairs = []
        for size in fragments:
            for pace in (share * both_bytes_per_s / 2 for share in paces):
                tiers = self._tiers(size, replace(self.rule, store_beside_load_bytes_per_s=pace))
                pairs += [Pair(size, load, pace, self._both(tiers, load, "kernel")) for load in LOADS]
        self.rule = derived_rule(alone, pairs, layers=self.layers, programs=self.rule.programs)
        return self.rule

    def curves(self, fragments: Sequence[int], copies: Sequence[int]) -> LinkCurves:
        """Measure curves at these fragment sizes, from copies of these sizes in bytes, at least one page each.

        Rates of both directions together come from long copies.
        """
        to_device: Rows = []
        to_host: Rows = []
        both: Rows = []
        for fragment_bytes in fragments:
            tiers = self._tiers(fragment_bytes)
            to_device.append([fragment_bytes, *self._fit(tiers, partial(load_layerwise, tiers), copies)])
            to_host.append([fragment_bytes, *self._fit(tiers, tiers.store, copies)])
            both.append([fragment_bytes, self._both(tiers)])
        return LinkCurves(host_to_device=to_device, device_to_host=to_host, both_directions=both)

    def peaks(self) -> dict[str, float]:
        """Measure the rates of plain copies, by their names in HardwareSpec."""
        gpu, host, half = self.gpu, self.host, len(self.gpu) // 2
        down = [lambda: gpu[:half].copy_(host[:half], non_blocking=True)]
        up = [lambda: host[half:].copy_(gpu[half:], non_blocking=True)]
        rates = [len(way) * half / self.watch.seconds(lambda way=way: self.ways.start(*way)) for way in (down, up, down + up)]  # type: ignore[misc]
        names = ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "both_directions_bytes_per_s")
        return dict(zip(names, [*rates[:2], max(rates)], strict=True))

    def repeated(self, fragment_bytes: int, n_bytes: int, count: int) -> tuple[list[float], list[float]]:
        """Return the times of ``count`` equal loads and as many equal stores, of ``n_bytes`` but at least one page."""
        tiers = self._tiers(fragment_bytes)
        pages = min(len(tiers.host), max(1, n_bytes // tiers.page_bytes))
        gpu, host = (self.rng.permutation(len(tiers.host))[:pages] for _ in range(2))
        load, store = partial(load_layerwise, tiers, host, gpu), partial(tiers.store, gpu, host)
        return self.watch.times(load, count), self.watch.times(store, count)

    def _tiers(self, fragment_bytes: int, rule: CopyRule | None = None) -> TierCopy:
        pages = len(self.gpu) // (fragment_bytes * self.layers)
        end = pages * fragment_bytes * self.layers
        gpu, host = self.gpu[:end].view(self.layers, pages, -1), self.host[:end].view(pages, self.layers, -1)
        return TierCopy(gpu, host, rule or self.rule)

    def _fit(self, tiers: TierCopy, copy: Callable[..., None], copies: Sequence[int]) -> list[float]:
        """Fit latency and rate to copies of several sizes, minimizing relative errors."""
        pool_pages = len(tiers.host)
        counts = sorted({min(pool_pages, max(1, n_bytes // tiers.page_bytes)) for n_bytes in copies})
        times = []
        for count in counts:
            lists = self.rng.permutation(pool_pages)[:count], self.rng.permutation(pool_pages)[:count]
            times.append(self.watch.seconds(lambda lists=lists: copy(*lists)))  # type: ignore[misc]
        return list(fitted(np.array(counts) * tiers.page_bytes, np.array(times)))

    def _rate(self, fragment_bytes: int, list_bytes: int, way: Way, method: Method) -> float:
        """Measure the rate of one long list, in bytes per second."""
        tiers = self._tiers(fragment_bytes)
        count = min(len(tiers.host), max(1, list_bytes // tiers.page_bytes))
        gpu, host = (self.rng.permutation(len(tiers.host))[:count] for _ in range(2))
        copy = partial(tiers.load, host, gpu, method) if way == "load" else partial(tiers.store, gpu, host, method)
        return count * tiers.page_bytes / self.watch.seconds(copy)

    def _both(self, tiers: TierCopy, load_by: Method | None = None, store_by: Method | None = None) -> float:
        """Measure the total rate of both directions, each copying half of the pool, by the given methods or by the rule's."""
        pool_pages = len(tiers.host)
        count = max(1, pool_pages // 2)
        gpu, host = self.rng.permutation(pool_pages), self.rng.permutation(pool_pages)
        load = lambda: tiers.load(host[:count], gpu[:count], load_by, is_shared=True)  # noqa: E731
        store = lambda: tiers.store(gpu[count : 2 * count], host[count : 2 * count], store_by, is_shared=True)  # noqa: E731
        return 2 * count * tiers.page_bytes / self.watch.seconds(lambda: self.ways.start(load, store))


def load_layerwise(tiers: TierCopy, host_pages: np.ndarray, gpu_pages: np.ndarray) -> None:
    """Load pages as a run does: in groups of layers."""
    tiers.load(host_pages, gpu_pages, layers_at_once=tiers.layerwise(len(host_pages)))


class Ways:
    """Two threads, each with its own stream on a GPU, so that copies in both directions are submitted and run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = ThreadPoolExecutor(2)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.threads.shutdown()

    def start(self, *actions: Callable[[], object]) -> None:
        """Start all actions; the current stream waits until they have ended. Without a GPU they run one after another."""
        if not self.streams:
            for action in actions:
                action()
            return
        caller = torch.cuda.current_stream(self.device)
        streams = self.streams[: len(actions)]

        def run(stream: torch.cuda.Stream, action: Callable[[], object]) -> None:
            with torch.cuda.stream(stream):
                stream.wait_stream(caller)
                action()

        list(self.threads.map(run, streams, actions))
        for stream in streams:
            caller.wait_stream(stream)


def fitted(n_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return latency and rate, both above 0, of the line that fits these points with the least relative squared error."""
    sides = np.stack([1 / seconds, n_bytes / seconds], axis=1)
    latency_s, byte_s = np.linalg.lstsq(sides, np.ones(len(seconds)), rcond=None)[0].tolist()
    if len(seconds) == 1 or byte_s <= 0:
        return LEAST_LATENCY_S, float((n_bytes / seconds).max())
    return max(latency_s, LEAST_LATENCY_S), 1 / byte_s
