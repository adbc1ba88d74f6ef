"""The head of a page: its title, the verdict in a sentence, and the few numbers that are asked for first."""

from collections.abc import Mapping, Sequence
from math import floor
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.report.summary import interval, objective_text
from kvsim.results.chosen_names import package
from kvsim.results.diagnosis import GPU, NONE, ROOM
from kvsim.results.rates import count, digits, percent
from kvsim.results.result import RunRecord


class Tile(NamedTuple):
    """A number in large type: what it is, the number, and a line that puts it in place."""

    name: str
    value: str
    note: str = ""


class Head(NamedTuple):
    """What a page begins with: a sentence, and the numbers asked for first."""

    verdict: str
    tiles: list[Tile]


def shared_subject(records: Sequence[RunRecord]) -> list[str]:
    """Return what ran in all of several runs: hardware by its name alone where they differ in the number of GPUs."""
    first, *others = map(subject, records)
    machines = set(map(_machine, records))
    name = machines.pop() if len(machines) == 1 else ""
    found = []
    for part in first:
        if all(part in other for other in others):
            found.append(part)
        elif name and part.endswith(f"x {name}"):
            found.append(name)
    return found


def _machine(record: RunRecord) -> str:
    """Return the name of the hardware; empty for a replay, which has no clock."""
    chosen = {package(group): name for group, name in record.get("choices", {}).items()}
    return chosen.get("hardware", "") if record["command"] != "replay" else ""


def subject(record: RunRecord) -> list[str]:
    """Return what ran, as ``llama3_70b``, ``4 engines of 8x h100`` and the trace, as far as the record names them."""
    chosen = {package(group): name for group, name in record.get("choices", {}).items()}
    trace, hardware, cluster = (_group(record, key) for key in ("trace", "hardware", "cluster"))
    engines = len(record.get("engines") or ()) or cluster.get("engines") or 1
    machine = _machine(record)
    gpus = f"{hardware.get('gpus') or 1}x {machine}" if machine else ""
    if gpus and engines != 1:
        gpus = f"{'up to ' if record.get('scaling') else ''}{engines} engines of {gpus}"
    parts = chosen.get("model", ""), gpus, Path(str(trace.get("path") or "")).name or chosen.get("trace", "")
    return [part for part in parts if part]


def _group(record: RunRecord, key: str) -> Mapping[str, Any]:
    found = record.get("config", {}).get(key)
    return found if isinstance(found, Mapping) else {}


def title_of(result: RunRecord) -> str:
    """Return the title of a run's page: what ran, and what came of it."""
    found = (
        "no request was served"
        if result["hit_rate"] is None
        else f"{'about ' * bool(interval(result))}{percent(result['hit_rate'])} reused"
    )
    p99 = result["ttft_s"]["p99"]
    found += "" if p99 is None else f", TTFT p99 {digits(p99)} s"
    return f"{', '.join(subject(result)) or 'kvsim ' + result['command']}: {found}"


def verdict(result: RunRecord) -> str:
    """Say in a sentence what requests wait for; empty for a run without a clock."""
    found = result.get("diagnosis")
    if not found:
        return ""
    name, busy = found["bottleneck"], found["busy"]
    if name == NONE:
        return "Requests hardly wait: the time to first token is that of computing the prompt."
    if name == ROOM:
        return "Requests wait for room on the GPU, which the KV of running requests fills."
    share = percent(busy.get(name))
    if name == GPU:
        return f"Requests wait for the GPU, not for the cache: it is busy for {share} of the run."
    if name.endswith(f"-{GPU}"):
        return f"Requests wait for loads: {name} is busy for {share} of the run."
    return f"Requests wait for room that becomes free when pages are written down: {name} is busy for {share} of the run."


def tiles(result: RunRecord, of_bound: float | None = None) -> list[Tile]:
    """Return the numbers asked for first: hit rate, time to first token, goodput, busiest resource; those that a run has.

    ``of_bound`` is the hit rate as a share of Belady's bound, if that is known.
    """
    bound = "" if of_bound is None else f", {_below_all(of_bound)} of Belady's bound"
    ends = f", {ends}" if (ends := interval(result)) else ""
    found = [Tile("hit rate", percent(result["hit_rate"]), f"of {count(result['prompt_tokens'])} prompt tokens{bound}{ends}")]
    if result["ttft_s"]["mean"] is None:
        pages = Tile("hit rate of pages", percent(result["page_hit_rate"]), f"of {count(result['prompt_pages'])} pages")
        of_all = f"of {count(result['requests'])} requests"
        requests = Tile("requests with a hit", percent(result.get("request_hit_rate")), of_all)
        return [*found, pages, requests]
    return [*found, _ttft(result), _goodput(result), *busiest(result)]


def _below_all(share: float) -> str:
    """Return a share in percent; 100 % only for all of it."""
    return f"{share:.0%}" if share < 0.995 or share >= 1.0 else f"{floor(1000 * share) / 1000:.1%}"


def _ttft(result: RunRecord) -> Tile:
    times = result["ttft_s"]
    return Tile("TTFT p50 / p99", f"{digits(times['p50'])} / {digits(times['p99'])} s", f"mean {digits(times['mean'])} s")


def _goodput(result: RunRecord) -> Tile:
    slo = result.get("slo")
    if not slo:
        rate = digits(result["throughput"]["requests_per_s"])
        return Tile("throughput", f"{rate} requests/s", "no objectives: slo.ttft_s=1 asks for goodput")
    met = f"{percent(slo['attainment'])} have {objective_text(slo)}"
    return Tile("goodput", f"{digits(slo['goodput_requests_per_s'])} requests/s", met)


def busiest(result: RunRecord) -> list[Tile]:
    """Return the resource that is busy for most of the run, and the next; nothing for a run without a clock."""
    busy = (result.get("diagnosis") or {}).get("busy") or {}
    if not busy:
        return []
    first, *others = sorted(busy, key=lambda name: -busy[name])
    note = f"then {_called(others[0])}, {percent(busy[others[0]])} busy" if others else "the only resource"
    return [Tile("busiest resource", f"{_called(first)} {percent(busy[first])}", note)]


def _called(name: str) -> str:
    return "GPU" if name == GPU else name
