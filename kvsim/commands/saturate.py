"""``kvsim saturate``: the highest rate of requests at which a configuration meets its objectives."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from kvsim.commands.application import run_application, start_run
from kvsim.plans.plan import Plan
from kvsim.report.saturation_page import print_saturation
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord
from kvsim.run.saturation import Probe
from kvsim.sweeps.command_jobs import SweepJob, tell
from kvsim.sweeps.saturating import saturate


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("saturate", partial(start_run, "saturate", run_saturate), arguments)


def run_saturate(plan: Plan, command_line: str, job: SweepJob | None) -> RunRecord:
    """Search for the highest rate, write the folder, print the table; in a sweep, one line about it."""
    if job is not None:
        record = saturate(plan, command_line)
        highest = "no rate holds" if record["rate"] is None else f"highest rate {record['rate']:.4g}"
        tell(f"job {plan.output.name}  {highest}, {len(record['runs'])} runs")
        return record
    record = saturate(plan, command_line, watch=lambda label: partial(progress, label=label), ended=print_probe)
    console = Console()
    print_saturation([(plan.output.name, record)], console)
    console.print(f"\n{plan.output}: saturate.json saturate.csv saturate.html", highlight=False)
    return record


def print_probe(probe: Probe) -> None:
    """Print how a run ended."""
    attained = f"{probe.attainment:.2%} meet the objectives"
    print(f"rate {probe.rate:g}: {probe.requests_per_s:.3g} requests/s, {attained}", flush=True)
