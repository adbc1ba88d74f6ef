"""The record of a run: ``result.json``, the source of all tables, pictures and logs.

Statistics over requests (``requests`` to ``throughput``) exclude the leading ``warmup`` fraction of the trace. The counters of
tiers, links, policies and the engine (``tiers``, ``links``, ``prefetch``, ``placement``, ``checkpoints``, ``retractions``,
``lost_to_disagreement``, ``simulated_s``, ``hardware``), ``timeline`` and ``requests_per_s`` cover the whole run: a tier's peak
or a link's use cannot be attributed to single requests. ``engines`` and ``imbalance`` have both
(``kvsim/results/engine_records.py``).

A rejected request counts in ``requests`` and ``rejected`` only: it was not served, so it is excluded from ``prompt_tokens``
and from every rate.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from math import isfinite
from typing import Any

import numpy as np

from kvsim.engine.outcome import PHASES, REJECTED, Outcome
from kvsim.errors import UsageError
from kvsim.installation import build_name
from kvsim.results.engine_records import engine_records, imbalance
from kvsim.results.rates import link_record, ratio, span_s, spread
from kvsim.results.slo import Slo, attained
from kvsim.results.timeline import timeline
from kvsim.results.warnings import warnings

SCHEMA = 1
TIERS = ("gpu", "cpu", "disk")
OPTIONAL = (
    "config_hash", "command_line", "bounds", "page_bytes", "rules_note", "trace_note", "model_note", "gpu_memory",
    "lost_to_disagreement", "imbalance", "engines", "hardware",
)  # fmt: skip
"""Fields left out where they have no value."""
RunRecord = dict[str, Any]
"""What a command writes as JSON: the content of ``result.json``, ``curve.json`` or ``validate.json``."""


def summarize(
    outcome: Outcome,
    *,
    command: str,
    config: Mapping[str, Any],
    choices: Mapping[str, str] | None = None,
    seed: int,
    warmup: float,
    load_s: float,
    versions: Mapping[str, str] | None = None,
    command_line: str | None = None,
    config_hash: str | None = None,
    bounds: Mapping[str, str] | None = None,
    page_bytes: int | None = None,
    rules_note: str | None = None,
    trace_note: str | None = None,
    slo: Slo | None = None,
    model_note: str | None = None,
    gpu_memory: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Return the record of one run, in the order of ``result.json``, in types that JSON can represent.

    Rates are fractions, times seconds. A value that does not exist (a time without a clock, a rate of nothing) is None.
    ``choices`` are the names chosen from the groups of the configuration. ``versions`` defaults to ``installed_versions()``.
    ``command_line`` reproduces the run, ``config_hash`` identifies everything that determines its result, ``bounds`` names its
    bounds, ``rules_note`` says whose rules applied, if not those of the configuration, ``trace_note`` what of the trace was made
    up, ``model_note`` what was understood of the model's file, and ``gpu_memory`` how the memory of an engine's GPUs was divided,
    if that decided the size of the GPU tier; of these, those not given are left out. ``slo`` are the objectives that requests
    are held against.
    """
    total = len(outcome.requests)
    skipped = warmup_requests(warmup, total)
    counted = np.arange(total) >= skipped
    served = counted & (outcome.status != REJECTED)
    prompts = prompt_tokens(outcome)
    hits = hit_tokens(outcome, prompts)
    record = {
        "schema": SCHEMA,
        "config_hash": config_hash,
        "command": command,
        "command_line": command_line,
        "status": "complete",
        "config": config,
        "choices": choices or {},
        "versions": installed_versions() if versions is None else versions,
        "seed": seed,
        "bounds": bounds,
        "warnings": [*([trace_note] if trace_note else []), *warnings(outcome)],
        "page_bytes": page_bytes,
        "rules_note": rules_note,
        "trace_note": trace_note,
        "model_note": model_note,
        "gpu_memory": gpu_memory,
        "requests": total - skipped,
        "warmup_requests": skipped,
        "rejected": np.count_nonzero(counted & (outcome.status == REJECTED)),
        **_hits(outcome, prompts, hits, served),
        "ttft_s": spread(outcome.ttft_s[served]),
        "tpot_s": spread(outcome.tpot_s[served]),
        "e2e_s": spread(outcome.e2e_s[served]),
        "phases_s": phases(outcome, served),
        "throughput": _throughput(outcome, prompts, counted, served),
        "slo": attained(outcome, slo or Slo(), counted),
        "links": {name: link_record([link], outcome.simulated_s) for name, link in outcome.links.items()},
        "tiers": _tiers(outcome),
        "prefetch": outcome.prefetch,
        "placement": outcome.placement,
        "checkpoints": outcome.checkpoints,
        "retractions": outcome.retractions,
        "lost_to_disagreement": _lost_to_disagreement(outcome, command, config),
        "imbalance": imbalance(outcome, prompts, hits, served),
        "engines": engine_records(outcome, prompts, hits, served),
        "simulated_s": outcome.simulated_s,
        "hardware": outcome.hardware or None,
        "load_s": load_s,
        "wall_s": outcome.wall_s,
        "requests_per_s": ratio(total, outcome.wall_s),
        "timeline": timeline(outcome, prompts, hits, skipped),
        "ttft_quantiles_s": _quantiles(outcome.ttft_s[served]),
    }
    return {name: plain(value) for name, value in record.items() if value is not None or name not in OPTIONAL}


def warmup_requests(warmup: float, requests: int) -> int:
    """Return how many leading requests ``warmup`` leaves out: ``warmup * requests``, rounded down, in decimal arithmetic.

    Raises UsageError unless 0 <= ``warmup`` < 1.
    """
    if not 0 <= warmup < 1:
        raise UsageError(f"warmup must be at least 0 and below 1, not {warmup}: it is the fraction of requests left out")
    return int(Fraction(str(warmup)) * requests)


def prompt_tokens(outcome: Outcome) -> np.ndarray:
    """Return the prompt tokens of each request."""
    return np.array([request.prompt_tokens for request in outcome.requests], dtype=np.int64)


def hit_tokens(outcome: Outcome, prompts: np.ndarray | None = None) -> np.ndarray:
    """Return the prompt tokens each request reused: one row per request, columns gpu, cpu, disk.

    ``prompts`` is ``prompt_tokens(outcome)``, if already computed. A full page counts ``page_tokens``, a trailing partial page
    only its own tokens, so hits never exceed the prompt; hits in gpu, cpu and disk follow one another along the prompt.
    """
    prompts = prompt_tokens(outcome) if prompts is None else prompts
    so_far = np.cumsum(outcome.hit_pages, axis=1, dtype=np.int64) * outcome.page_tokens
    return np.diff(np.minimum(so_far, prompts[:, None]), axis=1, prepend=0)


def hit_definition(config: Mapping[str, Any]) -> str:
    """Return the definition of a hit under ``config`` in one sentence, to be shown with every rate."""
    full = _setting(config, "trace", "tail") != "all"
    last = _setting(config, "rules", "recompute_last_token") is not False
    return (
        "A hit is a prompt token reused at admission: contiguous from the start, counted once, "
        + ("full pages only" if full else "full pages and the trailing partial one")
        + (", never the whole prompt" if last else "")
        + "; rejected requests are excluded."
    )


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python, kvsim (and whether it is compiled) and the packages that results depend on."""
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for package in ("kvsim", "numpy", "xxhash", "simpy", "hydra-core"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["kvsim"] += f" ({build_name()})"
    return versions


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON types: NumPy values to Python's, non-finite numbers to None, unknown types to text."""
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def to_json(result: RunRecord) -> str:
    """Return ``result`` as JSON text, fields in order: indented for readers, arrays for pictures and engines on one line each."""
    fields = []
    for name, value in result.items():
        if name == "engines":
            text = "[\n    " + ",\n    ".join(json.dumps(engine, allow_nan=False) for engine in value) + "\n  ]"
        else:
            indent = None if name in ("timeline", "ttft_quantiles_s") else 2
            text = json.dumps(value, indent=indent, allow_nan=False).replace("\n", "\n  ")
        fields.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _hits(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, served: np.ndarray) -> RunRecord:
    tokens = hits[served].sum(axis=0)
    pages = outcome.hit_pages[served].sum(axis=0)
    hit_requests = int(np.count_nonzero(outcome.hit_pages[served].any(axis=1)))
    all_tokens = int(prompts[served].sum())
    all_pages = int(np.array([request.prompt_pages for request in outcome.requests])[served].sum())
    return {
        "prompt_tokens": all_tokens,
        "prompt_pages": all_pages,
        "hit_tokens": dict(zip(TIERS, tokens.tolist(), strict=True)),
        "hit_pages": dict(zip(TIERS, pages.tolist(), strict=True)),
        "hit_rate": ratio(int(tokens.sum()), all_tokens),
        "page_hit_rate": ratio(int(pages.sum()), all_pages),
        "hit_requests": hit_requests,
        "request_hit_rate": ratio(hit_requests, int(np.count_nonzero(served))),
    }


def phases(outcome: Outcome, served: np.ndarray) -> dict[str, dict[str, float | None]]:
    """Return the spread of each part of the time to first token."""
    times = np.full((len(served), len(PHASES)), np.nan) if outcome.phases_s is None else outcome.phases_s
    return {name: spread(times[served, column]) for column, name in enumerate(PHASES)}


def _throughput(outcome: Outcome, prompts: np.ndarray, counted: np.ndarray, served: np.ndarray) -> dict[str, float | None]:
    """Return requests and tokens finished per second, from the first counted arrival to the last finish.

    Requests are offered from the first counted arrival to the last one.
    """
    timed, seconds = served & ~np.isnan(outcome.e2e_s), span_s(outcome, served)
    output = sum(outcome.requests[i].output_tokens * outcome.requests[i].samples for i in np.flatnonzero(timed).tolist())
    arrived = outcome.arrival_s[counted]
    between = arrived.max() - arrived.min() if arrived.size and not np.isnan(outcome.ttft_s).all() else 0.0
    return {
        "offered_requests_per_s": ratio(arrived.size - 1, float(between)),
        "requests_per_s": ratio(int(np.count_nonzero(timed)), seconds),
        "prompt_tokens_per_s": ratio(int(prompts[timed].sum()), seconds),
        "output_tokens_per_s": ratio(output, seconds),
    }


def _lost_to_disagreement(outcome: Outcome, command: str, config: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the pages that only some ranks had at the end of a transfer; None if there was only one rank, or no transfer."""
    ranks = _setting(config, "hardware", "gpus") or 1
    return asdict(outcome.lost_to_disagreement) if command == "simulate" and ranks > 1 else None


def _tiers(outcome: Outcome) -> RunRecord:
    return {
        name: {
            "capacity_pages": tier.capacity_pages,
            "peak_pages": tier.peak_pages,
            "evicted_pages": tier.evicted_pages,
            "inserted_pages": tier.inserted_pages,
        }
        for name, tier in outcome.tiers.items()
    }


def _quantiles(values: np.ndarray) -> list[float]:
    """Return the percentiles 0, 1, ..., 100 of the values, ignoring NaN; empty if there are none."""
    known = values[~np.isnan(values)]
    return np.percentile(known, np.arange(101)).round(9).tolist() if known.size else []


def _setting(config: Mapping[str, Any], group: str, key: str) -> Any:
    settings = config.get(group)
    return settings.get(key) if isinstance(settings, Mapping) else None
