"""How a server is simulated: the settings of kvsim for what it says of itself, and its requests as they were sent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from kvsim.core.request import Request, after_and_joins
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.results.observed import ObservedRun, ServerFacts
from kvsim.results.rates import size
from kvsim.servers.host_memory import HostBytes, as_capacity, copies_in_vllm
from kvsim.settings.unused_settings import given, keys_of

STAGES = "hardware.pipeline_parallel"
CLOSE_S = 0.001
"""Times that are no further apart are those of the trace."""
IN_PLACES = "Simulated requests arrive when the one has ended whose place they took in the first run."
AS_SENT = "The client did not keep the trace's times: simulated requests arrive when those of the first run were sent."


Shape = Callable[[Sequence[str]], tuple[ModelSpec, HardwareSpec]]


@dataclass(frozen=True)
class Flag:
    """A flag of a server, by the name that it has in ``ServerFacts.settings``, and the setting that plays it."""

    name: str
    key: str
    text: Callable[[Any], str | None] = str
    """The setting's value for the flag's; None: the default is right."""


@dataclass(frozen=True)
class Missing:
    """A flag with an effect that is not simulated, or only if the user says so."""

    name: str
    applies: Callable[[Any], bool]
    """Whether a value of the flag has that effect."""
    line: str
    """What a user reads then; ``{value}`` stands for the flag's."""
    key: str = ""
    """The setting that plays it: with it, there is nothing to say."""


@dataclass(frozen=True)
class Engine:
    """What plays an engine."""

    preset: str
    flags: Sequence[Flag]
    host_preset: str
    """The preset with a CPU tier, for a server that says how large its own is."""
    host_bytes: HostBytes | None = None
    """The flag that is the size of that tier in bytes, for an engine that does not say it in tokens."""
    cache_flag: tuple[str, bool] = ("", True)
    """The flag that switches the cache off, and its value then."""
    missing: Sequence[Missing] = ()
    host_flags: Sequence[str] = ()
    """The flags of what may be a CPU tier."""
    host_line: str = ""
    """What a user reads of a server that has one of them and does not say how large its tier is."""
    until: Mapping[tuple[int, ...], Mapping[str, str]] = field(default_factory=dict)
    """Settings that play versions up to one (major, minor and perhaps patch), which did something otherwise than the preset."""
    until_on_gpu: Mapping[tuple[int, ...], Mapping[str, str]] = field(default_factory=dict)
    """The same of servers without a CPU tier."""


def _is_set(value: Any) -> bool:
    """Return whether a flag is set; vLLM's metrics write None as a word."""
    return bool(value) and value != "None"


def _above(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and value > least


def _positive(value: Any) -> str | None:
    return str(value) if isinstance(value, int) and value > 0 else None


def _switch(if_true: str | None, if_false: str | None = None) -> Callable[[Any], str | None]:
    return lambda value: if_true if value is True else if_false if value is False else None


def _one_of(**words: str) -> Callable[[Any], str | None]:
    return lambda value: words.get(str(value).replace("-", "_"))


_sglang_scheduling = _one_of(fcfs="fcfs", lpm="longest_prefix", dfs_weight="dfs_weight")
ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        preset="vllm",
        flags=(
            Flag("scheduler_config.max_num_batched_tokens", "engine.max_batch_tokens", _positive),
            Flag("scheduler_config.max_num_seqs", "engine.max_running_requests", _positive),
            Flag("scheduler_config.async_scheduling", "rules.loop", _switch("overlap", "plain")),
            Flag("parallel_config.tensor_parallel_size", "hardware.gpus", _positive),
        ),
        host_preset="vllm_offload",
        host_bytes=HostBytes("kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use", copies_in_vllm),
        cache_flag=("cache_config.enable_prefix_caching", False),
        missing=(
            Missing(
                "scheduler_config.policy",
                lambda value: value == "priority",
                "the server schedules by priority, but requests are sent without one: they are simulated in the order of arrival",
            ),
            Missing(
                "scheduler_config.enable_chunked_prefill",
                lambda value: value is False,
                "the server does not compute prompts in chunks (enable_chunked_prefill), but the simulation does",
            ),
            Missing(
                "parallel_config.pipeline_parallel_size",
                _above(1),
                f"the server has {{value}} pipeline stages (pipeline_parallel_size), the simulation has one: set {STAGES}",
                STAGES,
            ),
            Missing(
                "speculative_config.num_speculative_tokens",
                _above(0),
                "the server speculates {value} tokens ahead (speculative_config), the simulation does not",
            ),
        ),
        until={(0, 25): {"rules.version": "0.25.1"}},
        host_flags=("kv_transfer_config.kv_connector", "cache_config.kv_offloading_size"),
        host_line="the server has a KV connector: if that offloads to the CPU, set preset=vllm_offload and tiers.cpu.capacity",
    ),
    "sglang": Engine(
        preset="sglang",
        flags=(
            Flag("chunked_prefill_size", "engine.max_batch_tokens", _positive),
            Flag("max_running_requests", "engine.max_running_requests", _positive),
            Flag("disable_overlap_schedule", "rules.loop", _switch("plain", "overlap")),
            Flag("enable_mixed_chunk", "rules.mixed_chunk", _switch("true")),
            Flag("max_prefill_tokens", "rules.max_prefill_tokens", _positive),
            Flag("schedule_conservativeness", "rules.schedule_conservativeness"),
            Flag("schedule_policy", "scheduling", _sglang_scheduling),
            Flag("tp_size", "hardware.gpus", _positive),
            Flag(
                "hicache_write_policy",
                "placement",
                _one_of(
                    write_through="write_through", write_through_selective="write_through_selective", write_back="write_back"
                ),
            ),
        ),
        host_preset="sglang_hicache",
        cache_flag=("disable_radix_cache", True),
        missing=(
            Missing(
                "hicache_storage_backend",
                _is_set,
                "the server has storage below its host memory: set tiers.disk.capacity, without the copies that ranks write",
                "tiers.disk.capacity",
            ),
            Missing(
                "schedule_policy",
                lambda value: _is_set(value) and _sglang_scheduling(value) is None,
                "the server schedules by {value} (schedule_policy), which is not simulated",
            ),
            Missing(
                "chunked_prefill_size",
                lambda value: isinstance(value, int) and value < 0,
                "the server does not compute prompts in chunks (chunked_prefill_size): set rules.chunked_prefill=false",
                "rules.chunked_prefill",
            ),
            Missing(
                "pp_size",
                _above(1),
                f"the server has {{value}} pipeline stages (pp_size), the simulation has one: set rules=default and {STAGES}",
                STAGES,
            ),
            Missing(
                "speculative_algorithm",
                _is_set,
                "the server speculates ({value}), the simulation does not",
            ),
        ),
        until_on_gpu={(0, 5, 15): {"rules.version": "0.5.15"}},
        host_flags=("enable_hierarchical_cache",),
        host_line=(
            "the server has a hierarchical cache and does not say how large its host memory is: set preset=sglang_hicache and "
            "tiers.cpu.capacity, or start the server with --enable-metrics"
        ),
    ),
}


def overrides_of(facts: ServerFacts, overrides: Sequence[str], shape: Shape) -> tuple[list[str], list[str]]:
    """Return the overrides that make kvsim play a server, and notes on where it cannot, and on what sizes count.

    What the user's own ``overrides`` set stays as it is; a line notes each that differs from what the server says. ``shape``
    returns the model and the machine that overrides describe. Raises UsageError for a server without a cache.
    """
    keys, notes = keys_of(overrides), list[str]()
    engine = ENGINES.get(facts.engine)
    own_preset = next((line.partition("=")[2] for line in overrides if line.startswith("preset=")), None)
    wanted = dict[str, str]()
    if engine is not None:
        name, off = engine.cache_flag
        if str(facts.settings.get(name)).lower() == str(off).lower():
            raise UsageError(f"the server has its prefix cache switched off ({name}): start it with the cache")
        if not given(keys, "rules"):
            wanted["preset"] = engine.host_preset if _tells_host(engine, facts) else engine.preset
        wanted |= _of_flags(engine, facts, own_preset, keys)
        notes += _not_simulated(engine, facts, own_preset or "", keys)
    if "hardware.gpus" in wanted and given(keys, STAGES):  # the server's number is that of each stage
        wanted["hardware.tensor_parallel"] = wanted.pop("hardware.gpus")
    if facts.capacity_tokens:
        wanted["tiers.gpu.capacity"] = f"{facts.capacity_tokens}tokens"
    if _tells_host(engine, facts):
        host, note = _host_capacity(engine, facts, lambda: shape([*overrides, *_added(wanted, keys)]))
        wanted["tiers.cpu.capacity"] = host
        notes += [note] if note and not given(keys, "tiers.cpu.capacity") else []
    if facts.page_tokens:
        wanted["page_tokens"] = str(facts.page_tokens)
    found = {key.lstrip("+~"): value for key, _, value in (line.partition("=") for line in overrides)}
    differing = {key: value for key, value in wanted.items() if key in found and found[key] != value and key != "preset"}
    notes += [f"{key}={found[key]} is simulated, but the server has {value}" for key, value in differing.items()]
    return _added(wanted, keys), notes


def _added(wanted: Mapping[str, str], keys: set[str]) -> list[str]:
    """Return as overrides what the user has not set."""
    return [f"{key}={value}" for key, value in wanted.items() if not given(keys, key)]


def _of_version(engine: Engine, facts: ServerFacts, *, has_host: bool) -> dict[str, str]:
    """Return the settings that play a server's version; none if it does not say."""
    number = facts.number
    if number is None:
        return {}
    rows = engine.until if has_host else {**engine.until, **engine.until_on_gpu}
    return {key: value for last, settings in rows.items() if number[: len(last)] <= last for key, value in settings.items()}


def _not_simulated(engine: Engine, facts: ServerFacts, preset: str, keys: set[str]) -> list[str]:
    """Return a line on each thing that the server has and the simulation has not."""
    others = [one.preset for one in ENGINES.values() if one is not engine]
    notes = [f"the server is {facts.engine}, but preset={preset} is simulated"] if preset.startswith(tuple(others)) else []
    for one in engine.missing:
        value = facts.settings.get(one.name)
        if one.applies(value) and not (one.key and given(keys, one.key)):
            notes.append(one.line.format(value=value))
    return [*notes, engine.host_line] if _may_have_host(engine, facts) and not _has_host(engine, facts, keys) else notes


def _may_have_host(engine: Engine, facts: ServerFacts) -> bool:
    return any(_is_set(facts.settings.get(flag)) for flag in engine.host_flags)


def _has_host(engine: Engine, facts: ServerFacts, keys: set[str]) -> bool:
    """Return whether the size of a server's CPU tier is known, from itself or from the user."""
    is_given = given(keys, "tiers.cpu.capacity") is not None and _may_have_host(engine, facts)
    return is_given or _tells_host(engine, facts)


def _tells_host(engine: Engine | None, facts: ServerFacts) -> bool:
    """Return whether a server has a CPU tier and says its size."""
    return bool(facts.host_capacity_tokens) or _host_bytes(engine, facts) is not None


def _host_bytes(engine: Engine | None, facts: ServerFacts) -> int | None:
    return None if engine is None or engine.host_bytes is None else engine.host_bytes.told(facts.settings)


def _host_capacity(
    engine: Engine | None, facts: ServerFacts, shape: Callable[[], tuple[ModelSpec, HardwareSpec]]
) -> tuple[str, str]:
    """Return the size of the CPU tier of a server that tells it, as the setting takes it, and a note if the server says more."""
    n_bytes = _host_bytes(engine, facts)
    if facts.host_capacity_tokens or n_bytes is None or engine is None or engine.host_bytes is None:
        return f"{facts.host_capacity_tokens}tokens", ""
    copies = engine.host_bytes.copies(facts, *shape())
    counted = n_bytes // copies
    name = engine.host_bytes.name.rpartition(".")[2]
    note = f"{name} is {size(n_bytes)} for {copies} copies of the KV, of which a simulation counts one: {size(counted)}"
    return as_capacity(counted), note if copies > 1 else ""


def _of_flags(engine: Engine, facts: ServerFacts, preset: str | None, keys: set[str]) -> dict[str, str]:
    """Return the settings for the server's version and flags: those of rules only if the rules are the engine's, those of
    placement only with a CPU tier."""
    has_host = _has_host(engine, facts, keys)
    told = _of_version(engine, facts, has_host=has_host)
    for flag in engine.flags:
        text = flag.text(facts.settings[flag.name]) if flag.name in facts.settings else None
        if text is not None and (flag.key != "placement" or has_host):
            told[flag.key] = text
    is_own = (preset is None or preset.startswith(engine.preset)) and not given(keys, "rules")
    return {key: text for key, text in told.items() if is_own or not key.startswith("rules.")}


def as_played(requests: Sequence[Request], run: ObservedRun) -> tuple[list[Request], str]:
    """Return requests with the arrivals that they had in a run, from 0 on, and a line if these are not the trace's.

    If the client kept to the trace's times, a request that follows another one follows it in the simulation, too. In a closed
    loop, a request follows the one whose place it took in the run. Otherwise, each arrives when it was sent.
    """
    if run.concurrency is not None:
        return _in_places(requests, run), IN_PLACES
    arrivals_s = np.array([request.arrival_s for request in requests], dtype=np.float64)
    is_root = np.array([request.after < 0 for request in requests], dtype=bool)
    arrivals_s = (arrivals_s - arrivals_s[is_root].min(initial=np.inf)) / run.speed
    known = is_root & ~np.isnan(run.due_s)
    if np.allclose(run.due_s[known], arrivals_s[known], rtol=0.0, atol=CLOSE_S):
        times = zip(requests, arrivals_s.tolist(), strict=True)
        return [replace(one, arrival_s=max(0.0, at_s), delay_s=one.delay_s / run.speed) for one, at_s in times], ""
    played = [
        replace(one, arrival_s=at_s, after=-1, joins=(), delay_s=0.0)
        for one, at_s in zip(requests, _sent_s(run).tolist(), strict=True)
    ]
    return played, AS_SENT


def _sent_s(run: ObservedRun) -> np.ndarray:
    """Return when each request was sent or, if it was not, should have been."""
    times: np.ndarray = np.where(
        np.isnan(run.sent_s), np.where(np.isnan(run.due_s), np.nanmax(run.sent_s), run.due_s), run.sent_s
    )
    return times


def _in_places(requests: Sequence[Request], run: ObservedRun) -> list[Request]:
    """Return the requests of a closed loop: each follows the one that ended last before it was sent and has no follower yet."""
    sent_s, end_s = _sent_s(run).tolist(), run.end_s.tolist()
    played = list(requests)
    ended: list[int] = []
    running: list[tuple[float, int]] = []
    for number in sorted(range(len(played)), key=lambda number: (sent_s[number], number)):
        while running and running[0][0] <= sent_s[number]:
            ended.append(heappop(running)[1])
        before = ended.pop() if ended else -1
        delay_s = sent_s[number] - end_s[before] if before >= 0 else 0.0
        played[number] = replace(played[number], arrival_s=sent_s[number], after=before, joins=(), delay_s=delay_s)
        if end_s[number] == end_s[number]:
            heappush(running, (end_s[number], number))
    return played


def only(requests: Sequence[Request], is_kept: Sequence[bool]) -> list[Request]:
    """Return some requests, numbered anew. One all of whose predecessors are left out arrives at its own time."""
    numbers = {number: place for place, number in enumerate(number for number, kept in enumerate(is_kept) if kept)}
    found = []
    for number, place in numbers.items():
        kept = (numbers[before] for before in requests[number].predecessors if before in numbers)
        after, joins = after_and_joins(kept)
        found.append(replace(requests[number], index=place, after=after, joins=joins))
    return found
