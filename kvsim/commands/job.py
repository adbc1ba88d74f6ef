"""One run of a command, from its plan to the files of its folder."""

from rich.console import Console
from rich.tree import Tree

from kvsim import run
from kvsim.build import Plan
from kvsim.commands.record import describe
from kvsim.commands.sweep import Job
from kvsim.commands.traces import load_trace
from kvsim.engine.collector import without_garbage_collector
from kvsim.report.folder import write_run
from kvsim.report.progress import progress
from kvsim.report.result import RunRecord, warmup_requests
from kvsim.report.table import print_result
from kvsim.report.tree import draw_tree

EXECUTE = {"replay": run.replay, "simulate": run.simulate}


def run_command(command: str, plan: Plan, command_line: str, job: Job | None = None) -> RunRecord:
    """Run ``replay`` or ``simulate``: load the trace, run it, write the folder, print the result; in a sweep, one line of it."""
    trees: list[Tree] = []
    with without_garbage_collector():
        trace, load_s = load_trace(plan)
        run.check_capacity(plan, trace.requests)
        warmup_requests(plan.warmup, len(trace.requests))
        inspect = (
            [lambda cache: trees.append(draw_tree(cache, plan.trace.page_names(plan.page_tokens)))] if plan.print_tree else []
        )
        with progress(len(trace.requests), command, shown=job is None or job.is_alone) as meter:
            outcome = EXECUTE[command](plan, trace.requests, meter.advance, *inspect)
    result = describe(command, plan, outcome, load_s=load_s, command_line=command_line)
    files = write_run(plan.output, result, outcome, with_page=job is None or plan.logger.wants_page)
    plan.logger.log(plan.output, result, job.group if job else None)
    console = Console()
    for tree in trees:
        console.print(tree, soft_wrap=True)
        console.print()
    if job is None:
        print_result(result, console)
        console.print(f"\n{plan.output}: {' '.join(files)}", highlight=False)
    run.check_verified(outcome)
    return result
