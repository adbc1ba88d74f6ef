"""Is a trace of more than a billion page accesses replayed in minutes, and in memory that does not grow with it?

The trace is generated. Its size is that of the traces published with "When Fancy Eviction Fails" (arXiv:2609.28870), both
together: 843,365 requests, 1.26 billion accesses to blocks of 16 tokens. Prompts have 1,494 blocks on average, about 212 of them
new, as there, and go on from a common beginning, from an earlier turn, or from the middle of one. Claims:

time      read, stored, replayed through LRU on one tier and written to its files within 10 minutes of processor time
memory    one tenth of the requests and all of them, in the same tier: the peak grows by less than 250 bytes per request

``--share`` measures a part of the trace only, to which the time is compared in proportion. Exits with 1 if a claim fails. Every
measurement is a process of its own; its table is billion.md.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from results import machine

from kvsim.installation import build_name

HERE = Path(__file__).resolve().parent
REQUESTS = 843_365
SPAN_S = 604_800.0
BLOCK_TOKENS = 16
LONGEST_BLOCKS = 16_374
CONVERSATIONS = 2_000
BEGINNINGS = 16
BEGINNING_BLOCKS = 400
NEW_BLOCKS = 212
ENDS = 0.18
"""Share of requests that begin a conversation anew."""
GOES_BACK = 0.1
"""Share of the others that go on from the middle of an earlier turn."""
CAPACITY = "2000000pages"
MOST_S = 600.0
MOST_BYTES_PER_REQUEST = 250

Extents = list[tuple[int, int]]


def prompts(requests: int, rng: np.random.Generator) -> Iterator[tuple[int, Extents]]:
    """Yield the session of each request and its blocks, as extents of ids that count up in the order of their first use."""
    next_id = next_session = 0
    beginnings: list[Extents] = []
    conversations: list[Extents] = [[] for _ in range(CONVERSATIONS)]
    sessions = [0] * CONVERSATIONS
    for _ in range(requests):
        at = int(rng.integers(CONVERSATIONS))
        new = int(rng.geometric(1 / NEW_BLOCKS))
        path = conversations[at]
        if not path or rng.random() < ENDS or sum(blocks for _, blocks in path) + new > LONGEST_BLOCKS:
            if len(beginnings) < BEGINNINGS:
                beginnings.append([(next_id, BEGINNING_BLOCKS)])
                next_id += BEGINNING_BLOCKS
                path = beginnings[-1]
            else:
                path = beginnings[int(rng.integers(BEGINNINGS))]
            sessions[at] = next_session
            next_session += 1
        elif len(path) > 1 and rng.random() < GOES_BACK:
            start, blocks = path[-1]
            path = [*path[:-1], (start, 1 + int(rng.integers(blocks)))]
        conversations[at] = path = [*path, (next_id, new)]
        next_id += new
        yield sessions[at], path


def write_trace(path: Path, requests: int, *, seed: int = 0) -> int:
    """Write a trace in Mooncake's format, with packed ids, and return its number of block accesses."""
    rng = np.random.default_rng(seed)
    now_ms, accesses = 0.0, 0
    with path.open("w") as file:
        for session, extents in prompts(requests, rng):
            blocks = sum(length for _, length in extents)
            accesses += blocks
            line = {
                "timestamp": round(now_ms, 3),
                "input_length": blocks * BLOCK_TOKENS,
                "output_length": int(rng.geometric(1 / 300)),
                "session_id": session,
                "hash_ids_rle": [number for extent in extents for number in extent],
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            now_ms += float(rng.exponential(1000 * SPAN_S / REQUESTS))
    return accesses


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of the command line over a trace."""

    requests: int
    accesses: int
    megabytes: float
    """Size of the trace file."""
    processor_s: float
    elapsed_s: float
    peak_bytes: int
    load_s: float
    replay_s: float
    page_hit_rate: float


def measure(trace: Path, requests: int, accesses: int, command: str) -> Measured:
    """Run kvsim once over a trace in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["trace=mooncake", f"trace.path={trace}", f"trace.block_tokens={BLOCK_TOKENS}", f"page_tokens={BLOCK_TOKENS}",
                 f"tiers.gpu.capacity={CAPACITY}", f"output={folder}/run"]  # fmt: skip
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
        program = subprocess.Popen([sys.executable, "-m", "kvsim", command, *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(program.pid, 0)
        elapsed_s = perf_counter() - began
        if status:
            sys.exit(f"kvsim {command} failed")
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
    del before
    return Measured(
        requests=requests,
        accesses=accesses,
        megabytes=trace.stat().st_size / 1e6,
        processor_s=used.ru_utime + used.ru_stime,
        elapsed_s=elapsed_s,
        peak_bytes=used.ru_maxrss * 1024,
        load_s=float(result["load_s"]),
        replay_s=float(result["wall_s"]),
        page_hit_rate=float(result["page_hit_rate"]),
    )


def main() -> int:
    """Measure, print and write the table. Returns 1 if a claim fails."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="part of the requests that is measured")
    parser.add_argument("--command", default="replay")
    parser.add_argument("--make", type=Path, help="only write the trace, to this file")
    options = parser.parse_args()
    if options.make:
        print(f"{write_trace(options.make, round(REQUESTS * options.share)):,} accesses")
        return 0
    runs = []
    for share in (options.share / 10, options.share):
        requests = round(REQUESTS * share)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            runs.append(measure(trace, requests, write_trace(trace, requests), options.command))
    for run in runs:
        print(run, machine, build_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
