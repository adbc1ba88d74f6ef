"""What is known of a run: the one table of the fields of ``result.json``, and of the numbers by which runs are compared.

A result is computed, written, read and checked by this table; comparisons, objectives of sweeps, Weights & Biases, ``kvsim help``
and the reference read it. A new measure is a row here with its formula.

Fields over requests (``requests`` to ``slo``) exclude the leading ``warmup`` fraction of the trace. The counters of tiers,
links, policies and the engine, ``timeline`` and ``requests_per_s`` cover the whole run: a tier's peak or a link's use cannot be
attributed to single requests. ``engines`` and ``imbalance`` have both. A rejected request counts in ``requests`` and
``rejected`` only: it was not served, so it is excluded from ``prompt_tokens`` and from every rate. One that an admission policy
has refused counts in ``requests`` and ``admission`` likewise; objectives count both as missed.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from kvsim.engine.columns import TIER
from kvsim.engine.outcome import PHASES, REJECTED, tiers_listed
from kvsim.results.admission import ADMISSION, admission
from kvsim.results.counters import COUNTERS
from kvsim.results.diagnosis import diagnosis, parallel
from kvsim.results.engine_records import ENGINE, engine_records, imbalance
from kvsim.results.formulas import (
    THROUGHPUT,
    adapter_use,
    all_warnings,
    drafts,
    given,
    lost_to_disagreement,
    quantiles,
    session_s,
    sessions,
    spread_of,
    throughput,
    tool_calls,
)  # fmt: skip
from kvsim.results.measures import (
    Measure,
    Path,
    Record,
    TierRate,
    busiest_over_mean,
    byte_size,
    gigabytes,
    memory_bytes,
    moved_bytes,
)  # fmt: skip
from kvsim.results.rates import count, digits, link_record, percent, ratio, spread
from kvsim.results.scaling import SCALING, scaling
from kvsim.results.schema import (
    GPU_MEMORY,
    HARDWARE,
    LATER,
    LINK,
    OPTIONAL,
    SAMPLE,
    SLO,
    SPREAD,
    TIMELINE,
    TOKENS,
    BoundFile,
    Count,
    Field,
    Hash,
    MaybeCount,
    MaybeNumber,
    MaybeShare,
    Number,
    Seed,
    Share,
    TierName,
    by,
    many,
    shape,
    shape_of,
)  # fmt: skip
from kvsim.results.slo import attained
from kvsim.results.timeline import timeline

SCHEMA = 1
TIER_USE = {"capacity_pages": MaybeCount, "peak_pages": Count, "evicted_pages": Count, "inserted_pages": Count}
"""What is written of each tier, by attributes of ``TierUse``."""


FIELDS: list[Field] = [
    Field(name="schema", kind=int, is_logged=False, of=lambda run: SCHEMA, meaning="version of this format"),
    Field(
        name="config_hash", kind=Hash, presence=OPTIONAL, is_outcome=False, is_logged=False, of=given("config_hash"),
        meaning="hash of everything that decides the result",
    ),
    Field(
        name="command", kind=Literal["replay", "simulate"], is_logged=False, of=given("command"), meaning="what was run",
    ),
    Field(
        name="command_line", kind=str, presence=OPTIONAL, is_outcome=False, is_logged=False, of=given("command_line"),
        meaning="the line that reproduces the run",
    ),
    Field(name="status", kind=Literal["complete"], of=lambda run: "complete", meaning="`complete`"),
    Field(
        name="config", kind=dict[str, Any], is_outcome=False, is_logged=False, of=given("config"),
        meaning="the configuration, resolved",
    ),
    Field(
        name="choices", kind=dict[str, str], is_outcome=False, is_logged=False, of=given("choices"),
        meaning='the name chosen from each group, such as `{"trace": "mooncake", "eviction": "lru", '
        '"eviction@tiers.cpu.eviction": "arc"}`: what tables call policies. A policy passed to the Python API as an object '
        'has the name of its class',
    ),
    Field(
        name="versions", kind=dict[str, str], is_outcome=False, is_logged=False, of=given("versions"),
        meaning="versions of Python, kvsim (with `pure Python` or `compiled`) and the packages that results depend on",
    ),
    Field(name="seed", kind=Seed, is_outcome=False, of=given("seed"), meaning="seed of everything that is drawn"),
    Field(
        name="bounds", kind=by(Literal["belady", "unlimited"], BoundFile), presence=OPTIONAL, is_outcome=False, is_logged=False,
        of=given("bounds"), meaning="names of the bounds that a comparison shows, in the sweep's `bounds` folder",
    ),
    Field(
        name="warnings", kind=list[str], presence=LATER, is_outcome=False, of=all_warnings,
        meaning="[what to know before trusting the result](#warnings): a sentence for each finding",
    ),
    Field(name="page_bytes", kind=Count, presence=OPTIONAL, of=given("page_bytes"), meaning="bytes of a page's KV"),
    Field(
        name="rules_note", kind=str, presence=OPTIONAL, is_outcome=False, of=given("rules_note"),
        meaning="whose rules applied, if not those of the configuration",
    ),
    Field(
        name="trace_note", kind=str, presence=OPTIONAL, is_outcome=False, of=given("trace_note"),
        meaning="what part of the trace is synthetic, if any",
    ),
    Field(
        name="model_note", kind=str, presence=OPTIONAL, of=given("model_note"),
        meaning="how the model's `config.json` was understood, if it was read from one",
    ),
    Field(
        name="gpu_memory", kind=GPU_MEMORY, presence=OPTIONAL, of=given("gpu_memory"),
        meaning="with `tiers.gpu.capacity=auto`: how the memory of an engine's GPUs is divided into `kv_bytes`, "
        "`weights_bytes`, `workspace_bytes` and `states_bytes`; KV is on `kv_copies` GPUs each, and counts once",
    ),
    Field(
        name="requests", kind=Count, of=lambda run: len(run.outcome.requests) - run.skipped,
        meaning="requests counted, rejected and shed ones included",
    ),
    Field(name="warmup_requests", kind=Count, of=lambda run: run.skipped, meaning="requests left out before them"),
    Field(
        name="rejected", kind=Count, better=-1, of=lambda run: np.count_nonzero(run.counted & (run.outcome.status == REJECTED)),
        measures=(Measure("rejected", "rejected", Path("rejected"), count, -1, place=16, on_terminal=True),),
        meaning="requests counted that could never fit: they exceed the GPU tier, or what persistent prompts leave of it",
    ),
    Field(
        name="prompt_tokens", kind=Count, of=lambda run: int(run.prompts[run.served].sum()),
        meaning="tokens of the prompts that were counted and served",
    ),
    Field(
        name="prompt_pages", kind=Count, of=lambda run: int(run.prompt_pages[run.served].sum()),
        meaning="their pages",
    ),
    Field(
        name="hit_tokens", kind=TOKENS, better=1, of=lambda run: run.by_tier(run.hits),
        measures=(Measure(f"hit_rate_{TIER}", f"from {TIER}", TierRate(), percent, place=3, on_terminal=True),),
        meaning="tokens reused, by tier: `gpu`, `cpu`, `disk`",
    ),
    Field(
        name="hit_pages", kind=TOKENS, better=1, of=lambda run: run.by_tier(run.outcome.hit_pages),
        meaning="pages reused, by tier",
    ),
    Field(
        name="hit_rate", kind=MaybeShare, better=1, of=lambda run: run.rate(run.hits, run.prompts),
        measures=(Measure("hit_rate", "hit rate", Path("hit_rate"), percent, 1, place=2, on_terminal=True),),
        meaning="hit tokens over prompt tokens, 0 to 1",
    ),
    Field(
        name="sample", kind=SAMPLE, presence=OPTIONAL, of=given("sample"),
        measures=(
            Measure("least_hit_rate", "at least", Path("sample.hit_rate.low"), percent, place=2, on_terminal=True),
            Measure("most_hit_rate", "at most", Path("sample.hit_rate.high"), percent, place=2, on_terminal=True),
        ),
        meaning="only with [`sample`](#samples): the `share` of each of `draws` samples, their `requests` and `subtrees`, and "
        "the 95% interval (`low`, `high`) of `hit_rate` and of the rate of each of the `tiers`",
    ),
    Field(
        name="page_hit_rate", kind=MaybeShare, better=1, of=lambda run: run.rate(run.outcome.hit_pages, run.prompt_pages),
        measures=(Measure("page_hit_rate", "page hit rate", Path("page_hit_rate"), percent, 1, place=4),),
        meaning="hit pages over prompt pages, 0 to 1",
    ),
    Field(
        name="hit_requests", kind=Count, presence=LATER, better=1, of=lambda run: run.hit_requests(),
        meaning="requests with at least one hit page",
    ),
    Field(
        name="request_hit_rate", kind=MaybeShare, presence=LATER, better=1,
        of=lambda run: ratio(run.hit_requests(), int(np.count_nonzero(run.served))),
        meaning="their share of the requests counted and served",
    ),
    Field(
        name="ttft_s", kind=SPREAD, better=-1, of=spread_of("ttft_s"),
        measures=(
            Measure("ttft_s_mean", "TTFT mean (s)", Path("ttft_s.mean"), digits, -1, place=7, on_terminal=True),
            Measure("ttft_s_p99", "TTFT p99 (s)", Path("ttft_s.p99"), digits, -1, place=8, on_terminal=True),
        ),
        meaning="arrival to first token: `mean`, `p50`, `p90`, `p99` in seconds; null in a replay",
    ),
    Field(
        name="tpot_s", kind=SPREAD, better=-1, of=spread_of("tpot_s"),
        measures=(Measure("tpot_s_mean", "TPOT mean (s)", Path("tpot_s.mean"), digits, -1, place=12),),
        meaning="per output token after the first, likewise",
    ),
    Field(name="e2e_s", kind=SPREAD, better=-1, of=spread_of("e2e_s"), meaning="arrival to last token, likewise"),
    Field(
        name="phases_s", kind=shape(**dict.fromkeys(PHASES, SPREAD)), presence=LATER, better=-1,
        of=lambda run: {name: spread(run.outcome.phases_s[run.served, part]) for part, name in enumerate(PHASES)},
        measures=tuple(
            Measure(f"{name}_s_mean", f"{name} mean (s)", Path(f"phases_s.{name}.mean"), digits, place=9) for name in PHASES
        ),
        meaning="the parts of `ttft_s`, [`queue`, `load` and `prefill`](#phases): `mean`, `p50`, `p90`, `p99` of each",
    ),
    Field(
        name="sessions", kind=Count, presence=OPTIONAL, of=sessions,
        meaning="only in simulations of traces with sessions: [sessions](#sessions) all of whose requests were counted and "
        "served",
    ),
    Field(
        name="session_s", kind=SPREAD, presence=OPTIONAL, better=-1, of=session_s,
        measures=(
            Measure("session_s_mean", "session mean (s)", Path("session_s.mean"), digits, -1, place=12),
            Measure("session_s_p99", "session p99 (s)", Path("session_s.p99"), digits, -1, place=12),
        ),
        meaning="time to finish a session, from its first arrival to its last token: `mean`, `p50`, `p90`, `p99` in seconds",
    ),
    Field(
        name="throughput", kind=shape(**dict.fromkeys(THROUGHPUT, MaybeNumber)), better=1, of=throughput,
        measures=(
            Measure("prompt_tokens_per_s", "prompt tokens/s", Path("throughput.prompt_tokens_per_s"), digits, 1, place=13),
        ),
        meaning="`offered_requests_per_s` (arrivals, from the first to the last), `requests_per_s`, `prompt_tokens_per_s`, "
        "`output_tokens_per_s` of what was served, in simulated time, from the first arrival to the last end; the first request "
        "may have been rejected or shed",
    ),
    Field(
        name="slo", kind=SLO | None, presence=LATER, better=-1, of=lambda run: attained(run.outcome, run.slo, run.counted),
        measures=(
            Measure(
                "goodput_requests_per_s", "goodput (requests/s)", Path("slo.goodput_requests_per_s"), digits, 1, place=5,
                on_terminal=True,
            ),
            Measure("slo_attainment", "SLO attainment", Path("slo.attainment"), percent, 1, place=6, on_terminal=True),
        ),
        meaning="null without [objectives](#objectives): `ttft_s` and `tpot_s` as set, `attainment`, "
        "`goodput_requests_per_s`, `classes`",
    ),
    Field(
        name="links", kind=by(str, LINK), better=-1,
        of=lambda run: {name: link_record([link], run.outcome.simulated_s) for name, link in run.outcome.links.items()},
        measures=(Measure("moved_bytes", "moved (GB)", moved_bytes, gigabytes, -1, place=14),),
        meaning="by direction, such as `gpu-cpu`: `bytes`, `transfers`, `busy_s`, and `utilization`, which is `busy_s` over "
        "`simulated_s` or, where a backlog is written after the last request, over the time until that is done; with several "
        "links of the same name their sums, and the mean utilization of those that were used",
    ),
    Field(
        name="tiers", kind=by(TierName, shape(**TIER_USE)), better=-1,
        of=lambda run: {name: {key: getattr(use, key) for key in TIER_USE} for name, use in run.outcome.tiers.items()},
        measures=(Measure("capacity_bytes", "total capacity", memory_bytes, byte_size, place=1),),
        meaning="by tier: `capacity_pages` (null: unlimited), `peak_pages`, `evicted_pages`, `inserted_pages`; tiers of the "
        "same name are added up, their peaks too",
    ),
    Field(
        name="prefetch", kind=by(str, Count), better=-1, of=lambda run: run.outcome.prefetch,
        meaning="pages fetched for waiting requests, used by them, wasted; pages not fetched because of the threshold, the rate "
        "limit or lack of memory",
    ),
    Field(
        name="placement", kind=by(str, Count), better=-1, of=lambda run: run.outcome.placement,
        meaning="pages written down, loaded to the GPU, fetched from disk, *revived* (used again while they were being written "
        "down, and therefore kept on the GPU), not copied for lack of room in the tier below, dropped, unreadable in their tier",
    ),
    Field(
        name="checkpoints", kind=by(str, Count), better=-1, of=lambda run: run.outcome.checkpoints,
        meaning="recurrent states saved, used, evicted, detached and without room; their bytes; tokens lost to missing state",
    ),
    Field(
        name="retractions", kind=MaybeCount, better=-1, of=lambda run: run.outcome.retractions,
        meaning="times a running request had to give its pages back",
    ),
    Field(
        name="speculation", presence=OPTIONAL, of=lambda run: drafts(run.outcome.drafts),
        kind=shape(
            steps=Count, draft_tokens=Count, accepted_tokens=Count, tokens=Count, acceptance_rate=Share, tokens_per_step=Number
        ),
        meaning="only with `engine.speculation.tokens`, over all decode steps of all answers: `steps`, the `draft_tokens` made "
        "for them, those that were right (`accepted_tokens`) and the `tokens` of answers; `acceptance_rate`, accepted over "
        "draft tokens; and `tokens_per_step`",
    ),
    Field(
        name="lora", presence=OPTIONAL, of=lambda run: adapter_use(run.outcome.adapter_use),
        kind=shape(uses=Count, loads=Count, hit_rate=Share),
        meaning="only with `engine.lora.max_loras`: how often a request with an adapter was admitted (`uses`), how often an "
        "adapter was copied to the GPU (`loads`), and `hit_rate`, the share of uses without a copy",
    ),
    Field(
        name="tool_calls", presence=OPTIONAL, of=tool_calls,
        kind=shape(**dict.fromkeys(COUNTERS["tool_calls"], Count), ttft_s=SPREAD),
        meaning="only with `prefetch=tool_calls` or another policy that decides what pages do during tool calls: `calls` between "
        "a request and the one that continues it; `offloads` at their beginning, and `offloaded_pages`; `uploads` before their "
        "expected end, `uploaded_pages`, and of these `used_pages` and `wasted_pages`; `no_room_offloads` and "
        "`no_room_uploads`; and `ttft_s` of the requests that wait for others",
    ),
    Field(
        name="lost_to_disagreement", kind=by(str, Count), presence=OPTIONAL, of=lost_to_disagreement,
        meaning="only in simulations with `hardware.gpus` above 1: `pages` that some rank had at the end of a transfer and "
        "another had not, as the difference between the rank with the most and the one with the fewest, summed over "
        "`transfers`, those where it is not 0",
    ),
    Field(
        name="imbalance", kind=by(str, by(Literal["busy", "computed_tokens", "output_tokens"], MaybeNumber)), presence=OPTIONAL,
        of=lambda run: imbalance(run.outcome, run.prompts, run.hits, run.served),
        measures=(Measure("imbalance", "busiest engine / mean", busiest_over_mean, digits, -1, place=15),),
        meaning="only with several [engines](#engines): how much more than the mean the most loaded one did",
    ),
    Field(
        name="engines", kind=many(shape_of(tuple(ENGINE))), presence=OPTIONAL, is_logged=False,
        of=lambda run: engine_records(run.outcome, run.prompts, run.hits, run.served),
        meaning="only with several [engines](#engines): what each has done",
    ),
    Field(
        name="scaling", kind=SCALING, presence=OPTIONAL, better=-1,
        of=lambda run: scaling(run.outcome, run.given["config"]),
        measures=(Measure("engine_s", "engine time (s)", Path("scaling.engine_s"), digits, -1, place=15),),
        meaning="only with `autoscaling`: `engine_s`, the seconds that engines were there, added up, while they start, serve or "
        "drain; `gpu_s`, the same for GPUs; `of_all`, as a share of `cluster.engines` all the time; `mean_engines`, "
        "`most_engines`; `starts` and `stops`; `start_s`, what a start takes; `changes`, lists of a time and the engines that "
        "are up, start and drain from then on",
    ),
    Field(
        name="admission", kind=ADMISSION, presence=OPTIONAL, better=-1,
        of=lambda run: admission(run.outcome, run.counted),
        measures=(Measure("shed", "shed", Path("admission.shed"), count, -1, place=16, on_terminal=True),),
        meaning="only with [`admission`](admission.md): `shed`, the requests counted that were refused; `share`, of all counted; "
        "`unsent`, those of them that were never sent, because a request that they wait for was refused; `classes`, how many "
        "of which type, tenant and priority, where the trace tells",
    ),
    Field(
        name="parallel", kind=shape(stages=MaybeShare, communication=Share), presence=OPTIONAL,
        of=lambda run: parallel(run.outcome),
        meaning="with pipeline or expert parallelism, shares of the time in steps: `stages`, in which a stage is busy on average "
        "(the rest is the pipeline's bubble; null with a single stage); `communication`, in which GPUs exchange activations",
    ),
    Field(
        name="diagnosis", kind=shape(bottleneck=str, busy=by(str, Share), text=str, drive_writes_per_day=MaybeNumber),
        presence=OPTIONAL, of=lambda run: diagnosis(run.outcome, run.given.get("page_bytes")),
        meaning="only with a clock: the [bottleneck](#bottleneck), the share of the run in which the GPUs and each link were "
        "busy, a sentence about both, and how often a day a disk tier would be written as a whole",
    ),
    Field(name="simulated_s", kind=Number, better=-1, of=lambda run: run.outcome.simulated_s, meaning="simulated span"),
    Field(
        name="hardware", kind=HARDWARE, presence=OPTIONAL, of=lambda run: run.outcome.hardware or None,
        meaning="only with `substrate=hardware`: device and number of GPUs, GPUs whose process was killed, pages and "
        "recurrent states verified and wrong, pages and states moved, pages restored, faults of the disk, how late the host "
        "was at most, and `steps`, [see below](#steps-of-real-runs)",
    ),
    Field(name="load_s", kind=Number, is_outcome=False, of=given("load_s"), meaning="seconds to read the trace"),
    Field(
        name="wall_s", kind=Number, better=-1, is_outcome=False, of=lambda run: run.outcome.wall_s,
        meaning="seconds of the run without that",
    ),
    Field(
        name="requests_per_s", kind=MaybeNumber, better=1, is_outcome=False,
        of=lambda run: ratio(len(run.outcome.requests), run.outcome.wall_s), meaning="requests over `wall_s`",
    ),
    Field(
        name="timeline", kind=TIMELINE, is_logged=False,
        of=lambda run: timeline(run.outcome, run.prompts, run.hits, run.skipped),
        meaning="what the pictures show: `hits` and `links` over the run, with several engines `engines` (below) and, with "
        "`timeline=true`, `free_pages`: by tier of limited capacity, the mean number of pages that nobody holds and nothing "
        "is cached in, for each of 200 equal spans of the run's time (`edges_s`)",
    ),
    Field(
        name="ttft_quantiles_s", kind=many(Number), is_logged=False, of=quantiles,
        meaning="the percentiles 0 to 100 of `ttft_s`",
    ),
]  # fmt: skip
"""All fields, in the order of the file."""


def measures_of(results: Iterable[Record]) -> list[Measure]:
    """Return the measures of some runs, in the order of tables; a measure by tier once for each tier that the runs list."""
    tiers = tiers_listed(tier for result in results for tier in result["hit_tokens"])
    found: list[Measure] = []
    for measure in (measure for row in FIELDS for measure in row.measures):
        names = tiers if TIER in measure.key else ("",)
        for tier in names:
            key, title = measure.key.replace(TIER, tier), measure.title.replace(TIER, tier)
            found.append(replace(measure, key=key, title=title, of=TierRate(tier) if tier else measure.of))
    return sorted(found, key=lambda measure: measure.place)


BY_KEY = {measure.key: measure for measure in measures_of(())}
"""The measures that all runs have, by key."""
