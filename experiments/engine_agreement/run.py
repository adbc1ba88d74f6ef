"""Do the presets hit, request by request, exactly what the engines' own code hits?

Hits were recorded from the code of SGLang, vLLM, FastDeploy and LightLLM over the Mooncake conversation trace, in pages of 512
tokens, or in single tokens (``lightllm_tokens``). Each recorded sequence is replayed with the matching preset. It has a row per
request: the request's number, its full pages, and the pages that it hit (SGLang, and vLLM for hybrid models: GPU; HiCache,
FastDeploy and LightLLM: GPU and CPU; SGLang's unified cache: GPU, CPU and storage; vLLM, and LightLLM for hybrid models: GPU, CPU
and their sum); -1 marks a rejected request.

Schedules of vLLM and SGLang in virtual time are simulated and compared too (``schedules.py``). Beside each stands what kvsim's
own rules show of the same trace (``own_rules.py``), except for the small cases of one rule each.

Claim: no request differs, in any sequence or schedule. Exits with 1 if one does.
"""

import gzip
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from own_rules import COLUMNS, SUMMARY, Shown, Worth, cells, own_overrides, summary
from schedules import Recording, differences, offload_recordings, outcome_of, recordings

import kvsim
from kvsim.engine.outcome import REJECTED
from kvsim.errors import UsageError
from kvsim.report.study import CONVERSATION, markdown, option_parser, write_page
from kvsim.trace.base import Trace

Row = tuple[int, ...]

PAGE_TOKENS = 512
SINGLE_TOKENS = "page_tokens=1"
UNIQUE_ANSWERS = "trace.answers=unique"
OF_TRACE = (SINGLE_TOKENS, UNIQUE_ANSWERS)
"""Overrides that say how the trace is read."""
REJECTED_HITS = (-1, 0, -1)
IN_FLIGHT = r"(?:_inflight(\d+))?"
UNIFIED = r"(?=(?:.*_delay(\d+))?)"
OF_UNIFIED = rf"(_answers)?(?:_chunk(\d+))?(_storage)?{IN_FLIGHT}(?:_delay\d+)?"
"""Before and after the sizes in a name of a sequence of SGLang's radix or unified cache, whose settings are in any of them."""


def unified(
    delay: str | None,
    gpu: str,
    cpu: str | None,
    placement: str | None,
    answers: str | None,
    chunk: str | None,
    storage: str | None,
) -> list[str]:
    """The overrides for SGLang's unified cache or, without a host, its radix cache."""
    return [
        "preset=sglang_hicache" if cpu else "preset=sglang",
        *([UNIQUE_ANSWERS, "rules.cache_output=true"] if answers else ["rules.cache_output=false"]),
        *([f"placement={placement}"] if cpu else []),
        f"tiers.gpu.capacity={gpu}pages",
        *([f"tiers.cpu.capacity={cpu}pages"] if cpu else []),
        *(["tiers.disk.capacity=unlimited"] if storage else []),
        *([f"replay.prefill_chunk_tokens={int(chunk) * PAGE_TOKENS}"] if chunk else []),
        *([f"replay.copy_steps={delay}"] if delay else []),
    ]


PRESETS: dict[str, Callable[..., list[str]]] = {
    rf"{UNIFIED}sglang_(?:unified|lru)_(\d+){OF_UNIFIED}": lambda delay, gpu, *others: unified(delay, gpu, None, None, *others),
    rf"{UNIFIED}hicache_unified_(\d+)_(\d+)_([a-z_]+?){OF_UNIFIED}": unified,
    rf"sglang_([a-z]+)_(\d+){IN_FLIGHT}": lambda eviction, gpu: [
        "preset=sglang",
        f"eviction={eviction}",
        f"tiers.gpu.capacity={gpu}pages",
    ],
    rf"sglang_mamba_(\d+)_(\d+)(_nobuffer)?(_nochunk)?(_unique)?{IN_FLIGHT}": lambda gpu, states, nobuffer, nochunk, unique: [
        "preset=sglang_mamba",
        f"tiers.gpu.capacity={gpu}pages",
        f"tiers.gpu.states={states}states",
        *(["rules.extra_buffer=false"] if nobuffer else []),
        *(["replay.prefill_chunk_tokens=0"] if nochunk else []),
        *([UNIQUE_ANSWERS] if unique else ["rules.cache_output=false"]),
    ],
    rf"hicache_(\d+)_(\d+)_([a-z_]+?){IN_FLIGHT}": lambda gpu, cpu, placement: [
        "preset=sglang_hicache",
        "rules.version=0.5.15",
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
    rf"vllm_hybrid_(\d+)(?:_groups(\d+))?(_nochunk)?(?:_(dense|retention\d+))?{IN_FLIGHT}": lambda gpu, groups, nochunk, kept: [
        "preset=vllm_hybrid",
        f"tiers.gpu.capacity={gpu}pages",
        f"rules.state_pages={groups or 1}",
        *(["replay.prefill_chunk_tokens=0"] if nochunk else []),
        *([f"checkpoint.interval_tokens={kept.removeprefix('retention').replace('dense', '1')}"] if kept else []),
    ],
    rf"lightllm_hybrid_(\d+)_(\d+)_states(\d+)_chunk(\d+){IN_FLIGHT}": lambda gpu, cpu, states, chunk: [
        "preset=lightllm_hybrid",
        f"tiers.gpu.capacity={gpu}pages",
        f"tiers.cpu.capacity={cpu}pages" if int(cpu) else "tiers.cpu.capacity=0",
        f"tiers.gpu.states={states}states",
        f"replay.prefill_chunk_tokens={int(chunk) * PAGE_TOKENS}",
    ],
    rf"lightllm_(\d+)_(\d+)(?:_cpupage(\d+))?{IN_FLIGHT}": lambda gpu, cpu, cpu_page: [
        "preset=lightllm",
        f"tiers.gpu.capacity={gpu}pages",
        f"tiers.cpu.capacity={cpu}pages",
        f"tiers.cpu.page_tokens={int(cpu_page or 1) * PAGE_TOKENS}",
    ],
    rf"lightllm_tokens_(\d+)_(\d+)(?:_cpupage(\d+)tokens)?{IN_FLIGHT}": lambda gpu, cpu, cpu_page: [
        "preset=lightllm",
        *OF_TRACE,
        f"tiers.gpu.capacity={int(gpu) * PAGE_TOKENS}tokens",
        f"tiers.cpu.capacity={int(cpu) * PAGE_TOKENS}tokens",
        f"tiers.cpu.page_tokens={cpu_page or PAGE_TOKENS}",
    ],
    rf"fastdeploy_(\d+)_(\d+){IN_FLIGHT}": lambda gpu, cpu: [
        "preset=fastdeploy",
        f"tiers.gpu.capacity={gpu}pages",
        f"tiers.cpu.capacity={cpu}pages" if int(cpu) else "tiers.cpu.capacity=0",
    ],
}
"""Overrides by the form of a sequence's name."""


@dataclass(frozen=True)
class Agreement:
    """A recorded sequence compared with its replay."""

    name: str
    overrides: list[str]
    requests: int
    mismatches: int
    first: str = ""
    """The first difference."""
    kind: str = "replay"
    worth: Worth | None = None
    """Beside kvsim's own rules; None if these do not play it."""


def overrides_of(path: Path) -> list[str]:
    """The overrides that replay a sequence, by its name; empty for a sequence of another engine."""
    name = path.name.removesuffix(".txt.gz").partition(".")[2]
    for pattern, preset in PRESETS.items():
        if found := re.fullmatch(pattern, name):
            *settings, in_flight = found.groups()
            overrides = [*preset(*settings), f"replay.in_flight={in_flight or 1}"]
            return [one for one in overrides if one != UNIQUE_ANSWERS or trace_beside(path) is None]
    return []


def trace_beside(path: Path) -> Path | None:
    """The trace of a sequence that has its own, beside it; that contains the answers."""
    trace = path.with_name(f"{path.name.partition('.')[0]}.jsonl")
    return trace if trace.is_file() else None


def recorded(path: Path) -> list[Row]:
    """Rows of a sequence; a rejected request has the same row in all of them."""
    with gzip.open(path, "rt") as file:
        rows = [tuple(map(int, line.split())) for line in file if not line.startswith("#")]
    return [row if row[2] >= 0 else (*row[:2], *REJECTED_HITS)[: len(row)] for row in rows]


@cache
def load(path: Path, in_tokens: bool, with_answers: bool) -> Trace:
    """The trace in a file, in pages or in single tokens, without answers or with answers that nobody hits."""
    page_tokens, answers = 1 if in_tokens else PAGE_TOKENS, "unique" if with_answers else "none"
    return kvsim.load_trace("mooncake", path=path, page_tokens=page_tokens, answers=answers)


def has_storage(overrides: list[str]) -> bool:
    """Whether the recorded columns of a preset's engine are GPU, CPU and storage, as far as there are some."""
    return overrides[0].startswith("preset=sglang")


def replayed(trace: Trace, overrides: list[str], columns: int) -> list[Row]:
    """Rows in the recorded form, cut to ``columns`` columns."""
    outcome = kvsim.replay(trace, *(one for one in overrides if one not in OF_TRACE)).outcome
    rows = []
    for request, status, (gpu, cpu, disk) in zip(trace.requests, outcome.status, outcome.hit_pages.tolist(), strict=True):
        hits = REJECTED_HITS if status == REJECTED else (gpu, cpu, disk if has_storage(overrides) else gpu + cpu)
        rows.append((request.index, request.prompt_pages, *hits)[:columns])
    return rows


def compare(trace_path: Path, path: Path) -> Agreement:
    own_trace = trace_beside(path)
    name = f"{path.parent.name}/" * (own_trace is not None) + path.name.removesuffix(".txt.gz")
    overrides = overrides_of(path)
    theirs = recorded(path)
    try:
        trace = load(own_trace or trace_path, SINGLE_TOKENS in overrides, UNIQUE_ANSWERS in overrides)
        ours = replayed(trace, overrides, len(theirs[0]))
    except UsageError as error:
        return Agreement(name, overrides, len(theirs), len(theirs), f"not played: {error}")
    differing = [(row, other) for row, other in zip(theirs, ours, strict=False) if row != other]
    first = f"recorded {differing[0][0]}, replayed {differing[0][1]}" if differing else ""
    worth = worth_of_replay(trace, overrides, theirs)
    return Agreement(name, overrides, len(theirs), len(differing) + abs(len(theirs) - len(ours)), first, worth=worth)


def worth_of_replay(trace: Trace, overrides: list[str], theirs: list[Row]) -> Worth | None:
    """A recorded sequence beside a replay by kvsim's own rules; None if these do not have its tiers or its model."""
    try:
        ours = replayed(trace, own_overrides(overrides), len(theirs[0]))
    except UsageError:
        return None
    pages = sum(row[1] for row in theirs)
    tiers = 3 if has_storage(overrides) else 2  # the third column of others is the sum of the two
    return Worth(*(Shown([max(0, sum(row[2 : 2 + tiers])) for row in rows], pages) for rows in (theirs, ours)))


def compare_schedule(recording: Recording) -> Agreement:
    requests, steps, first = differences(recording)
    count = f"{len(recording.steps):,} steps, {steps:,} differ " if recording.steps else ""
    differ = requests + bool(steps)
    worth = None if "/cases/" in recording.name else worth_of_schedule(recording)
    return Agreement(recording.name, recording.overrides, len(recording.requests), differ, count + first, "simulate", worth)


def worth_of_schedule(recording: Recording) -> Worth:
    """A recorded schedule beside a simulation by kvsim's own rules."""
    own = outcome_of(recording, own_overrides(recording.overrides))
    tokens, arrivals = sum(request.prompt_tokens for request in own.requests), own.arrival_s.tolist()
    hits = (own.hit_pages.sum(axis=1) * own.page_tokens).tolist()
    waits = [first - arrival for (first, *_), arrival in zip(recording.requests, arrivals, strict=True)]
    theirs = Shown([gpu + cpu for _, _, gpu, cpu, _ in recording.requests], tokens, sum(waits) / len(waits))
    return Worth(theirs, Shown(hits, tokens, float(own.ttft_s.mean())))


def page(agreements: list[Agreement]) -> Iterator[str]:
    lines = [(one.name, f"{one.requests:,}", f"{one.mismatches:,}", *cells(one.worth)) for one in agreements]
    commands = [(one.name, f"`{' '.join(one.overrides)}`") for one in agreements]
    yield from [
        "# Agreement with the engines' own code",
        "",
        "What is exact, by engine, and what kvsim's own rules (`rules=default`, the same policies and sizes) show instead: by",
        "how many points their hit rate is higher, how many requests have other hits, and by how much mean TTFT is higher.",
        "For hybrid models, hits depend on where states are saved, which own rules leave to the checkpoint policy. Cells are",
        "empty for cases of one rule each, and where own rules do not have the tiers.",
        "",
        *markdown(SUMMARY, summary([(one.overrides, one.kind, one.mismatches, one.worth) for one in agreements])),
        "",
        "## Sequence by sequence",
        "",
        "Requests of the Mooncake conversation trace whose hits differ from those recorded with SGLang 0.5.23 (radix cache,",
        "also for hybrid models; unified cache of GPU, host and storage), SGLang 0.5.15 (hierarchical cache), vLLM 0.33.0 (also",
        "for hybrid models), FastDeploy (April 2026) and LightLLM (August 2026; for hybrid models, its radix cache with detached",
        "states). Rows named `answers/` are of a small trace whose turns contain the answers of the turns before. Made by",
        "`python experiments/engine_agreement/run.py`; each row is",
        f"`kvsim replay trace=mooncake trace.path={CONVERSATION.file} page_tokens=512` with the overrides at the end.",
        "Rows named `schedule...` are `kvsim simulate trace=mooncake trace.path=...`: there the times of the first and the last",
        "token (within 1 us), the hits, the retractions and, where they were recorded, the steps are compared.",
        "",
        *markdown(("sequence", "requests", "mismatches", *COLUMNS), lines),
        "",
        "## Overrides",
        "",
        *markdown(("sequence", "overrides"), commands),
    ]


def read_options() -> tuple[Namespace, list[Path], list[Recording]]:
    """The options, the recorded sequences to replay, and the recorded schedules to simulate."""
    parser = option_parser(__file__, __doc__, {"trace": CONVERSATION})
    golden = Path(__file__).resolve().parents[3] / "shared" / "golden"
    parser.add_argument("--golden", type=Path, default=golden, help="folder of recorded sequences")
    parser.add_argument("--only", default="", help="replay only sequences whose name contains this, and write no table")
    options = parser.parse_args()
    found = [*sorted(options.golden.glob("*.txt.gz")), *sorted(options.golden.glob("answers/*.txt.gz"))]
    paths = [path for path in found if options.only in path.name and overrides_of(path)]
    sources = chain(*(read(options.golden, Path(options.trace)) for read in (recordings, offload_recordings)))
    schedules = [one for one in sources if options.only in one.name]
    if not (paths or schedules):
        parser.error(f"no recorded sequence of these engines in {options.golden}; set --golden to their folder")
    return options, paths, schedules


def main() -> int:
    options, paths, schedules = read_options()
    agreements = []
    played = chain((compare(Path(options.trace), path) for path in paths), map(compare_schedule, schedules))
    for one in played:
        agreements.append(one)
        print(f"{one.name:<52}{one.requests:>8,} requests {one.mismatches:>8,} mismatches   {one.first}".rstrip(), flush=True)
    if not options.only:
        write_page(options.output, page(agreements))
    return int(any(one.mismatches for one in agreements))


if __name__ == "__main__":
    sys.exit(main())
