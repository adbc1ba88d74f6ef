"""The record of a run: ``result.json``, the source of all tables, pictures and logs. Its fields are those of ``fields.py``."""

import json
import platform
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import isfinite
from typing import Any

import numpy as np

from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.installation import build_name
from kvsim.results.fields import FIELDS
from kvsim.results.formulas import Basis
from kvsim.results.schema import record_of
from kvsim.results.slo import Slo

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
    run_warnings: Sequence[str] = (),
    slo: Slo | None = None,
    model_note: str | None = None,
    gpu_memory: Mapping[str, Any] | None = None,
    estimated: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Return the record of one run, in the order of ``result.json``, in types that JSON can represent.

    Rates are fractions, times seconds. A value that does not exist (a time without a clock, a rate of nothing) is None.
    ``choices`` are the names chosen from the groups of the configuration. ``versions`` defaults to ``installed_versions()``.
    ``command_line`` reproduces the run, ``config_hash`` identifies everything that determines its result, ``bounds`` names its
    bounds, ``rules_note`` says whose rules applied, if not those of the configuration, ``trace_note`` what part of the trace is
    synthetic, ``run_warnings`` what a reader should know of its times, ``model_note`` how the model's file was understood, and
    ``gpu_memory`` how the memory of an engine's GPUs was divided, if that decided the size of the GPU tier; of these, those not
    given are left out. ``slo`` are the objectives that requests are held against. ``estimated`` are fields that are known of the
    whole trace where the outcome is that of samples; they take the place of the outcome's.
    """
    given = {
        "command": command,
        "config": config,
        "choices": choices or {},
        "seed": seed,
        "load_s": load_s,
        "versions": installed_versions() if versions is None else versions,
        "command_line": command_line,
        "config_hash": config_hash,
        "bounds": bounds,
        "page_bytes": page_bytes,
        "rules_note": rules_note,
        "trace_note": trace_note,
        "run_warnings": run_warnings,
        "model_note": model_note,
        "gpu_memory": gpu_memory,
        "sample": (estimated or {}).get("sample"),
    }
    basis = Basis(outcome=outcome, given=given, skipped=warmup_requests(warmup, len(outcome.requests)), slo=slo or Slo())
    return {name: plain(value) for name, value in (record_of(FIELDS, basis) | dict(estimated or {})).items()}


def warmup_requests(warmup: float, requests: int) -> int:
    """Return how many leading requests ``warmup`` leaves out: ``warmup * requests``, rounded down, in decimal arithmetic.

    Raises UsageError unless 0 <= ``warmup`` < 1.
    """
    if not 0 <= warmup < 1:
        raise UsageError(f"warmup must be at least 0 and below 1, not {warmup}: it is the fraction of requests left out")
    return int(Fraction(str(warmup)) * requests)


def hit_definition(config: Mapping[str, Any], *, has_shed: bool = False) -> str:
    """Return the definition of a hit under ``config`` in one sentence, to be shown with every rate.

    ``has_shed``: whether the admission policy has refused requests.
    """
    full = _setting(config, "trace", "tail") != "all"
    last = _setting(config, "rules", "recompute_last_token") is not False
    return (
        "A hit is a prompt token reused at admission: contiguous from the start, counted once, "
        + ("full pages only" if full else "full pages and the trailing partial one")
        + (", never the whole prompt" if last else "")
        + f"; rejected {'and shed ' if has_shed else ''}requests are excluded."
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


def _setting(config: Mapping[str, Any], group: str, key: str) -> Any:
    settings = config.get(group)
    return settings.get(key) if isinstance(settings, Mapping) else None
