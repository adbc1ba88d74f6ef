"""Hashes of everything that a run's result depends on: runs with equal hashes give equal results."""

import ast
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from kvsim.bounds.limits import not_bounded
from kvsim.core.fan_out import TOGETHER
from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.plans.plan import Plan
from kvsim.trace.base import update_with_file

PACKAGE = Path(__file__).resolve().parents[1]
WITHOUT_RESULTS = ("commands", "report", "results", "calibration", "kernels")
"""Parts of kvsim that do not affect results."""
BESIDE_RESULTS = ("logger",)


def configuration_hash(plan: Plan, command: str) -> str:
    """Hash everything that determines a run's result: command, configuration, trace content and code. 32 hexadecimal digits."""
    config = {name: value for name, value in plan.config.items() if name not in BESIDE_RESULTS}
    contents = [trace_content(plan), *_policy_contents(plan)]
    return digest([command, config, *contents, *(code_of(module) for module in _modules(config))])


def bound_names(plan: Plan, requests: Sequence[Request]) -> dict[str, str]:
    """Return a name for each bound of a plan; runs that share a bound share its name.

    Like the runs, both bounds leave out requests that the GPU tier can never hold. There are none for recurrent states, several
    cached answers to a prompt, runs that may refuse requests, and what ``not_bounded`` names, which Belady's MIN does not model.
    """
    if plan.model.is_hybrid or plan.may_refuse or not_bounded(requests):
        return {}
    if plan.rules.cache_output and any(values_of(requests, "sample_output_runs")):
        return {}
    room = plan.tiers[0].capacity_pages
    too_large = 0
    if room is not None:
        too_large = sum(
            [pages > room for pages in plan.replay.pages_taken(requests, plan.page_tokens, plan.rules.samples or TOGETHER)]
        )
    of_trace = [plan.config["trace"], trace_content(plan), plan.page_tokens, plan.warmup, plan.config["rules"], code_of("kvsim"),
                too_large]  # fmt: skip
    return {
        "belady": f"belady-{digest([*of_trace, plan.total_pages])[:16]}",
        "unlimited": f"unlimited-{digest(of_trace)[:16]}",
    }


def digest(value: Any) -> str:
    """Hash a value that JSON can represent: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def trace_content(plan: Plan) -> str | None:
    """Hash the trace's files. None for a generated trace, and for a missing file: loading the trace reports that error."""
    paths = plan.trace.files()
    if not paths or not all(map(os.path.isfile, paths)):
        return None
    states = [(os.path.abspath(path), os.stat(path)) for path in paths]
    first, *others = [_file_content(path, state.st_mtime_ns, state.st_size) for path, state in states]
    return digest([first, *others]) if others else first


def _policy_contents(plan: Plan) -> Iterator[str]:
    """Hash the files that eviction policies read."""
    for path in (path for tier in plan.tiers for path in tier.eviction.files):
        state = os.stat(path)
        yield _file_content(os.path.abspath(path), state.st_mtime_ns, state.st_size)


@cache
def _file_content(path: str, _mtime_ns: int, _size: int) -> str:
    content = xxhash.xxh3_128()
    update_with_file(content, path)
    return content.hexdigest()


@cache
def code_of(module: str) -> str:
    """Hash a module's source and those of its own package that it imports; for ``kvsim``, all that affect results."""
    content = xxhash.xxh3_128()
    for path in sorted(_kvsim_sources() if module == "kvsim" else _sources_of(module)):
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()


def _kvsim_sources() -> Iterator[Path]:
    yield from PACKAGE.glob("*.py")
    for part in PACKAGE.iterdir():
        if part.is_dir() and part.name not in WITHOUT_RESULTS:
            yield from part.resolve().rglob("*.py")


def _sources_of(module: str) -> set[Path]:
    """Return the file of a module and, over any number of steps, those that it imports from its own package or folder."""
    file = Path(sys.modules[module].__file__ or "")
    is_alone = "." not in module
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    found, pending = set(), [file]
    while pending:
        if (path := pending.pop()) in found:
            continue
        found.add(path)
        parts = (name.replace(".", "/") for name in _imported(path, root))
        places = (place for part in parts for place in (root / f"{part}.py", root / part / "__init__.py"))
        pending += [place for place in places if is_alone or place.is_relative_to(root / module.partition(".")[0])]
        pending = [place for place in pending if place.is_file()]
    return found


def _imported(path: Path, root: Path) -> Iterator[str]:
    """Yield the full names that a file imports, and the packages that contain them."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            start = [*package[: len(package) - node.level + 1]] if node.level else []
            names = [".".join([*start, *filter(None, [node.module]), name]) for name in names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _modules(config: Any) -> list[str]:
    """Return ``kvsim`` and the modules of all other classes that the configuration names."""
    return ["kvsim", *sorted({name.rpartition(".")[0] for name in _targets(config) if not name.startswith("kvsim.")})]


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "_target_":
                yield value
            else:
                yield from _targets(value)
