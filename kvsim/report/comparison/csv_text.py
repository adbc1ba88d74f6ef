"""CSV of a comparison: a row for each run, or one for each configuration with the means over its seeds."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsim.report.comparison.compare import Comparison
from kvsim.results.cells import as_text
from kvsim.results.chosen_names import package
from kvsim.results.runs import Run


def comparison_csv(runs: Sequence[Run]) -> str:
    """Return CSV with one row per run, in plain numbers: job, status, differing settings, all measures, bounds, error."""
    comparison = Comparison(runs, by_run=True, has_full_paths=True)
    extra = ("requests", "prompt_tokens", "wall_s", "load_s")
    bounds = [f"{kind}_hit_rate" for kind in ("belady", "unlimited")]
    columns = ["job", "status", *comparison.keys, *(measure.key for measure in comparison.known), *extra, *bounds, "error"]
    places = {id(run): place for place, run in enumerate(comparison.runs)}
    rows: list[dict[str, Any]] = []
    for run in runs:
        if run.result is None:
            given = {package(key): value for key, _, value in (override.partition("=") for override in run.overrides)}
            chosen = {key: given.get(key, "") for key in comparison.keys}
            rows.append({"job": run.name, "status": "failed", **chosen, "error": run.error})
            continue
        result = run.result
        numbers = {measure.key: measure.of(result) for measure in comparison.known}
        known = {f"{kind}_hit_rate": bound["hit_rate"] for kind, bound in run.bounds.items()}
        settings = dict(zip(comparison.keys, comparison.differing_values(places[id(run)]), strict=True))
        rows.append({"job": run.name, "status": "finished", **settings, **numbers, **{k: result[k] for k in extra}, **known})
    return _csv(columns, rows)


def means_csv(runs: Sequence[Run]) -> str | None:
    """Return CSV with one row per configuration, in plain numbers: for each measure its mean over the seeds and, in a column
    ending in ``_half_width``, half of the mean's 95 % interval. None where no configuration has several seeds."""
    comparison = Comparison(runs, has_full_paths=True)
    if not comparison.has_seeds:
        return None
    measured = [column for measure in comparison.known for column in (measure.key, f"{measure.key}_half_width")]
    rows = []
    for place, case in enumerate(comparison.cases):
        row: dict[str, Any] = {"jobs": " ".join(run.name for run in case.runs), "seeds": len(case.runs)}
        row |= zip(comparison.keys, comparison.differing_values(place), strict=True)
        for measure in comparison.known:
            if mean := case.mean(measure):
                row |= {measure.key: mean.mean, f"{measure.key}_half_width": mean.half_width}
        rows.append(row)
    return _csv(["jobs", "seeds", *comparison.keys, *measured], rows)


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows({key: as_text(value) for key, value in row.items()} for row in rows)
    return text.getvalue()
