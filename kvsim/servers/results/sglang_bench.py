"""The file of SGLang's ``bench_serving --output-details``: a JSON object a run, one a line.

Its lists have the requests in the client's order, which is the trace's. ``--cache-report`` adds cached tokens, by tier. It does
not say when requests were sent.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import msgspec

from kvsim.core.request import Request
from kvsim.results.observed import ObservedRun, ServerFacts
from kvsim.servers.dialects.base import kept
from kvsim.servers.dialects.sglang import SETTINGS, resolved
from kvsim.servers.results.lists import Lists, read_lists
from kvsim.servers.results.rows import Row

MEDIA = ("device", "host", "storage")


class Run(Lists):
    """The fields that are read besides."""

    cached_tokens: Sequence[int] = ()
    cached_tokens_details: Sequence[dict[str, Any] | None] = ()


def recognises(document: Mapping[str, Any]) -> bool:
    return "backend" in document and "dataset_name" in document and "completed" in document


def facts(document: Mapping[str, Any]) -> ServerFacts | None:
    """Return the flags that the client has asked the server for; None if it has no such answer."""
    flags = document.get("server_info")
    if not isinstance(flags, Mapping) or not flags:
        return None
    sizes = {name: flags[name] if isinstance(flags.get(name), int) else None for name in ("page_size", "max_total_num_tokens")}
    return ServerFacts(
        engine="sglang",
        version=str(flags["version"]) if "version" in flags else None,
        model=_model(flags),
        page_tokens=sizes["page_size"],
        capacity_tokens=sizes["max_total_num_tokens"],
        settings=kept(resolved(flags), SETTINGS),
    )


def _model(flags: Mapping[str, Any]) -> str | None:
    """Return the name of a server's model; of one that is a folder, the name of that, without where it lies."""
    name = flags.get("served_model_name") or flags.get("model_path")
    return str(PurePath(name).name if PurePath(name).is_absolute() else name) if isinstance(name, str) else None


def read(path: Path, documents: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> list[ObservedRun]:
    """Return the run of each object. Raises UsageError for a file without details."""
    return read_lists(
        path, documents, requests, kind=Run, row_of=_row, client="sglang bench", details="bench_serving with --output-details"
    )


def _row(run: Run, number: int) -> Row:
    ttft_s, gaps_s = run.ttfts[number], run.itls[number]
    details = run.cached_tokens_details[number] if run.cached_tokens_details else None
    return Row(
        ttft_s=ttft_s,
        e2e_s=ttft_s + sum(gaps_s),
        gaps_s=gaps_s,
        prompt_tokens=run.input_lens[number],
        output_tokens=run.output_lens[number],
        cached_tokens=run.cached_tokens[number] if run.cached_tokens else None,
        tier_tokens={medium: msgspec.convert(details[medium], int) for medium in MEDIA if details.get(medium)} if details else {},
        error=run.errors[number] or None,
    )
