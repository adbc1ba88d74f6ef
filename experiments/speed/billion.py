"""Is a trace of more than a billion page accesses replayed in minutes, and in memory that does not grow with its accesses?

The trace is generated. It has the size of the two published with "When Fancy Eviction Fails: Rethinking Cache Replacement For
LLM Prefix Reuse" (arXiv:2609.28870) together: 843,365 requests with 1.26 billion accesses to blocks of 16 tokens, of which 179
million are distinct. A prompt goes on from a common beginning, from the turn before it, or from the middle of that one.
Claims, of one tier of 2,000,000 pages and LRU, from the file of the trace to the files of the result:

time      at most 10 minutes of processor time for a replay
memory    with ten times the requests, the peak is larger by less than 250 bytes for each request that is more

The trace is written as lines in Mooncake's format, or with ``--format lcp`` as the published ones are, 16 bytes for each access
behind Zstandard. With ``--share``, that part of the requests and a tenth of it are measured, the time is compared in proportion,
and the memory is not judged: short traces stay in memory. Each run is a process of its own. Exits with 1 if a claim fails. New
measurements replace those of the same build in billion.json; billion.md shows both builds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, strftime
from typing import NamedTuple

import numpy as np
import zstandard
from measure import Yardstick
from results import Row, Section, machine, print_rows, read_results, write_results, write_table
from rich.console import Console

from kvsim.installation import build_name
from kvsim.trace.lcp import BLOCK, HEADER, REQUEST

HERE = Path(__file__).resolve().parent
YARDSTICK = HERE.parents[2] / "shared" / "tools" / "yardstick.py"
TRACE = HERE.parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
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
"""Share of the others that go on from the middle of the turn before them."""
COMMANDS = {"replay": "Replay", "simulate": "Simulation"}
TIERS = {
    "replay": ["tiers.gpu.capacity=2000000pages"],
    "simulate": ["tiers.gpu.capacity=auto", "tiers.cpu.capacity=2000000pages"],
}
OTHER_TITLES = {"lcp": ", from libCacheSim's binary format"}
MOST_S = 600.0
MOST_BYTES_PER_REQUEST = 250
ABOUT = (
    "# A billion page accesses",
    "",
    "Measured by `python experiments/speed/billion.py`. The trace is generated, with the size of the two published with",
    "arXiv:2609.28870 together. It goes through LRU on one tier of 2,000,000 pages; in a simulation, these are CPU memory below",
    "a GPU. Processor time and memory are those of the whole command, in a process of its own: reading the trace, storing it,",
    "playing it, and writing a table with a row for each request and a page.",
)

MAGIC = 0x6C63736C6C6D0001
"""libCacheSim's, at both ends of the header."""

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


class Call(NamedTuple):
    """One request of the trace."""

    session: int
    time_s: float
    extents: Extents
    output_tokens: int

    @property
    def blocks(self) -> int:
        return sum(length for _, length in self.extents)


def calls(requests: int, seed: int) -> Iterator[Call]:
    """Yield the requests of the trace, in order of time."""
    rng = np.random.default_rng(seed)
    now_s = 0.0
    for session, extents in prompts(requests, rng):
        yield Call(session, now_s, extents, int(rng.geometric(1 / 300)))
        now_s += float(rng.exponential(SPAN_S / REQUESTS))


def write_lines(path: Path, requests: int, seed: int) -> int:
    """Write the trace in Mooncake's format, with packed ids, and return its number of block accesses."""
    accesses = 0
    with path.open("w") as file:
        for call in calls(requests, seed):
            accesses += call.blocks
            line = {
                "timestamp": round(1000 * call.time_s, 3),
                "input_length": call.blocks * BLOCK_TOKENS,
                "output_length": call.output_tokens,
                "session_id": call.session,
                "hash_ids_rle": [number for extent in call.extents for number in extent],
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return accesses


def write_lcp(path: Path, requests: int, seed: int) -> int:
    """Write the trace in libCacheSim's binary format, 16 bytes for each access, and return the number of these.

    The header, which has the number of accesses, is a Zstandard frame of its own, written when all is known.
    """
    accesses = 0
    body = path.with_suffix(".body")
    with body.open("wb") as raw, zstandard.ZstdCompressor(level=1).stream_writer(raw) as file:
        for call in calls(requests, seed):
            blocks = np.full(call.blocks, -1, dtype=BLOCK)
            blocks["id"] = np.concatenate([np.arange(first, first + length) for first, length in call.extents])
            time_us, tokens = round(1e6 * call.time_s), call.blocks * BLOCK_TOKENS
            file.write(REQUEST.pack(call.session, -1, time_us, call.blocks, tokens, call.output_tokens, 0, 0))
            file.write(blocks.tobytes())
            accesses += call.blocks
    header = HEADER.pack(MAGIC, 1, requests, accesses, 0, 0, 0, 0, BLOCK_TOKENS, 1, 0, 0, b"", MAGIC)
    with path.open("wb") as whole, body.open("rb") as rest:
        whole.write(zstandard.compress(header))
        shutil.copyfileobj(rest, whole)
    body.unlink()
    return accesses


WRITERS: dict[str, tuple[str, Callable[[Path, int, int], int]]] = {
    "mooncake": ("trace.jsonl", write_lines),
    "lcp": ("trace.lcp.zst", write_lcp),
}
"""The name of the file, and what writes it, by the format."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of the command line over a trace."""

    requests: int
    accesses: int
    megabytes: float
    """Size of the trace file."""
    processor_s: float
    """Of the whole command."""
    elapsed_s: float
    peak_bytes: int
    load_s: float
    """Seconds to read the trace, as the result says."""
    run_s: float
    """Seconds to play it, likewise."""
    page_hit_rate: float


def measure(share: float, command: str, kind: str) -> Measured:
    """Run kvsim once over a part of the trace, in a process of its own."""
    requests = round(REQUESTS * share)
    with tempfile.TemporaryDirectory() as folder:
        name, write = WRITERS[kind]
        trace, output = Path(folder) / name, Path(folder) / "run"
        accesses = write(trace, requests, 0)
        words = [f"trace={kind}", f"trace.path={trace}", f"trace.block_tokens={BLOCK_TOKENS}", f"page_tokens={BLOCK_TOKENS}",
                 *TIERS[command], f"output={output}"]  # fmt: skip
        began = perf_counter()
        program = subprocess.Popen([sys.executable, "-m", "kvsim", command, *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(program.pid, 0)
        elapsed_s, program.returncode = perf_counter() - began, os.waitstatus_to_exitcode(status)
        if program.returncode:
            sys.exit(f"kvsim {command} failed")
        result = json.loads((output / "result.json").read_text())
        return Measured(
            requests=requests,
            accesses=accesses,
            megabytes=trace.stat().st_size / 1e6,
            processor_s=used.ru_utime + used.ru_stime,
            elapsed_s=elapsed_s,
            peak_bytes=used.ru_maxrss * 1024,
            load_s=float(result["load_s"]),
            run_s=float(result["wall_s"]),
            page_hit_rate=float(result["page_hit_rate"]),
        )


def rows_of(command: str, small: Measured, large: Measured, share: float) -> list[Row]:
    """Judge two runs."""
    most_s = MOST_S * share
    per_request = (large.peak_bytes - small.peak_bytes) / (large.requests - small.requests)
    is_claimed = command == "replay"
    return [
        Row(what="requests", measured=f"{large.requests:,}"),
        Row(what="page accesses", measured=f"{large.accesses:,}"),
        Row(what="trace file", measured=f"{large.megabytes:,.0f} MB"),
        Row(what="page hit rate", measured=f"{large.page_hit_rate:.2%}"),
        Row(what="processor time", measured=f"{large.processor_s:.0f} s", claim=f"<= {most_s:.0f} s" if is_claimed else "",
            holds=large.processor_s <= most_s if is_claimed else None),
        Row(what="page accesses per second of it", measured=f"{large.accesses / large.processor_s / 1e6:.1f} million"),
        Row(what="elapsed: trace read", measured=f"{large.load_s:.0f} s"),
        Row(what="elapsed: played", measured=f"{large.run_s:.0f} s"),
        Row(what="elapsed: all", measured=f"{large.elapsed_s:.0f} s"),
        Row(what="peak memory", measured=f"{large.peak_bytes / 1e6:.0f} MB"),
        Row(what=f"with {small.requests:,} requests", measured=f"{small.peak_bytes / 1e6:.0f} MB"),
        Row(what="memory for each request more", measured=f"{per_request:.0f} bytes",
            claim=f"<= {MOST_BYTES_PER_REQUEST} bytes" if share == 1 else "",
            holds=per_request <= MOST_BYTES_PER_REQUEST if share == 1 else None),
    ]  # fmt: skip


def main() -> int:
    """Measure, print and write the table. Returns 1 if a claim fails."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="part of the requests that is measured (1)")
    parser.add_argument("--only", choices=tuple(COMMANDS), default="replay", help="what to measure (replay)")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of billion.json and billion.md (this one)")
    parser.add_argument("--format", choices=tuple(WRITERS), default="mooncake", help="the format of the trace (mooncake)")
    parser.add_argument("--make", type=Path, help="only write the trace, to this file")
    options = parser.parse_args()
    if options.make:
        print(f"{WRITERS[options.format][1](options.make, round(REQUESTS * options.share), 0):,} page accesses")
        return 0
    yardstick = Yardstick(program=YARDSTICK, trace=TRACE)
    is_there = YARDSTICK.exists() and TRACE.exists()
    if is_there:
        yardstick.measure()
    small, large = (measure(share, options.only, options.format) for share in (options.share / 10, options.share))
    if is_there:
        yardstick.measure()
    title = COMMANDS[options.only] + OTHER_TITLES.get(options.format, "")
    title += f" of {options.share:.0%}" if options.share < 1 else ""
    rows = rows_of(options.only, small, large, options.share)
    print_rows(Console(), title, rows)
    results = read_results(options.output / "billion.json")
    section = Section(when=strftime("%Y-%m-%d"), machine=machine(), yardstick=yardstick.rates, rows=rows)
    results.setdefault(build_name(), {})[title] = section
    write_results(options.output / "billion.json", results)
    titles = dict.fromkeys(title for sections in results.values() for title in sections)
    write_table(options.output / "billion.md", results, titles, ABOUT)
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
