"""What Python sees of several runs: a sweep, with its folder, or any runs side by side; their table, and a picture of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from kvsim.report.comparison.compare import NEAR, Comparison
from kvsim.report.comparison.csv_text import comparison_csv
from kvsim.report.notebook import comparison_html
from kvsim.results.fields import BY_KEY
from kvsim.results.frame import columns_of, frame
from kvsim.results.rates import percent
from kvsim.results.records import read_requests, read_sweep
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run, failed, read_runs
from kvsim.run.run_result import RunResult
from kvsim.sweeps.kept_folder import KeptFolder

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SweepRun(RunResult):
    """A finished run of a sweep, whose files are in a folder."""

    name: str
    """Name of its folder in the sweep's: the number of the job."""
    settings: dict[str, str]
    """Its values of the settings in which the runs differ."""
    record: RunRecord
    """The content of ``result.json``."""
    folder: Path
    kept: object = None
    """What keeps the folder, if it is temporary."""

    @cached_property
    def requests(self) -> Any:
        return frame(read_requests(self.folder, self.record))


class ComparedRuns:
    """Runs side by side. ``len``, ``for`` and ``[number]`` work on the finished ones."""

    def __init__(self, runs: Sequence[Run], kept: object = None) -> None:
        """``kept`` keeps the folders of the runs."""
        self._runs = list(runs)
        self._comparison = Comparison(self._runs, by_run=True)
        self.runs = [
            SweepRun(
                name=run.name,
                settings=dict(zip(self._comparison.keys, self._comparison.differing_values(place), strict=True)),
                record=case.first,
                folder=run.folder,
                kept=kept,
            )
            for place, case in enumerate(self._comparison.cases)
            for run in case.runs
        ]
        """The finished runs."""
        self.errors: dict[str, str] = {run.name: run.error for run in self._runs if run.error is not None}
        """What went wrong in each failed job, by its name: in a sweep, its number."""
        self.notes: list[str] = []
        """What to know of the runs, a sentence each."""

    @cached_property
    def table(self) -> Any:
        """A table with one row per job, failed ones included, and the columns of ``sweep.csv``.

        It is a DataFrame or an array, as ``requests`` of a run is.
        """
        return frame(columns_of(comparison_csv(self._runs).splitlines()))

    def plot(self, x: str | None = None, y: str = "hit_rate", color: str | None = None) -> "go.Figure":
        """Return a Plotly figure of a measure of the runs against a setting.

        ``x`` and ``color`` are settings that the runs differ in, such as ``tiers.gpu.capacity`` (drawn in GiB) and ``eviction``;
        ``y`` is a measure, a column of ``table``. By default, ``x`` is a capacity, or else the first setting, and each
        combination of the others has a line. Runs that differ in the seed only are one point, their mean. For hit rates, Belady's
        bound is drawn as well. Raises UsageError for a name that the runs do not have.
        """
        from kvsim.report.comparison.sweep_picture import sweep_figure

        return sweep_figure(self._comparison if "seed" in (x, color) else Comparison(self._runs), x, y, color)

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[SweepRun]:
        return iter(self.runs)

    @overload
    def __getitem__(self, place: int) -> SweepRun: ...
    @overload
    def __getitem__(self, place: slice) -> list[SweepRun]: ...
    def __getitem__(self, place: int | slice) -> SweepRun | list[SweepRun]:
        return self.runs[place]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._line()})"

    def _repr_html_(self) -> str:
        failed = "".join(f"<p>job {escape(name)} failed: {escape(error)}</p>" for name, error in self.errors.items())
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return (comparison_html(Comparison(self._runs), self._line()) if self.runs else "") + failed + notes

    def _line(self) -> str:
        failed = [f"{len(self.errors)} failed"] if self.errors else []
        over = (
            f"{len(self.runs)} runs over {', '.join(self._comparison.keys)}"
            if self._comparison.keys
            else f"{len(self.runs)} runs"
        )
        known = [run for run in self.runs if run.record["hit_rate"] is not None]
        if not known:
            return ", ".join([over, *failed])
        best = max(known, key=lambda run: run.hit_rate)
        where = " ".join(f"{key}={value}" for key, value in best.settings.items() if value)
        near = list(self._comparison.standing(BY_KEY["hit_rate"]).values()).count(NEAR)
        others = [f"{NEAR} {near} other{'s' * (near > 1)}"] if near else []
        return ", ".join([over, *failed, f"best hit rate {percent(best.hit_rate)} ({where or f'job {best.name}'})", *others])


class Sweep(ComparedRuns, KeptFolder):
    """The runs of a sweep, in order of their jobs."""

    def __init__(self, folder: Path, failures: Mapping[str, dict[str, Any] | None], *, is_temporary: bool) -> None:
        """``failures`` has the ``error.json`` of each job by the name of its folder, or None for a finished one.

        A temporary folder lives as long as this object. Its ``notes`` name each setting that has no effect in some of the jobs,
        which leave it out.
        """
        self.keep(folder, is_temporary=is_temporary)
        found = {run.name: run for run in read_runs([folder], damaged_fail=True)}
        ended = [failed(folder / name, failure) if failure else found[name] for name, failure in failures.items()]
        super().__init__(ended, self.kept)
        self.notes = read_sweep(folder).get("notes", [])
