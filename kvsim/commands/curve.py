"""``kvsim curve``: hit rate against the capacity of one tier."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from kvsim.commands.application import run_application, start_run
from kvsim.commands.job import shared_script
from kvsim.plans.plan import Plan
from kvsim.report.curve import print_curve, write_curve
from kvsim.results.fields import SCHEMA
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord, installed_versions, plain
from kvsim.run.curves import Curve, curve_settings
from kvsim.run.execute import draw
from kvsim.sweeps.command_jobs import SweepJob


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("curve", partial(start_run, "curve", run_curve), arguments)


def run_curve(plan: Plan, command_line: str, job: SweepJob | None) -> RunRecord:
    """Load the trace, compute its curves, write the folder, print the tables."""
    watch = partial(progress, label="curve", shown=job is None or job.is_alone)
    drawn = draw(plan, curve_settings(plan.config["curve"]), watch=watch)
    record = describe(drawn.curve, plan, command_line) | {"load_s": drawn.load_s, "wall_s": drawn.wall_s}
    record |= {"trace_note": drawn.trace_note} if drawn.trace_note else {}
    write_curve(plan.output, record, shared_script(plan, job))
    console = Console()
    print_curve(record, console)
    console.print(f"\n{plan.output}: curve.json curve.csv curve.html", highlight=False)
    return record


def describe(curve: Curve, plan: Plan, command_line: str) -> RunRecord:
    """Return the record of a curve: the content of ``curve.json`` without the times."""
    points = [point.record() for point in curve.points]
    unlimited = curve.unlimited.record()
    rates = {(p.sampled, p.capacity_pages): p.hit_rate for p in curve.points if p.policy == "lru"}
    error = {str(pages): rate - rates[False, pages] for (sampled, pages), rate in rates.items() if sampled}
    sampling = {"requests": curve.sampled_requests, "share_of_unique_pages": curve.sampled_share, "error": error}
    columns = ("capacity_pages", "hit_tokens", "hit_pages", "hit_rate", "page_hit_rate")
    record = {
        "schema": SCHEMA,
        "command": "curve",
        "command_line": command_line,
        "status": "complete",
        "config": plan.config,
        "choices": plan.choices,
        "versions": installed_versions(),
        "seed": plan.seed,
        "requests": curve.requests,
        "warmup_requests": curve.warmup_requests,
        "prompt_tokens": curve.unlimited.prompt_tokens,
        "prompt_pages": curve.unlimited.prompt_pages,
        "page_tokens": plan.page_tokens,
        "page_bytes": plan.page_bytes,
        "largest_prompt_pages": curve.largest_pages,
        "unique_pages": curve.unique_pages,
        "capacities": curve.capacities,
        "unlimited": {name: unlimited[name] for name in columns},
        "sampling": None if curve.sampled_requests is None else sampling,
        "points": points,
        "line": {name: [point.record()[name] for point in curve.line] for name in columns},
    }
    return {name: plain(value) for name, value in record.items()}
