"""Requests per second of two published cache simulators on a Mooncake trace, each driven in its fastest way.

Neither receives requests one by one from Python: before the clock starts, the trace is written in the binary format of
its own C++ code, and its own C++ loop replays it.

libcachesim        flat LRU over page ids: a page hits wherever it is in a prompt; prefixes do not matter
kvcache-simulator  LRU over the leaves of a prefix trie: a page hits if every page before it hits

Run as a program, this file measures one of them and prints one line of JSON. ``OTHERS`` are simulators of serving, without the
work of these replays; a run or a download is tried, and says why they are not measured beside kvsim's simulation.
"""

import argparse
import gzip
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from measure import REPEATS
from numpy.typing import NDArray

BLOCK_TOKENS = 512
"""Tokens in one block of a Mooncake trace."""

EXTRA_POINTS = 4
"""Capacities added to a batch of kvcache-simulator to measure the cost of one more replay."""


class PeerUnavailable(Exception):
    """A peer cannot be measured here; the message gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class PeerTiming:
    """The fastest of ``REPEATS`` replays of a trace by one peer in one setting."""

    peer: str
    """Package name and version."""
    setting: str
    """What is tuned, and what the clock covers."""
    as_shipped: bool
    """Whether the settings are the package's defaults rather than fitted to this trace."""
    page_tokens: int
    requests: int
    seconds: float
    hits: int
    hit_unit: str
    """``pages`` over the whole trace, or prompt ``tokens`` over its second half."""

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True, kw_only=True)
class PagedTrace:
    """The prompts of a trace, one after another, as page ids; a trailing partial page counts as a page."""

    page_tokens: int
    ids: NDArray[np.uint32]
    tokens: NDArray[np.uint16]
    """Tokens in each page: ``page_tokens``, or fewer in the last page of a prompt."""
    request_ends: NDArray[np.uint32]
    """Where each prompt ends in ``ids``."""


def read_paged_trace(path: Path, page_tokens: int) -> PagedTrace:
    """Read a Mooncake trace, with each block cut into ``512 / page_tokens`` pages with their own ids."""
    if not 0 < page_tokens <= BLOCK_TOKENS or BLOCK_TOKENS % page_tokens:
        raise ValueError(f"page_tokens must divide {BLOCK_TOKENS}, not {page_tokens}")
    pages_per_block = BLOCK_TOKENS // page_tokens
    within_block = np.arange(pages_per_block, dtype=np.uint32)
    ids, tokens, pages = [], [], []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            record = json.loads(line)
            count = -(-record["input_length"] // page_tokens)
            blocks = np.array(record["hash_ids"], dtype=np.uint32)[:, None]
            ids.append((blocks * np.uint32(pages_per_block) + within_block).ravel()[:count])
            tokens.append(_page_weights(record["input_length"], page_tokens, count))
            pages.append(count)
    return PagedTrace(
        page_tokens=page_tokens,
        ids=np.concatenate(ids),
        tokens=np.concatenate(tokens),
        request_ends=np.cumsum(pages).astype(np.uint32),
    )


def _page_weights(prompt_tokens: int, page_tokens: int, count: int) -> NDArray[np.uint16]:
    weights = np.full(count, page_tokens, dtype=np.uint16)
    weights[-1] = prompt_tokens - (count - 1) * page_tokens
    return weights


def measure_libcachesim(trace: PagedTrace, *, capacity_pages: int) -> list[PeerTiming]:
    """Time LRU of libcachesim with its default hash table, and with one fitted to the capacity.

    The clock covers ``process_trace`` alone: its C++ loop over a memory-mapped file of 4-byte ids. Opening the file and
    creating the cache are excluded. The default table has 2^24 buckets, and touching them for the first time dominates a
    short trace; the fitted one has 4 to 8 buckets per page, the fastest found. Raises PeerUnavailable if the package is not
    installed.
    """
    lcs = _import("libcachesim")
    fitted = capacity_pages.bit_length() + 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.u32"
        trace.ids.tofile(path)
        return [
            _time_libcachesim(lcs, trace, path, capacity_pages, hashpower=hashpower, as_shipped=as_shipped)
            for hashpower, as_shipped in ((24, True), (fitted, False))
        ]


def _time_libcachesim(
    lcs: ModuleType, trace: PagedTrace, path: Path, capacity_pages: int, *, hashpower: int, as_shipped: bool
) -> PeerTiming:
    def replay() -> tuple[float, int]:
        layout = lcs.ReaderInitParam(binary_fmt_str="<I")
        layout.obj_id_field = 1
        reader = lcs.TraceReader(str(path), lcs.TraceType.BIN_TRACE, layout)
        cache = lcs.LRU(cache_size=capacity_pages, hashpower=hashpower)
        start = time.perf_counter()
        miss_rate, _ = cache.process_trace(reader)
        return time.perf_counter() - start, round((1 - miss_rate) * len(trace.ids))

    seconds, hits = _fastest(replay)
    return PeerTiming(
        peer=_name_and_version("libcachesim"),
        setting=f"{'default' if as_shipped else 'fitted'} hash table of 2^{hashpower} buckets",
        as_shipped=as_shipped,
        page_tokens=trace.page_tokens,
        requests=len(trace.request_ends),
        seconds=seconds,
        hits=hits,
        hit_unit="pages",
    )


def measure_kvcache_simulator(trace: PagedTrace, *, capacity_pages: int) -> list[PeerTiming]:
    """Time LRU of kvcache-simulator as one run of its C++ program, and as one more capacity in a run with several.

    The first includes starting the program, reading the binary trace and building the prefix trie. The second excludes all
    of that: it is taken from the difference between runs with ``1 + EXTRA_POINTS`` capacities and with one. Hits are
    those of the second half of the requests, the only ones it reports. Raises PeerUnavailable if the package
    is not installed or its core does not compile.
    """
    program = _compiled_core()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), *_write_trace(trace, Path(folder))]
        one, hits = _fastest(lambda: _run_core(command, [capacity_pages]))
        several, _ = _fastest(lambda: _run_core(command, [capacity_pages] * (1 + EXTRA_POINTS)))
    settings = {
        "one run, with its start and its prefix trie": one,
        "replay alone, its prefix trie given": (several - one) / EXTRA_POINTS,
    }
    return [
        PeerTiming(
            peer=_name_and_version("kvcache-simulator"),
            setting=setting,
            as_shipped=True,
            page_tokens=trace.page_tokens,
            requests=len(trace.request_ends),
            seconds=seconds,
            hits=hits,
            hit_unit="tokens",
        )
        for setting, seconds in settings.items()
    ]


def _compiled_core() -> Path:
    backend = _import("kvcache_sim.cpp_backend", package="kvcache-simulator")
    try:
        return Path(backend.ensure_cpp_simulator())
    except (RuntimeError, subprocess.CalledProcessError) as error:
        raise PeerUnavailable(f"kvcache-simulator needs a C++ compiler named c++: {error}") from error


def _write_trace(trace: PagedTrace, folder: Path) -> list[str]:
    """Write the three arrays that the C++ program reads; return its arguments."""
    arrays: dict[str, NDArray[Any]] = {"--ids": trace.ids, "--tokens": trace.tokens, "--request-ends": trace.request_ends}
    arguments = ["--request-count", str(len(trace.request_ends)), "--total-blocks", str(len(trace.ids))]
    for option, array in arrays.items():
        path = folder / option.strip("-")
        array.tofile(path)
        arguments += [option, str(path)]
    return [*arguments, "--warmup-requests", str(len(trace.request_ends) // 2)]


def _run_core(command: list[str], capacities: list[int]) -> tuple[float, int]:
    batch = ["--policy", "batch", "--policies", "lru", "--capacities", ",".join(map(str, capacities))]
    start = time.perf_counter()
    completed = subprocess.run([*command, *batch], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    return seconds, int(json.loads(completed.stdout)["points"][0]["lru"]["hitTokens"])


def _fastest(replay: Callable[[], tuple[float, int]]) -> tuple[float, int]:
    return min(replay() for _ in range(REPEATS))


def _import(module: str, package: str | None = None) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "pip install -r experiments/speed/requirements.txt"
        raise PeerUnavailable(f"{package or module} is not installed ({error}): {remedy}") from error


def _name_and_version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


PEERS: dict[str, Callable[..., list[PeerTiming]]] = {
    "libcachesim": measure_libcachesim,
    "kvcache-simulator": measure_kvcache_simulator,
}


OTHERS: dict[str, list[str]] = {
    "vidur": [
        *(sys.executable, "-m", "vidur.main", "--synthetic_request_generator_config_num_requests", "1"),
        *("--no-metrics_config_store_plots", "--no-metrics_config_write_metrics"),
    ],
    "LLMServingSim": ["git", "ls-remote", "https://github.com/casys-kaist/LLMServingSim", "HEAD"],
    "BLIS (inference-sim)": ["git", "ls-remote", "https://github.com/inference-sim/inference-sim", "HEAD"],
}
"""What is tried of simulators that are not measured: a run of one request, or to reach the source."""
TRY_S = 120


def why_not(name: str) -> str:
    """Try to run or to reach one of ``OTHERS``, and return in a line why it is not measured here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tried = subprocess.run(OTHERS[name], capture_output=True, text=True, timeout=TRY_S, cwd=folder)
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}"
    if not tried.returncode:
        return "it can be had here; no comparison with kvsim's simulation has been written"
    lines = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|fatal:", line)]
    return (errors or lines or [f"exit code {tried.returncode}"])[-1]


def main() -> None:
    """Print ``{"timings": [...]}``, or ``{"unavailable": reason}`` if the peer cannot be measured here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=(*PEERS, *OTHERS))
    parser.add_argument("trace", type=Path)
    parser.add_argument("--page-tokens", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--capacity-tokens", type=int, default=10_000 * BLOCK_TOKENS)
    arguments = parser.parse_args()
    answer: dict[str, Any]
    if arguments.peer in OTHERS:
        print(json.dumps({"unavailable": why_not(arguments.peer)}))
        return
    try:
        trace = read_paged_trace(arguments.trace, arguments.page_tokens)
        timings = PEERS[arguments.peer](trace, capacity_pages=arguments.capacity_tokens // arguments.page_tokens)
        answer = {"timings": [asdict(timing) for timing in timings]}
    except PeerUnavailable as reason:
        answer = {"unavailable": str(reason)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
