"""The record of a run, with the names under which other runs find it and its bounds."""

from kvsim.build import Plan
from kvsim.commands.bounds import bound_names
from kvsim.commands.fingerprint import configuration_hash
from kvsim.engine.outcome import Outcome
from kvsim.report.result import RunRecord, summarize


def describe(
    command: str,
    plan: Plan,
    outcome: Outcome,
    *,
    load_s: float = 0.0,
    command_line: str | None = None,
    is_named: bool = True,
) -> RunRecord:
    """What ``result.json`` holds. ``is_named`` says that the configuration tells all: no policy was passed as an object."""
    return summarize(
        outcome,
        command=command,
        config=plan.config,
        seed=plan.seed,
        warmup=plan.warmup,
        load_s=load_s,
        command_line=command_line,
        config_hash=configuration_hash(plan, command) if is_named else None,
        bounds=bound_names(plan, outcome.requests) if is_named else None,
        page_bytes=plan.model.page_bytes(plan.page_tokens),
    )
