"""Summarizes a result as text, in facts and tables, for both the terminal and the HTML page."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvsim.results.rates import UNKNOWN, count, digits, hundredths, percent
from kvsim.results.records import rows_of
from kvsim.results.result import RunRecord, hit_definition

MOST_ENGINES = 16
"""Most engines shown in a summary."""
MOST_CLASSES = 16
"""Most classes of requests shown in a summary."""
MEASURED = {"busy": "busy time", "computed_tokens": "tokens computed", "output_tokens": "output tokens"}
"""What a measure of imbalance compares."""
PAGE_COUNTS = {
    "refused_by_threshold_pages": "refused by the threshold",
    "refused_by_rate_limit_pages": "by the rate limit",
    "refused_by_memory_pages": "for lack of memory",
    "no_room_pages": "not copied for lack of room",
}
"""What a count of pages says, where its name does not say it; those of refused pages stand side by side."""


UNMEASURED = {"mean": None}
"""The times of what a run has not measured."""


class Table(NamedTuple):
    """A title, column headings with units, and rows that begin with a name."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""
    """Which rows are shown, if not all."""


def facts(result: RunRecord) -> list[tuple[str, str]]:
    """Return pairs of a name and a text; names without data are left out."""
    pairs = [
        ("requests", _requests(result)),
        ("rules", result.get("rules_note", "")),
        ("model", result.get("model_note", "")),
        ("GPU memory", _gpu_memory(result.get("gpu_memory", {}))),
        ("hit rate", _hit_rate(result)),
        ("throughput", _throughput(result)),
        ("SLO", _slo(result.get("slo"))),
        ("sessions", _sessions(result)),
        ("bottleneck", (result.get("diagnosis") or {}).get("text", "")),
        ("disk", _disk_writes(result)),
        ("prefetch", page_counts(result["prefetch"])),
        ("tool calls", _tool_calls(result.get("tool_calls", {}))),
        ("placement", page_counts(_placement(result))),
        ("checkpoints", counters(result["checkpoints"])),
        ("engines", _engines_fact(result)),
        ("autoscaling", _scaling(result.get("scaling"))),
        ("drafts", _drafts(result.get("speculation"))),
        ("adapters", _adapters(result.get("lora"))),
        ("admission", _admission(result.get("admission"))),
        ("retractions", count(result["retractions"]) if result["retractions"] else ""),
        ("ranks", _ranks(result.get("lost_to_disagreement", {}))),
        ("hardware", _hardware(result.get("hardware", {}))),
        ("run", _run(result)),
        *(("warning", text) for text in result.get("warnings", [])),
    ]
    return [(name, text) for name, text in pairs if text]


def tables(result: RunRecord) -> list[Table]:
    """Return the tables that have rows: tiers, links, times, objectives, engines; of many engines the busiest and the idlest."""
    shown = _tiers(result), _links(result), _times(result), slo_table(result), engine_table(result, MOST_ENGINES)
    return [table for table in shown if table.rows]


def shares(result: RunRecord) -> list[tuple[str, float]]:
    """Return where the prompt tokens came from: the share hit in each tier of the run, then the share computed."""
    prompt, hits = result["prompt_tokens"], list[tuple[str, float]]()
    for tier, tokens in result["hit_tokens"].items():
        if tier in result["tiers"]:
            hits.append((tier, tokens / prompt if prompt else 0.0))
    return [*hits, ("computed", 1.0 - sum(share for _, share in hits) if prompt else 0.0)]


def scope(result: RunRecord) -> str:
    """Say which values exclude the warm-up; empty without a warm-up."""
    if not result["warmup_requests"]:
        return ""
    return "Hits, times and throughput exclude the warm-up; everything else covers the whole run."


def settings(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return ``config`` as lines of ``group.key=value``."""
    lines: list[str] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            lines += settings(value, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}")
    return lines


def page_counts(counts: Mapping[str, int]) -> str:
    """Format ``{"read_pages": 1200, "used_pages": 900}`` as ``1,200 pages read, 900 used``; empty if all counts are 0."""
    if not any(counts.values()):
        return ""
    words = [PAGE_COUNTS.get(name, name.removesuffix("_pages").replace("_", " ")) for name in counts]
    first, *others = zip(counts.values(), words, strict=True)
    return ", ".join([f"{count(first[0])} pages {first[1]}", *(f"{count(value)} {word}" for value, word in others)])


def counters(counts: Mapping[str, int]) -> str:
    """Format ``{"pages_read": 1200}`` as ``pages read 1,200``; empty if all counts are 0."""
    if not any(counts.values()):
        return ""
    return ", ".join(f"{name.replace('_', ' ')} {count(value)}" for name, value in counts.items())


def capacity(tier: Mapping[str, int | None]) -> str:
    """Format the capacity of a tier of a result, in pages."""
    return "unlimited" if tier["capacity_pages"] is None else count(tier["capacity_pages"])


def _tool_calls(calls: Mapping[str, Any]) -> str:
    """Say what pages have done during tool calls."""
    counts = {name: value for name, value in calls.items() if isinstance(value, int)}
    if not any(counts.values()):
        return ""
    mean_s = calls["ttft_s"]["mean"]
    after = "" if mean_s is None else f"; TTFT after them {digits(mean_s)} s on average"
    return counters(counts) + after


def _placement(result: RunRecord) -> dict[str, int]:
    """Return the counts of what moved between tiers, without those that the line about prefetches says as well."""
    if len(result["tiers"]) < 2:
        return {}
    prefetched = result["prefetch"] if any(result["prefetch"].values()) else {}
    return {name: number for name, number in result["placement"].items() if prefetched.get(name) != number}


def _requests(result: RunRecord) -> str:
    text = f"{count(result['requests'])} counted"
    if result["warmup_requests"]:
        text += f" after a warm-up of {count(result['warmup_requests'])}"
    if result["rejected"]:
        text += f", {count(result['rejected'])} rejected"
    shed = shed_requests(result)
    return text + (f", {count(shed)} shed" if shed else "")


def shed_requests(result: RunRecord) -> int:
    """Return how many of the counted requests the admission policy has refused."""
    found: int = (result.get("admission") or {}).get("shed", 0)
    return found


def hit_note(result: RunRecord) -> str:
    """Say what a hit is in this run, and what its rates are about."""
    return f"{hit_definition(result['config'], has_shed=shed_requests(result) > 0)} {scope(result)}".rstrip()


def _hit_rate(result: RunRecord) -> str:
    tokens, pages = count(result["prompt_tokens"]), count(result["prompt_pages"])
    rate = f"about {percent(result['hit_rate'])} ({known})" if (known := interval(result)) else percent(result["hit_rate"])
    text = f"{rate} of {tokens} prompt tokens, {percent(result['page_hit_rate'])} of {pages} pages"
    if "request_hit_rate" not in result:  # recorded by an earlier version
        return text
    served = result["requests"] - result["rejected"] - shed_requests(result)
    return f"{text}, {percent(result['request_hit_rate'])} of {count(served)} requests"


def interval(result: RunRecord) -> str:
    """Return the 95 % interval of the hit rate of a result that is estimated from samples; empty for others, which are exact."""
    ends = result.get("sample", {}).get("hit_rate")
    return f"95% interval {percent(ends['low'])} to {percent(ends['high'])}" if ends and ends["low"] < ends["high"] else ""


def _throughput(result: RunRecord) -> str:
    rates = result["throughput"]
    if rates["requests_per_s"] is None:
        return ""
    requests, prompt, output = (digits(rates[f"{what}_per_s"]) for what in ("requests", "prompt_tokens", "output_tokens"))
    return f"{requests} requests/s, {prompt} prompt tokens/s, {output} output tokens/s in {clock(result)}"


def objective_text(slo: Mapping[str, Any]) -> str:
    """Return the objectives that are set, such as ``TTFT <= 1 s and TPOT <= 0.05 s; by type: chat TTFT <= 0.5 s``."""
    common, by_class = _limits(slo), slo.get("by_class") or {}
    own = ", ".join(f"{name} {_limits(limits) or 'without any'}" for name, limits in by_class.items())
    return "; ".join(part for part in (common, own and f"by {slo['by']}: {own}") if part)


def objective_of_share(asked: float | None, drawn: float) -> str:
    """Return the name of an objective's line in a picture of a percentile, which is ``drawn`` as a share.

    It says which share of the requests has to meet the objective, if that is another one: a point above the line may hold.
    """
    return "objective" if asked in (None, drawn) else f"objective of {percent(asked)} of the requests"


def _limits(limits: Mapping[str, Any]) -> str:
    names = {"ttft_s": "TTFT", "tpot_s": "TPOT"}
    return " and ".join(f"{name} <= {limits[key]:g} s" for key, name in names.items() if limits.get(key) is not None)


def _disk_writes(result: RunRecord) -> str:
    """Say how much is written to the disk, and how often a day that is the whole drive."""
    per_day = (result.get("diagnosis") or {}).get("drive_writes_per_day")
    written = sum(link["bytes"] for name, link in result["links"].items() if name.endswith("-disk"))
    if per_day is None or not written:
        return ""
    return (
        f"{hundredths(written / 1e12)} TB written in {result['simulated_s'] / 60:,.1f} min, {digits(per_day)} drive writes a day"
    )


def _slo(slo: Mapping[str, Any] | None) -> str:
    if not slo:
        return ""
    goodput = digits(slo["goodput_requests_per_s"])
    return f"{percent(slo['attainment'])} of the requests with {objective_text(slo)}; goodput {goodput} requests/s"


def _sessions(result: RunRecord) -> str:
    """Say how many sessions have finished, and in what time; empty for a run without sessions or a clock."""
    if not result.get("sessions"):
        return ""
    times = result["session_s"]
    return f"{count(result['sessions'])} finished in {digits(times['mean'])} s on average, p99 {digits(times['p99'])} s"


def slo_table(result: RunRecord) -> Table:
    """Return the table of the classes of requests and how many of each meet the objectives; no rows without both."""
    classes = (result.get("slo") or {}).get("classes", [])
    columns = ("class", "requests", "attainment", "TTFT p99 (s)", "TPOT p99 (s)")
    ranked = sorted(classes, key=lambda one: -one["requests"])[:MOST_CLASSES] if len(classes) > MOST_CLASSES else classes
    rows: list[tuple[str, ...]] = [
        (
            f"{one['by']} {one['class'] or UNKNOWN}",
            count(one["requests"]),
            percent(one["attainment"]),
            digits(one["ttft_s_p99"]),
            digits(one["tpot_s_p99"]),
        )
        for one in ranked
    ]
    note = f"the {len(rows)} classes with the most requests, of {len(classes)}" if len(rows) < len(classes) else ""
    return Table("Service level objectives", columns, rows, note)


def clock(result: RunRecord) -> str:
    """Return the kind of time that the run's times are measured in."""
    return "real time" if result.get("hardware") else "simulated time"


def _ranks(lost: Mapping[str, int]) -> str:
    """Return what was lost because tensor-parallel ranks disagreed; empty if nothing was."""
    if not lost.get("transfers"):
        return ""
    return f"{count(lost['pages'])} pages lost to disagreement in {count(lost['transfers'])} transfers"


def _gpu_memory(memory: Mapping[str, Any]) -> str:
    """Return how the memory of an engine's GPUs is divided; empty unless that decided the size of the GPU tier."""
    if not memory:
        return ""
    parts = [f"{memory[f'{name}_bytes'] / 2**30:,.1f} GiB {name}" for name in ("kv", "weights", "workspace", "states")]
    share, total, gpus = memory["gpu_memory_utilization"], memory["memory_bytes"] / 2**30, memory["gpus"]
    parts = parts if memory["states_bytes"] else parts[:-1]
    parts += [f"{memory['adapters_bytes'] / 2**30:,.1f} GiB adapters"] if memory.get("adapters_bytes") else []
    copies = memory.get("kv_copies", 1)
    divided = ", ".join(parts).replace("kv", f"KV in {copies} copies" if copies > 1 else "KV")
    stages = f" in {len(memory['stages'])} stages" if memory.get("stages") else ""
    return f"{divided}: {share:g} of {total:,.1f} GiB of {gpus} GPU{'s' * (gpus > 1)}{stages}"


def _hardware(found: Mapping[str, Any]) -> str:
    """Return the device, the verification result and the disk faults of a run on hardware."""
    if not found:
        return ""
    faults = counters({f"disk {name}": number for name, number in found["disk_faults"].items()})
    states = f" and {count(found['verified_states'])} states" if found.get("verified_states") else ""
    verified = (
        f"{found['device']}, {count(found['verified_pages'])} reused pages{states} verified, "
        f"{count(found['wrong_words'])} wrong words"
    )
    return ", ".join(part for part in (verified, faults) if part)


def _run(result: RunRecord) -> str:
    total = rows_of(result)
    is_simulated = result["simulated_s"] and not result.get("hardware")
    simulated = f"{digits(result['simulated_s'])} s simulated, " if is_simulated else ""
    done = f"{count(total)} requests in {digits(result['wall_s'])} s, {digits(result['requests_per_s'])} requests/s"
    return f"{simulated}{done}; trace read in {digits(result['load_s'])} s"


def _tiers(result: RunRecord) -> Table:
    rows = []
    for name, tier in result["tiers"].items():
        moved = (count(tier[key]) for key in ("peak_pages", "inserted_pages", "evicted_pages"))
        hits = result["hit_tokens"][name]
        share = percent(hits / result["prompt_tokens"] if result["prompt_tokens"] else None)
        rows.append((name, capacity(tier), *moved, count(hits), share))
    pages = (f"{what} (pages)" for what in ("capacity", "peak", "inserted", "evicted"))
    return Table("Tiers", ("tier", *pages, "hits (tokens)", "hit rate"), rows)


def _links(result: RunRecord) -> Table:
    rows: list[tuple[str, ...]] = [
        (name, hundredths(link["bytes"] / 1e9), count(link["transfers"]), digits(link["busy_s"]), percent(link["utilization"]))
        for name, link in result["links"].items()
    ]
    return Table("Links", ("link", "moved (GB)", "transfers", "busy (s)", "utilization"), rows)


def _times(result: RunRecord) -> Table:
    names = {
        "ttft_s": "time to first token",
        "tpot_s": "time per output token",
        "e2e_s": "end to end",
        "session_s": "session",
    }
    points = ("mean", "p50", "p90", "p99")
    rows = [
        (label, *(digits(result[key][point]) for point in points))
        for key, label in names.items()
        if result.get(key, UNMEASURED)["mean"] is not None
    ]
    if rows and (phases := result.get("phases_s")):
        rows[1:1] = [(f"  {name}", *(digits(times[point]) for point in points)) for name, times in phases.items()]
    return Table("Times", ("seconds", *points), rows)


def _scaling(scaling: Mapping[str, Any] | None) -> str:
    """Say what engines cost that a policy starts and stops; empty for any other run."""
    if scaling is None:
        return ""
    return (
        f"{digits(scaling['engine_s'])} s of engines, {digits(scaling['gpu_s'])} s of GPUs, {percent(scaling['of_all'])} of all "
        f"engines all the time; {digits(scaling['mean_engines'])} engines on average, {count(scaling['most_engines'])} at most; "
        f"{count(scaling['starts'])} starts of {digits(scaling['start_s'])} s, {count(scaling['stops'])} stops"
    )


def _drafts(drafts: Mapping[str, Any] | None) -> str:
    """Say what speculative decoding has come to; empty for a run without it."""
    if drafts is None:
        return ""
    return (
        f"{digits(drafts['tokens_per_step'])} tokens of an answer a step; {percent(drafts['acceptance_rate'])} of "
        f"{count(drafts['draft_tokens'])} drafted tokens were right"
    )


def _adapters(adapters: Mapping[str, Any] | None) -> str:
    """Say how often LoRA adapters were on the GPU when requests came for them; empty for a run without any."""
    if adapters is None:
        return ""
    return (
        f"{count(adapters['loads'])} copies to the GPU for {count(adapters['uses'])} requests with one: "
        f"{percent(adapters['hit_rate'])} found theirs there"
    )


def _admission(admission: Mapping[str, Any] | None) -> str:
    """Say how many requests were refused, of which classes; empty for a run that refuses none."""
    if admission is None:
        return ""
    text = f"{count(admission['shed'])} requests shed, {percent(admission['share'])} of all"
    if admission["unsent"]:
        text += f", {count(admission['unsent'])} of them never sent"
    classes = [f"{one['by']} {one['class']} {count(one['shed'])} of {count(one['requests'])}" for one in admission["classes"]]
    return "; ".join([text, *classes[:MOST_CLASSES]]) + ("; ..." if len(classes) > MOST_CLASSES else "")


def _engines_fact(result: RunRecord) -> str:
    """Say how many engines there were, and how evenly they shared the load; empty for a single one."""
    engines = result.get("engines", [])
    parts = []
    for role, measures in result.get("imbalance", {}).items():
        number = sum(engine["role"] == role for engine in engines)
        most = [f"{value:.2f} x the mean {MEASURED[name]}" for name, value in measures.items() if value is not None]
        name = "" if role == "both" else f" {role}"
        parts.append(f"{number}{name}" + (f" with at most {' and '.join(most)}" if most else ""))
    if (hosts := len({engine["host"] for engine in engines})) > 1:
        parts.append(f"on {hosts} hosts")
    if failures := sum(engine["failures"] for engine in engines):
        parts.append(f"{count(failures)} failure{'s' * (failures > 1)}")
    return ", ".join(parts)


def engine_table(result: RunRecord, most: int | None = None) -> Table:
    """Return the table of engines; of more than ``most``, the busiest and the idlest."""
    engines = shown = result.get("engines", [])
    note = ""
    if most is not None and len(engines) > most:
        ranked = sorted(engines, key=lambda engine: -(engine["busy_share"] or 0.0))
        half = most // 2
        shown, note = [*ranked[:half], *ranked[-half:]], f"the {half} busiest and the {half} idlest of {len(engines)} engines"
    columns = _engine_columns(engines)
    rows = [tuple(cell(engine) for cell in columns.values()) for engine in shown]
    return Table("Engines", tuple(columns), rows, note)


def _engine_columns(engines: Sequence[Mapping[str, Any]]) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """Return the cells of the columns by heading, without those that are the same for all engines."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {"engine": lambda engine: str(engine["engine"])}
    is_divided = any("decoded" in engine for engine in engines)
    if is_divided:
        columns["role"] = lambda engine: str(engine["role"])
    if len({engine["host"] for engine in engines}) > 1:
        columns["host"] = lambda engine: str(engine["host"])
    columns["requests"] = lambda engine: count(engine["requests"])
    if is_divided:
        columns["decoded"] = lambda engine: count(engine["decoded"])
    columns["hit rate"] = lambda engine: percent(engine["hit_rate"])
    columns["busy"] = lambda engine: percent(engine["busy_share"])
    columns["queued"] = lambda engine: digits(engine["queue"]["mean"])
    columns["TTFT p50 (s)"] = lambda engine: digits(engine["ttft_s"]["p50"])
    columns["TTFT p99 (s)"] = lambda engine: digits(engine["ttft_s"]["p99"])
    if is_divided:
        columns["TPOT p50 (s)"] = lambda engine: digits(engine["tpot_s"]["p50"])
    else:
        columns["evicted (pages)"] = lambda engine: count(engine["evicted_pages"])
    return columns
