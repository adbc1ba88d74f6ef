"""Do the presets hit, request by request, exactly what the engines' own code hits?

Plays the preset that matches each recorded sequence of hits over the Mooncake conversation trace, in pages of 512 tokens. A
sequence has one row a request: its number, its full pages, and the pages that it hit (SGLang: GPU; HiCache: GPU and host;
vLLM: GPU, CPU and their sum); -1 stands for a request that was rejected.

Claim: no request differs, in any sequence. Exits with 1 if one does.
"""

import argparse
import gzip
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kvsim
from kvsim.engine.outcome import REJECTED
from kvsim.errors import UsageError
from kvsim.trace.base import Trace

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[2] / "shared"
TRACE = "mooncake_conversation_trace.jsonl.gz"
Row = tuple[int, ...]

IN_FLIGHT = r"(?:_inflight(\d+))?"
PRESETS: dict[str, Callable[..., list[str]]] = {
    rf"sglang_([a-z]+)_(\d+){IN_FLIGHT}": lambda eviction, gpu: [
        "preset=sglang",
        f"eviction={eviction}",
        f"tiers.gpu.capacity={gpu}pages",
    ],
    rf"hicache_(\d+)_(\d+)_([a-z_]+?){IN_FLIGHT}": lambda gpu, cpu, placement: [
        "preset=sglang_hicache",
        f"placement={placement}",
        f"tiers.gpu.capacity={gpu}pages",
        f"tiers.cpu.capacity={cpu}pages",
    ],
    rf"vllm_(\d+){IN_FLIGHT}": lambda gpu: [
        "preset=vllm",
        f"tiers.gpu.capacity={gpu}pages",
    ],
    rf"vllm_(\d+)_cpu(\d+)_([a-z]+)_thr(\d+){IN_FLIGHT}": lambda gpu, cpu, eviction, threshold: [
        "preset=vllm_offload",
        f"eviction@tiers.cpu.eviction={eviction}",
        f"placement.k={threshold}",
        f"tiers.gpu.capacity={gpu}pages",
        f"tiers.cpu.capacity={cpu}pages",
    ],
}
"""From the name of a sequence to its command."""


@dataclass(frozen=True)
class Agreement:
    """One recorded sequence beside the replay."""

    name: str
    overrides: list[str]
    requests: int
    mismatches: int
    first: str = ""
    """Where they first differ."""


def overrides_of(name: str) -> list[str]:
    """What a replay must be told to play a sequence of this name. Raises UsageError for a name of no known form."""
    for pattern, preset in PRESETS.items():
        if found := re.fullmatch(pattern, name):
            *settings, in_flight = found.groups()
            return [*preset(*settings), f"replay.in_flight={in_flight or 1}"]
    raise UsageError(f"{name}: no preset is known for a sequence of this name")


def recorded(path: Path) -> list[Row]:
    with gzip.open(path, "rt") as file:
        return [tuple(map(int, line.split())) for line in file if not line.startswith("#")]


def replayed(trace: Trace, overrides: list[str], columns: int) -> list[Row]:
    """Rows as they are recorded, of so many columns."""
    outcome = kvsim.replay(trace, *overrides).outcome
    rows = []
    for request, status, (gpu, cpu, _) in zip(trace.requests, outcome.status, outcome.hit_pages.tolist(), strict=True):
        hits = (-1, 0, -1) if status == REJECTED else (gpu, cpu, gpu + cpu)
        rows.append((request.index, request.prompt_pages, *hits)[:columns])
    return rows


def compare(trace: Trace, path: Path) -> Agreement:
    name = path.name.removesuffix(".txt.gz")
    overrides = overrides_of(name.partition(".")[2])
    theirs = recorded(path)
    try:
        ours = replayed(trace, overrides, len(theirs[0]))
    except UsageError as error:
        return Agreement(name, overrides, len(theirs), len(theirs), f"not played: {error}")
    differing = [(row, other) for row, other in zip(theirs, ours, strict=False) if row != other]
    first = f"recorded {differing[0][0]}, replayed {differing[0][1]}" if differing else ""
    return Agreement(name, overrides, len(theirs), len(differing) + abs(len(theirs) - len(ours)), first)


def markdown(agreements: list[Agreement]) -> str:
    """The table, one row a sequence."""
    lines = [
        "# Agreement with the engines' own code",
        "",
        "Requests of the Mooncake conversation trace, in pages of 512 tokens, whose hits differ from those recorded with SGLang",
        "0.5.23 (radix cache), SGLang 0.5.15 (hierarchical cache) and vLLM 0.33.0. Made by",
        "`python experiments/engine_agreement/run.py`; each row is",
        f"`kvsim replay trace=mooncake trace.path={TRACE} page_tokens=512` with the overrides shown.",
        "",
        "| sequence | overrides | requests | mismatches |",
        "|---|---|---|---|",
    ]
    for one in agreements:
        lines.append(f"| {one.name} | `{' '.join(one.overrides)}` | {one.requests:,} | {one.mismatches:,} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=Path, default=SHARED / "golden", help="folder of recorded sequences")
    parser.add_argument("--trace", type=Path, default=SHARED / "traces" / TRACE, help="the trace that they were recorded over")
    parser.add_argument("--only", default="", help="only sequences whose name contains this")
    arguments = parser.parse_args()
    paths = [path for path in sorted(arguments.golden.glob("*.txt.gz")) if arguments.only in path.name]
    if not paths:
        parser.error(f"there is no recorded sequence in {arguments.golden}: say --golden=FOLDER")
    trace = kvsim.load_trace("mooncake", path=str(arguments.trace), page_tokens=512)
    agreements = []
    for path in paths:
        agreements.append(one := compare(trace, path))
        print(f"{one.name:<52}{one.requests:>8,} requests {one.mismatches:>8,} mismatches   {one.first}".rstrip(), flush=True)
    if not arguments.only:
        (HERE / "results.md").write_text(markdown(agreements))
    return int(any(one.mismatches for one in agreements))


if __name__ == "__main__":
    sys.exit(main())
