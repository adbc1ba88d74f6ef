"""``kvsim saturate``: the highest rate of requests at which a configuration meets its objectives."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from kvsim.commands.application import run_application, start_run
from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from kvsim.report.folder import write_run, write_shared_script
from kvsim.report.saturation_page import print_saturation, write_saturation
from kvsim.report.template import SHARED_SCRIPT
from kvsim.results.fields import SCHEMA
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord, installed_versions, plain
from kvsim.run.alone import reasons, run_alone
from kvsim.run.execute import execute, page_bounds
from kvsim.run.fingerprint import configuration_hash
from kvsim.run.play import check_verified
from kvsim.run.saturation import Found, Probe, highest_rate
from kvsim.sweeps.bounds import plan_of
from kvsim.sweeps.command_jobs import SweepJob, tell
from kvsim.sweeps.folder import finished

PROBED = ("requests_per_s", "attainment", "goodput_requests_per_s", "ttft_s_p99", "tpot_s_p99", "hit_rate", "rejected", "folder")
"""What is recorded of each run beside its rate."""


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("saturate", partial(start_run, "saturate", run_saturate), arguments)


def run_saturate(plan: Plan, command_line: str, job: SweepJob | None) -> RunRecord:
    """Search for the highest rate, write the folder, print the table."""
    shown = job is None
    write_shared_script(plan.output)
    found = highest_rate(partial(run_at, plan, shown=shown), plan.saturate, plan.saturate.rate or plan.trace.rate)
    notes = [] if found.highest else reasons(plan, run_alone(plan, partial(progress, label="alone", shown=shown)))
    record = describe(plan, replace(found, notes=[*found.notes, *notes]), command_line)
    write_saturation(plan.output, [(plan.output.name, record)])
    if shown:
        console = Console()
        print_saturation([(plan.output.name, record)], console)
        console.print(f"\n{plan.output}: saturate.json saturate.csv saturate.html", highlight=False)
    else:
        highest = "no rate holds" if found.highest is None else f"highest rate {found.highest.rate:.4g}"
        tell(f"job {plan.output.name}  {highest}, {len(found.probes)} runs")
    return record


def run_at(plan: Plan, rate: float, *, shown: bool = True) -> Probe:
    """Simulate a plan at another rate, into a folder of its own, unless that has the result. Raises UsageError."""
    config = plan.config | {"trace": plan.config["trace"] | {"rate": rate}}
    at_rate = plan_of({"config": config, "command": "simulate", "choices": plan.choices})
    folder = plan.output / f"rate-{rate:g}"
    result = finished(folder, configuration_hash(at_rate, "simulate"))
    if result is None:
        run = execute("simulate", at_rate, watch=partial(progress, label=f"rate {rate:g}", shown=shown))
        check_verified(run.outcome.hardware)
        bounds = page_bounds(at_rate, run.record, None)
        write_run(folder, run.record, run.outcome, shared_script=f"../{SHARED_SCRIPT}", bounds=bounds)
        result = run.record
    offered = result["throughput"]["offered_requests_per_s"]
    if offered is None:
        raise UsageError("trace: all requests arrive at once, whatever the rate: give a trace with arrival times")
    if shown:
        print(f"rate {rate:g}: {offered:.3g} requests/s, {result['slo']['attainment']:.2%} meet the objectives", flush=True)
    return Probe(rate=rate, requests_per_s=offered, attainment=result["slo"]["attainment"], record=(folder.name, result))


def describe(plan: Plan, found: Found, command_line: str) -> RunRecord:
    """Return the content of ``saturate.json``."""
    first: RunRecord = found.probes[0].record[1]
    highest = found.highest
    page_bytes = first["page_bytes"]
    pages = {name: tier["capacity_pages"] for name, tier in first["tiers"].items()}
    n_bytes = {name: None if capacity is None else capacity * page_bytes for name, capacity in pages.items()}
    gpus = plan.layout.engines * plan.hardware.gpus
    wanted = plan.saturate.rate
    at_wanted = next((probe for probe in found.probes if probe.rate == wanted), None)
    record = {
        "schema": SCHEMA,
        "command": "saturate",
        "command_line": command_line,
        "status": "complete",
        "config": plan.config,
        "choices": plan.choices,
        "versions": installed_versions(),
        "seed": plan.seed,
        "slo": {"ttft_s": plan.slo.ttft_s, "tpot_s": plan.slo.tpot_s, "attainment": plan.saturate.attainment},
        "rate": None if highest is None else highest.rate,
        "fails_at": None if found.lowest_above is None else found.lowest_above.rate,
        "highest": None if highest is None else probed(highest),
        "wanted_rate": wanted,
        "holds_wanted_rate": None if at_wanted is None else at_wanted.attainment >= plan.saturate.attainment,
        "gpus": gpus,
        "capacity_bytes": n_bytes,
        "price_per_hour": plan.saturate.price_per_hour.per_hour(gpus, n_bytes),
        "notes": [*found.notes, *([] if highest is None else highest.record[1]["warnings"])],
        "runs": [probed(probe) for probe in found.probes],
    }
    return {name: plain(value) for name, value in record.items()}


def probed(probe: Probe) -> dict[str, Any]:
    """Return what is recorded of a run."""
    folder, result = probe.record
    values = (
        probe.requests_per_s,
        probe.attainment,
        result["slo"]["goodput_requests_per_s"],
        result["ttft_s"]["p99"],
        result["tpot_s"]["p99"],
        result["hit_rate"],
        result["rejected"],
        folder,
    )
    return {"rate": probe.rate, **dict(zip(PROBED, values, strict=True))}
