"""Runs ``replay`` or ``simulate`` once, from the plan to the files in the run's folder."""

from functools import partial

from rich.console import Console
from rich.tree import Tree

from kvsim.commands.sweep_job import SweepJob
from kvsim.plans.plan import Plan
from kvsim.report.folder import write_run
from kvsim.report.table import print_result
from kvsim.report.template import SHARED_SCRIPT
from kvsim.report.tree import draw_tree
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord
from kvsim.run.execute import execute
from kvsim.run.play import check_verified


def run_command(command: str, plan: Plan, command_line: str, job: SweepJob | None = None) -> RunRecord:
    """Run ``replay`` or ``simulate``: load the trace, run it, write the folder, log it; print the result unless in a sweep."""
    trees: list[Tree] = []
    names = plan.trace.page_names(plan.page_tokens) if plan.print_tree else {}
    inspect = (lambda cache, step: trees.append(draw_tree(cache, names, step))) if plan.print_tree else None
    watch = partial(progress, label=command, shown=job is None or job.is_alone)
    result = execute(command, plan, watch=watch, inspect=inspect, command_line=command_line)
    files = write_run(plan.output, result.record, result.outcome, shared_script=shared_script(plan, job))
    plan.logger.log(plan.output, result.record, job.group if job else None)
    console = Console()
    for tree in trees:
        console.print(tree, soft_wrap=True)
        console.print()
    if job is None:
        print_result(result.record, console)
        console.print(f"\n{plan.output}: {' '.join(files)}", highlight=False)
    check_verified(result.outcome.hardware)
    return result.record


def shared_script(plan: Plan, job: SweepJob | None) -> str | None:
    """Return the address of plotly.js for the page of a job, relative to its folder; None for a page that is sent on its own."""
    return None if job is None or plan.logger.wants_page else f"../{SHARED_SCRIPT}"
