"""One run of a command, from a composed configuration to the files of its folder."""

import shlex
from time import perf_counter

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.tree import Tree

from kvsim import run
from kvsim.commands.application import plan_job
from kvsim.engine.collector import without_garbage_collector
from kvsim.report.folder import write_run
from kvsim.report.progress import progress
from kvsim.report.result import summarize, warmup_requests
from kvsim.report.table import print_result
from kvsim.report.tree import draw_tree

EXECUTE = {"replay": run.replay, "simulate": run.simulate}


def run_command(command: str, cfg: DictConfig) -> None:
    """Run ``replay`` or ``simulate``: load the trace, run it, write the folder, print the result."""
    plan = plan_job(command, cfg)
    with without_garbage_collector():
        began = perf_counter()
        trace = plan.trace.load(plan.page_tokens)
        load_s = perf_counter() - began
        run.check_capacity(plan, trace.requests)
        warmup_requests(plan.warmup, len(trace.requests))
        trees: list[Tree] = []
        inspect = (
            [lambda cache: trees.append(draw_tree(cache, plan.trace.page_names(plan.page_tokens)))] if plan.print_tree else []
        )
        with progress(len(trace.requests), command) as meter:
            outcome = EXECUTE[command](plan, trace.requests, meter.advance, *inspect)
    result = summarize(
        outcome,
        command=command,
        config=plan.config,
        seed=plan.seed,
        warmup=plan.warmup,
        load_s=load_s,
        command_line=shlex.join(["kvsim", command, *HydraConfig.get().overrides.task]),
    )
    write_run(plan.output, result, outcome)
    console = Console()
    for tree in trees:
        console.print(tree, soft_wrap=True)
        console.print()
    print_result(result, console)
    console.print(f"\n{plan.output}: result.json requests.csv.gz report.html", highlight=False)
