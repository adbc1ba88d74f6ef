"""What ran: model, hardware, trace, policies and sizes, from a result's choices and configuration."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvsim.report.shown_paths import setting_without_folders, without_folders
from kvsim.report.summary import capacity, objective_text
from kvsim.results.chosen_names import package
from kvsim.results.rates import count, size
from kvsim.results.result import RunRecord

SEPARATOR = " · "
FAMILIES = (
    "eviction", "placement", "prefetch", "checkpoint", "routing", "scheduling", "autoscaling", "admission", "rules", "engine",
)  # fmt: skip
USUAL = {
    "prefetch": "none",
    "checkpoint": "none",
    "scheduling": "fcfs",
    "autoscaling": "none",
    "admission": "none",
    "rules": "default",
    "engine": "default",
    "logger": "none",
}
"""Choices that need no mention."""


SHOWN = (
    "page_tokens", "trace.path", "trace.limit", "trace.rate", "hardware.gpus", "hardware.tensor_parallel",
    "hardware.pipeline_parallel", "hardware.expert_parallel", "cluster.engines", "cluster.prefill",
    "cluster.decode", "seed", "output", "substrate", "timeline", "events", "print_tree",
)  # fmt: skip
"""Settings that other lines show, and those of what is written."""


def about_run(result: RunRecord) -> list[tuple[str, str]]:
    """Return pairs of a name and a text: what ran, the most important first; names without data are left out."""
    chosen = {package(group): name for group, name in result.get("choices", {}).items()}
    config = result["config"]
    page_tokens = config.get("page_tokens")
    page = f"pages of {page_tokens} tokens" if page_tokens else ""
    if page and "page_bytes" in result:
        page += f" ({size(result['page_bytes'])})"
    pairs = [
        ("model", _joined(chosen.get("model"), page)),
        ("hardware", _joined(*_machine(chosen, result))),
        ("trace", _joined(chosen.get("trace"), _path(config), _limits(config))),
        ("preset", chosen.get("preset", "")),
        ("policies", _joined(*(policies(chosen, _idle(result))))),
        ("tiers", _joined(*(_tier(name, tier, result) for name, tier in result.get("tiers", {}).items()))),
        ("objectives", objective_text(result["slo"]) if result.get("slo") else ""),
        ("also set", SEPARATOR.join(also_set(result))),
        ("seed", str(result["seed"])),
    ]
    return [(name, text) for name, text in pairs if text]


def common(abouts: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the parts of descriptions that all runs share."""
    pairs = []
    for name, text in abouts[0]:
        others = [dict(about).get(name, "").split(SEPARATOR) for about in abouts]
        parts = [part for part in text.split(SEPARATOR) if all(part in other for other in others)]
        pairs.append((name, SEPARATOR.join(parts)))
    return [(name, text) for name, text in pairs if text]


def _machine(chosen: Mapping[str, str], result: RunRecord) -> list[str]:
    """Return the GPUs of an engine, such as ``8x h100``, how a model is divided among them, the drive and the network card that
    replace the machine's own, and how many engines there are."""
    name, devices = chosen.get("hardware"), [chosen[kind] for kind in ("drive", "network") if kind in chosen]
    config = result["config"]
    hardware, cluster = (config.get(key) if isinstance(config.get(key), Mapping) else {} for key in ("hardware", "cluster"))
    gpus, engines = hardware.get("gpus") or 1, _engines(result)
    is_clocked = result.get("command") in ("simulate", "saturate")
    if not name or not isinstance(gpus, int):
        return [name or "", *devices]
    parts = [f"{gpus}x {name}", degrees(hardware, gpus)] if gpus > 1 and is_clocked else [name]
    if engines > 1:
        apart = f" ({cluster['prefill']} prefill, {cluster['decode']} decode)" if cluster.get("prefill") else ""
        parts.append(f"{'up to ' if result.get('scaling') else ''}{engines} engines{apart}")
    return [*parts, *devices, "measured on hardware" if config.get("substrate") == "hardware" else ""]


def degrees(hardware: Mapping[str, Any], gpus: int) -> str:
    """Return how GPUs share a model, such as ``TP4 PP2 EP4``; degrees of 1 are left out, besides tensor parallelism.

    GPUs that stages cannot share out evenly have no degree of tensor parallelism.
    """
    known = [hardware.get(name) for name in ("pipeline_parallel", "expert_parallel")]
    stages, groups = (value if isinstance(value, int) and value > 0 else 1 for value in known)
    tensor = [] if gpus % stages else [f"TP{gpus // stages}"]
    return " ".join([*tensor, *[f"PP{stages}"] * (stages > 1), *[f"EP{groups}"] * (groups > 1)])


def also_set(result: RunRecord) -> list[str]:
    """Return what the run's command line sets and no other line of the description shows."""
    words = [word for word in shlex.split(result.get("command_line") or "") if "=" in word and not word.startswith("-")]
    return [setting_without_folders(word) for word in words if not _is_shown(word.lstrip("+~").partition("=")[0])]


def _is_shown(key: str) -> bool:
    return (
        key in SHOWN
        or key.startswith(("hydra", "sweep.", "slo.", "logger"))
        or key.partition("@")[0] in (*FAMILIES, "model", "hardware", "drive", "network", "trace", "preset")
        or key.startswith("tiers.")
        and key.endswith(".capacity")
    )


def _engines(result: RunRecord) -> int:
    """Return how many engines there were; of a search, how many its configuration asks for."""
    cluster = result["config"].get("cluster")
    asked = cluster.get("engines") if isinstance(cluster, Mapping) else None
    return len(result.get("engines") or ()) or (asked if isinstance(asked, int) else 1)


def _idle(result: RunRecord) -> set[str]:
    """Return the families of policies that have nothing to decide in a run."""
    idle = {"placement"} if len(result.get("tiers") or result.get("capacity_bytes") or ()) < 2 else set()
    return idle if _engines(result) > 1 else idle | {"routing", "autoscaling"}


def policies(chosen: Mapping[str, str], idle: Collection[str] = ()) -> list[str]:
    """Return the chosen policies as ``eviction lru``, without usual choices and those of ``idle`` families."""
    found = []
    for key, name in chosen.items():
        family = key.rpartition(".")[2]
        if family in FAMILIES and family not in idle and USUAL.get(family) != name:
            found.append((FAMILIES.index(family), f"{key.removeprefix('tiers.').replace('.', ' ')} {name}"))
    return [text for _, text in sorted(found)]


def _joined(*texts: str | None) -> str:
    return SEPARATOR.join(text for text in texts if text)


def _path(config: Mapping[str, Any]) -> str:
    trace = config.get("trace")
    found = (trace.get("path") or trace.get("name") or "") if isinstance(trace, Mapping) else ""
    return without_folders(str(found))


def _limits(config: Mapping[str, Any]) -> str:
    trace = config.get("trace")
    if not isinstance(trace, Mapping):
        return ""
    limit, rate = trace.get("limit"), trace.get("rate")
    first = f"first {count(limit)} requests" if limit and isinstance(limit, int) else ""
    return _joined(first, f"at {rate:g} times its rate" if rate != 1 and isinstance(rate, (int, float)) else "")


def _tier(name: str, tier: Mapping[str, Any], result: RunRecord) -> str:
    pages = tier["capacity_pages"]
    if pages is None:
        return f"{name} unlimited"
    known = f" ({size(pages * int(result['page_bytes']))})" if "page_bytes" in result else ""
    return f"{name} {capacity(tier)} pages{known}"
