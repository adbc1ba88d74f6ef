"""The record of a run: ``result.json``, from which tables, pictures and logs are drawn.

Statistics over requests (``requests`` to ``throughput``) leave out the leading ``warmup`` fraction of the trace. What tiers,
links, policies and the engine counted (``tiers``, ``links``, ``prefetch``, ``placement``, ``checkpoints``, ``retractions``,
``simulated_s``, ``hardware``), ``timeline`` and ``requests_per_s`` cover the whole run: a tier's peak and a link's use have no
owner among the requests.

A rejected request counts in ``requests`` and ``rejected`` and in nothing else: it was not served, so it weighs neither in
``prompt_tokens`` nor in any rate.
"""

import json
import platform
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from math import isfinite
from typing import Any

import numpy as np

from kvsim.compiled import build_name
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.errors import UsageError
from kvsim.report.timeline import timeline

SCHEMA = 1
TIERS = ("gpu", "cpu", "disk")
RunRecord = dict[str, Any]
"""What a command writes as JSON: the content of ``result.json``, ``curve.json`` or ``validate.json``."""


def summarize(
    outcome: Outcome,
    *,
    command: str,
    config: Mapping[str, Any],
    seed: int,
    warmup: float,
    load_s: float,
    versions: Mapping[str, str] | None = None,
    command_line: str | None = None,
    config_hash: str | None = None,
    bounds: Mapping[str, str] | None = None,
    page_bytes: int | None = None,
) -> RunRecord:
    """The record of one run, in the order in which ``result.json`` shows it; made of what JSON can hold.

    Rates are fractions, times seconds. A value that cannot be known (a time without a clock, a rate of nothing) is None.
    ``versions`` is ``installed_versions()`` unless given; ``command_line`` is what reproduces the run, ``config_hash``
    names what decides its result, ``bounds`` the bounds to compare it with; what is not given is left out.
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
        "versions": installed_versions() if versions is None else versions,
        "seed": seed,
        "bounds": bounds,
        "page_bytes": page_bytes,
        "requests": total - skipped,
        "warmup_requests": skipped,
        "rejected": np.count_nonzero(counted & (outcome.status == REJECTED)),
        **_hits(outcome, prompts, hits, served),
        "ttft_s": spread(outcome.ttft_s[served]),
        "tpot_s": spread(outcome.tpot_s[served]),
        "e2e_s": spread(outcome.e2e_s[served]),
        "throughput": _throughput(outcome, prompts, served),
        "links": _links(outcome),
        "tiers": _tiers(outcome),
        "prefetch": outcome.prefetch,
        "placement": outcome.placement,
        "checkpoints": outcome.checkpoints,
        "retractions": outcome.retractions,
        "simulated_s": outcome.simulated_s,
        "hardware": outcome.hardware or None,
        "load_s": load_s,
        "wall_s": outcome.wall_s,
        "requests_per_s": ratio(total, outcome.wall_s),
        "timeline": timeline(outcome, prompts, hits, skipped),
        "ttft_quantiles_s": _quantiles(outcome.ttft_s[served]),
    }
    optional = ("config_hash", "command_line", "bounds", "page_bytes", "hardware")
    return {name: plain(value) for name, value in record.items() if value is not None or name not in optional}


def warmup_requests(warmup: float, requests: int) -> int:
    """How many leading requests ``warmup`` leaves out: the whole part of ``warmup * requests``, in decimal arithmetic.

    Raises UsageError unless 0 <= ``warmup`` < 1.
    """
    if not 0 <= warmup < 1:
        raise UsageError(f"warmup must be at least 0 and below 1, not {warmup}: it is the fraction of requests to leave out")
    return int(Fraction(str(warmup)) * requests)


def prompt_tokens(outcome: Outcome) -> np.ndarray:
    """Prompt tokens of each request."""
    return np.array([request.prompt_tokens for request in outcome.requests], dtype=np.int64)


def hit_tokens(outcome: Outcome, prompts: np.ndarray | None = None) -> np.ndarray:
    """Prompt tokens each request reused; one row a request, columns gpu, cpu, disk. ``prompts`` are ``prompt_tokens(outcome)``.

    A full page weighs ``page_tokens`` and a trailing partial page its own tokens, so the pages hit so far weigh at most the
    prompt; the tiers follow one another from the start of the prompt.
    """
    prompts = prompt_tokens(outcome) if prompts is None else prompts
    so_far = np.cumsum(outcome.hit_pages, axis=1, dtype=np.int64) * outcome.page_tokens
    return np.diff(np.minimum(so_far, prompts[:, None]), axis=1, prepend=0)


def hit_definition(config: Mapping[str, Any]) -> str:
    """What a hit is under ``config``, in one sentence; it stands wherever a rate is shown."""
    full = _setting(config, "trace", "tail") != "all"
    last = _setting(config, "rules", "recompute_last_token") is not False
    return (
        "A hit is a prompt token reused at admission: contiguous from the start, counted once, "
        + ("full pages only" if full else "full pages and the trailing partial one")
        + (", never the whole prompt" if last else "")
        + "; rejected requests do not weigh in."
    )


def spread(values: np.ndarray) -> dict[str, float | None]:
    """Mean and percentiles of the values that are known; None where none is."""
    known = values[~np.isnan(values)]
    if not known.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None of nothing."""
    return float(part / whole) if whole > 0 else None


@cache
def installed_versions() -> dict[str, str]:
    """Versions of Python, kvsim (and whether it is compiled) and the packages that results depend on."""
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
    """``value`` in the types of JSON: NumPy numbers as Python's, what is not finite as None, what is unknown as text."""
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
    """``result`` as text, its fields in order; those for people are indented, arrays for pictures are one line each."""
    fields = []
    for name, value in result.items():
        indent = None if name in ("timeline", "ttft_quantiles_s") else 2
        text = json.dumps(value, indent=indent, allow_nan=False).replace("\n", "\n  ")
        fields.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _hits(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, served: np.ndarray) -> RunRecord:
    tokens = hits[served].sum(axis=0)
    pages = outcome.hit_pages[served].sum(axis=0)
    all_tokens = int(prompts[served].sum())
    all_pages = int(np.array([request.prompt_pages for request in outcome.requests])[served].sum())
    return {
        "prompt_tokens": all_tokens,
        "prompt_pages": all_pages,
        "hit_tokens": dict(zip(TIERS, tokens.tolist(), strict=True)),
        "hit_pages": dict(zip(TIERS, pages.tolist(), strict=True)),
        "hit_rate": ratio(int(tokens.sum()), all_tokens),
        "page_hit_rate": ratio(int(pages.sum()), all_pages),
    }


def _throughput(outcome: Outcome, prompts: np.ndarray, served: np.ndarray) -> dict[str, float | None]:
    """Requests and tokens finished per second, from the first arrival counted to the last finish."""
    timed = served & ~np.isnan(outcome.e2e_s)
    arrivals = outcome.arrival_s[timed]
    span_s = float((arrivals + outcome.e2e_s[timed]).max() - arrivals.min()) if arrivals.size else 0.0
    output = sum(outcome.requests[i].output_tokens for i in np.flatnonzero(timed).tolist())
    return {
        "requests_per_s": ratio(arrivals.size, span_s),
        "prompt_tokens_per_s": ratio(int(prompts[timed].sum()), span_s),
        "output_tokens_per_s": ratio(output, span_s),
    }


def _links(outcome: Outcome) -> RunRecord:
    return {
        name: {
            "bytes": link.bytes,
            "transfers": link.transfers,
            "busy_s": link.busy_s,
            "utilization": ratio(link.busy_s, outcome.simulated_s),
        }
        for name, link in outcome.links.items()
    }


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
    """The values below which 0, 1, ..., 100 % lie; empty if none is known."""
    known = values[~np.isnan(values)]
    return np.percentile(known, np.arange(101)).round(9).tolist() if known.size else []


def _setting(config: Mapping[str, Any], group: str, key: str) -> Any:
    settings = config.get(group)
    return settings.get(key) if isinstance(settings, Mapping) else None
