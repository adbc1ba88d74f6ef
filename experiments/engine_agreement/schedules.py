"""Are the schedules of vLLM's and SGLang's presets, request by request and step by step, the engines' own?

Schedules were recorded with vLLM 0.33.0's scheduler V1 and with SGLang 0.5.23's scheduler in virtual time, a step taking what
``hardware=linear`` gives: requests of the Mooncake conversation and of a made-up trace, and cases of two to eight requests that
show one rule each; of vLLM also with CPU offloading and with async scheduling. A request agrees if the times of its first and its
last token are within a microsecond, and its hit tokens of each tier and its retractions are equal.
"""

import csv
import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvsim
from kvsim.engine.outcome import Outcome

TOLERANCE_S = 1e-6
CASES = {
    "chunk-pages": 20_448,
    "decode-first": 22_032,
    "early-keys": 1_500_000,
    "early-keys-same-step": 1_500_000,
    "finish-recency": 3_072,
    "keep-answers": 3_072,
    "leaps": 2_048,
    "resume-answers": 2_048,
    "two-copies": 3_056,
}
"""Capacity in tokens by case of vLLM."""
SGLANG_POLICIES = {"fcfs": "fcfs", "lpm": "longest_prefix", "dfs-weight": "dfs_weight"}

Request = tuple[float, float, int, int, int]
"""Seconds of the first and the last token, hit tokens on the GPU and in CPU memory, retractions."""
Step = tuple[int, int, int]
"""Prompt tokens, decoding requests, prefill chunks."""


@dataclass(frozen=True)
class Recording:
    """A recorded schedule: its trace, the overrides that simulate it, and what was recorded."""

    name: str
    trace: Path
    overrides: list[str]
    requests: list[Request]
    steps: list[Step]
    """Empty if they were not recorded."""


def recordings(golden: Path, conversation: Path) -> Iterator[Recording]:
    """The recorded schedules below a folder."""
    folder = golden / "schedule"
    for name, capacity in CASES.items():
        if (path := folder / "cases" / f"{name}.vllm.txt").is_file():
            requests, _, table = path.read_text().partition("# start")
            trace = path.with_name(f"{name}.jsonl")
            yield Recording(f"schedule/cases/{name}", trace, overrides(capacity), rows_of(requests), steps_of(table))
    for path in sorted(folder.glob("*.requests.gz")):
        name = path.name.removesuffix(".requests.gz")
        found = re.fullmatch(r"([a-z0-9]+)(?:_n(\d+))?_r([\d.]+)_c(\d+)", name)
        assert found is not None, f"{path.name}: not the name of a recorded schedule"
        source, limit, rate, capacity = found.groups()
        trace = conversation if source == "mooncake" else folder / f"{source}.jsonl"
        settings = [*overrides(int(capacity)), f"trace.rate={rate}", *([f"trace.limit={limit}"] if limit else [])]
        recorded = folder / f"{name}.steps.gz"
        steps = steps_of(text(recorded)) if recorded.is_file() else []
        yield Recording(f"schedule/{name}", trace, settings, rows_of(text(path)), steps)
    yield from of_sglang(golden, conversation)


def of_sglang(golden: Path, conversation: Path) -> Iterator[Recording]:
    """The recorded schedules of SGLang, which tables list with the parameters that they were played with."""
    folder = golden / "schedule_sglang"
    for table in sorted(folder.glob("**/cases.csv")):
        for case in csv.DictReader(table.read_text().splitlines()):
            name, source = case["name"], case["trace"]
            if table.parent != folder:
                trace = table.with_name(f"{source}.jsonl")
                requests, _, steps = table.with_name(f"{name}.sglang.txt").read_text().partition("# start")
            else:
                trace = conversation if source == "mooncake" else golden / "schedule" / f"{source}.jsonl"
                recorded = folder / f"{name}.steps.csv.gz"
                requests, steps = text(folder / f"{name}.requests.csv.gz"), text(recorded) if recorded.is_file() else ""
            where = table.parent.relative_to(golden).as_posix()
            yield Recording(f"{where}/{name}", trace, overrides_of_sglang(case), sglang_rows(requests), sglang_steps(steps))


def overrides_of_sglang(case: dict[str, str]) -> list[str]:
    chunk, declared = case["chunked_prefill_size"], case["declared_max_new_tokens"]
    return [
        "preset=sglang", "hardware=linear", f"page_tokens={case['page_size']}", "trace.answers=unique",
        f"tiers.gpu.capacity={case['capacity_tokens']}tokens",
        "rules.chunked_prefill=false" if chunk == "-1" else f"engine.max_batch_tokens={chunk}",
        f"engine.max_running_requests={case['max_running_requests']}",
        f"scheduling={SGLANG_POLICIES[case['schedule_policy']]}",
        f"rules.loop={'overlap' if case['loop'] == 'overlap' else 'plain'}",
        *(["rules.mixed_chunk=true"] if case["mixed_chunk"] == "on" else []),
        *(["rules.ignore_eos=true"] if case["ignore_eos"] == "on" else []),
        *([f"rules.declared_output_tokens={declared}"] if declared else []),
        f"rules.schedule_conservativeness={case['schedule_conservativeness']}",
        f"trace.rate={case['rate']}",
        *([f"trace.limit={case['limit']}"] if case["limit"] else []),
    ]  # fmt: skip


def sglang_rows(table: str) -> list[Request]:
    cells = [line.split(",") for line in table.splitlines() if line[:1].isdigit()]
    return [(float(first), float(last), int(hits), 0, int(retractions)) for _, _, hits, first, last, retractions in cells]


def sglang_steps(table: str) -> list[Step]:
    cells = [line.split(",") for line in table.splitlines() if line[:1].isdigit()]
    steps = [(int(requests), int(tokens), int(decoding)) for _, _, requests, tokens, decoding, *_ in cells]
    return [(tokens - decoding, decoding, requests - decoding) for requests, tokens, decoding in steps]


def offload_recordings(golden: Path, conversation: Path) -> Iterator[Recording]:
    """The recorded schedules with CPU offloading, or with async scheduling, below a folder."""
    base = golden / "schedule_vllm_offload"
    known = {"mooncake": conversation, "stress2": golden / "schedule" / "stress2.jsonl"}
    for folder in (base / "cases", base):
        if not (folder / "cases.csv").is_file():
            continue
        with (folder / "cases.csv").open() as file:
            played = list(csv.DictReader(file))
        for one in played:
            name, steps = one["name"], ""
            if folder is base:
                rows = text(folder / f"{name}.requests.csv.gz")
            else:
                rows, steps, _ = (folder / f"{name}.vllm.txt").read_text().split("start_s,end_s,")
            trace = known.get(one["trace"], folder / f"{one['trace']}.jsonl")
            path = folder.relative_to(golden) / name
            yield Recording(str(path), trace, offload_overrides(one), offload_rows(rows), offload_steps(steps))


def offload_overrides(one: Mapping[str, str]) -> list[str]:
    """The overrides that simulate a row of ``cases.csv``."""
    loop = "overlap" if one["async_scheduling"] == "on" else "plain"
    settings = [*overrides(int(one["capacity_tokens"])), f"rules.loop={loop}", f"trace.rate={one['rate']}"]
    settings += [f"trace.limit={one['limit']}"] if one["limit"] else []
    settings += [f"engine.max_running_requests={one['max_num_seqs']}", f"engine.max_batch_tokens={one['max_batched_tokens']}"]
    if not one["cpu_tokens"]:
        return settings
    load, store = one["load_bytes_per_s"], one["store_bytes_per_s"]
    return [
        "preset=vllm_offload", *settings[1:], "model=llama3_8b", f"tiers.cpu.capacity={one['cpu_tokens']}tokens",
        f"eviction@tiers.cpu.eviction={one['eviction_policy']}", f"placement.k={one['store_threshold']}",
        f"rules.blocks_per_chunk={one['blocks_per_chunk']}", f"rules.offload_prompt_only={one['offload_prompt_only']}",
        f"hardware.host_to_device_bytes_per_s={load}", f"hardware.device_to_host_bytes_per_s={store}",
        f"hardware.both_directions_bytes_per_s={float(load) + float(store)}", f"hardware.host_latency_s={one['latency_s']}",
    ]  # fmt: skip


def offload_rows(table: str) -> list[Request]:
    cells = [line.split(",")[2:] for line in table.splitlines()[1:]]
    return [(float(first), float(last), int(gpu), int(cpu), int(retractions)) for gpu, cpu, first, last, retractions in cells]


def offload_steps(table: str) -> list[Step]:
    cells = [line.split(",") for line in table.splitlines()[1:]]
    return [(int(tokens), int(decoding), int(chunks)) for _, _, tokens, decoding, chunks, _ in cells]


def overrides(capacity_tokens: int) -> list[str]:
    return [
        "preset=vllm", "hardware=linear", "page_tokens=16", "trace.answers=unique", "rules.cache_output=true",
        f"tiers.gpu.capacity={capacity_tokens}tokens",
    ]  # fmt: skip


def text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def rows_of(table: str) -> list[Request]:
    cells = [line.split()[-4:] for line in table.splitlines() if line[0] != "#"]
    return [(float(first), float(last), int(hits), 0, int(retractions)) for first, last, hits, retractions in cells]


def steps_of(table: str) -> list[Step]:
    cells = [line.split() for line in table.splitlines() if line[:1].isdigit()]
    return [(int(tokens), int(decoding), int(chunks)) for _, tokens, decoding, chunks, *_ in cells]


def differences(recording: Recording) -> tuple[int, int, str]:
    """The numbers of requests and of steps that differ from a simulation, and the first request that does."""
    outcome = outcome_of(recording, recording.overrides)
    ours = np.column_stack(
        (
            outcome.arrival_s + outcome.ttft_s,
            outcome.arrival_s + outcome.e2e_s,
            outcome.hit_pages[:, :2] * outcome.page_tokens,
            outcome.columns["retractions"],
        )
    )
    theirs = np.array(recording.requests)
    if ours.shape != theirs.shape:
        return len(theirs), len(recording.steps), f"{len(ours)} requests instead of {len(theirs)}"
    differ = ~((np.abs(ours - theirs) <= [TOLERANCE_S, TOLERANCE_S, 0, 0, 0]).all(axis=1))
    steps = recording.steps and steps_done(outcome)
    wrong_steps = sum(a != b for a, b in zip(steps, recording.steps, strict=False)) + abs(len(steps) - len(recording.steps))
    first = ""
    if differ.any():
        index = int(differ.argmax())
        first = f"request {index}: recorded {theirs[index].tolist()}, simulated {ours[index].tolist()}"
    return int(differ.sum()), wrong_steps, first


def outcome_of(recording: Recording, overrides: Sequence[str]) -> Outcome:
    """Simulate the trace of a recording with these overrides, which are its own or others."""
    source = [one.removeprefix("trace.").split("=") for one in overrides if one.startswith("trace.")]
    settings = {name: int(value) if name == "limit" else float(value) if name == "rate" else value for name, value in source}
    pages = next(int(one.partition("=")[2]) for one in overrides if one.startswith("page_tokens"))
    trace = kvsim.load_trace("mooncake", path=recording.trace, page_tokens=pages, **settings)
    others = [one for one in overrides if not one.startswith(("trace.", "page_tokens"))]
    return kvsim.simulate(trace, *others, "timeline=true").outcome


def steps_done(outcome: Outcome) -> list[Step]:
    """The steps of a simulation, with leaps taken apart."""
    assert outcome.timeline is not None
    steps: list[Step] = []
    for batch in outcome.timeline.batches:
        steps += [(batch.prefill_tokens, batch.decode_requests, batch.prefill_requests)] * max(1, batch.steps)
    return steps
