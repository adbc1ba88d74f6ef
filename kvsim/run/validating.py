"""``kvsim validate`` of one plan: simulations beside runs on this machine, or recordings of them, and the folder of all.

The command and the Python API call it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from kvsim.report.validation.presentation import ONCE, REPEATED, Presentation
from kvsim.report.validation.recording import Recording, read_measured, recorded
from kvsim.report.validation.repeated import compare_repeated
from kvsim.report.validation.repeated_page import render_repeated
from kvsim.report.validation.validation import compare, render_validation, write_validation
from kvsim.results.result import RunRecord
from kvsim.run.execute import Watch, unwatched
from kvsim.run.play import check_verified
from kvsim.run.validation_runs import HARDWARE, SIMULATED, place, run_plans, simulations

Labelled = Callable[[str], Watch]
"""Takes what a run is called."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A validation that has ended."""

    record: RunRecord
    """The content of ``validate.json``."""
    measured: Sequence[Recording]
    """The real runs."""
    presentation: Presentation

    def check_pages(self) -> None:
        """Raise WrongResult if a real run reused a wrong page."""
        for run in self.measured:
            check_verified(run.record["hardware"])


def validate(plan: Plan, command_line: str | None, *, watch: Labelled = lambda label: unwatched) -> Compared:
    """Simulate, run on this machine or read recordings, and write all folders and the comparison. Raises UsageError."""
    settings = plan.validation
    measured = read_measured(settings.measured)
    runs = len(measured) or settings.runs
    same_hardware = not measured or plan.reads_hardware
    if not measured:
        check_fresh(plan, runs)
    simulated = serve(plan, SIMULATED, simulations(plan, runs), command_line, watch)
    measured = measured or serve(plan, HARDWARE, [plan] * runs, command_line, watch)
    if runs == 1:
        record = compare(simulated[0], measured[0], settings, command_line, same_hardware=same_hardware)
        page = render_validation(record)
    else:
        record = compare_repeated(simulated, measured, settings, command_line, same_hardware=same_hardware)
        page = render_repeated(record)
    write_validation(plan.output, record, page)
    return Compared(record=record, measured=measured, presentation=ONCE if runs == 1 else REPEATED)


def check_fresh(plan: Plan, runs: int) -> None:
    """Raise UsageError if a real run would start with pages on disk that simulations do not have, or if recorded real runs would
    be mixed with new ones."""
    if plan.disk.path is not None and (plan.disk.path / "pages.index").exists():
        raise UsageError(f"disk.folder: {plan.disk.path} contains pages of an earlier run: choose an empty folder")
    replaced = {place(plan, HARDWARE, number, runs) for number in range(runs)}
    earlier = {path.parent for path in (plan.output / HARDWARE).rglob("result.json")}
    if left := sorted(earlier - replaced):
        raise UsageError(
            f"output: {left[0]} is a real run of another validation: choose another folder with output=DIR, or compare it again "
            f"with validate.measured={plan.output / HARDWARE}"
        )


def serve(plan: Plan, substrate: str, plans: Sequence[Plan], command_line: str | None, watch: Labelled) -> list[Recording]:
    """Run plans on a substrate, as ``run_plans`` does."""
    results = run_plans(plan, substrate, plans, command_line, watch=watch)
    folders = [place(plan, substrate, number, len(plans)) for number in range(len(plans))]
    return [recorded(str(folder), one.record, one.outcome) for folder, one in zip(folders, results, strict=True)]
