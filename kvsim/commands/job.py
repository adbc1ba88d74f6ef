"""Runs ``replay`` or ``simulate`` once, from the plan to the files in the run's folder."""

from functools import partial

from rich.console import Console
from rich.tree import Tree

from kvsim.plans.plan import Plan
from kvsim.report.table import print_result
from kvsim.report.template import SHARED_SCRIPT
from kvsim.report.tree import draw_tree
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord
from kvsim.run.execute import Result, record_run
from kvsim.sweeps.command_jobs import SweepJob, tell
from kvsim.sweeps.folder import outcome_line


def run_command(command: str, plan: Plan, command_line: str, job: SweepJob | None) -> RunRecord:
    """Run ``replay`` or ``simulate``, and print the result; in a sweep, one line about it."""
    trees: list[Tree] = []
    names = plan.trace.page_names(plan.page_tokens) if plan.print_tree else {}
    result = record_run(
        command,
        plan,
        group=job.group if job else None,
        shared_script=shared_script(plan, job),
        show=partial(show, plan, trees, is_whole=job is None),
        watch=partial(progress, label=job.place if job and job.place else command, shown=job is None or job.is_alone),
        inspect=(lambda cache, step: trees.append(draw_tree(cache, names, step))) if plan.print_tree else None,
        command_line=command_line,
    )
    if job is not None:
        tell(f"job {plan.output.name}  {job.varied}  {outcome_line(result.record)}")
    return result.record


def show(plan: Plan, trees: list[Tree], result: Result, files: list[str], *, is_whole: bool) -> None:
    """Print the trees of a run; with ``is_whole``, also its result and the names of its files."""
    console = Console()
    for tree in trees:
        console.print(tree, soft_wrap=True)
        console.print()
    if is_whole:
        print_result(result.record, console)
        console.print(f"\n{plan.output}: {' '.join(files)}", highlight=False)


def shared_script(plan: Plan, job: SweepJob | None) -> str | None:
    """Return the address of plotly.js for the page of a job, relative to its folder; None for a page that is sent on its own."""
    return None if job is None or plan.logger.wants_page else f"../{SHARED_SCRIPT}"
