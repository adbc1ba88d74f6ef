"""What Python sees of a search or a validation: the record that the command writes, its runs, tables and pictures."""

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.report import leaderboard, plan_page, saturation_page
from kvsim.report.figure import Picture
from kvsim.report.notebook import html_table
from kvsim.report.summary import Table
from kvsim.report.validation.presentation import Presentation
from kvsim.results.attributes import Attributes
from kvsim.results.frame import columns_of, frame
from kvsim.results.records import read_result
from kvsim.results.result import RunRecord
from kvsim.run.run_result import figure_of
from kvsim.sweeps.kept_folder import KeptFolder
from kvsim.sweeps.sweep_result import SweepRun

if TYPE_CHECKING:
    import plotly.graph_objects as go


class SearchResult(Attributes, KeptFolder):
    """A record with its folder. The fields of the record are attributes, too."""

    def __init__(self, record: RunRecord, folder: Path, *, is_temporary: bool) -> None:
        self.record = record
        self.keep(folder, is_temporary=is_temporary)

    @property
    def notes(self) -> list[str]:
        """What to know before trusting the answer, a sentence each."""
        return list(self.record["notes"])

    def plot(self, picture: str | None = None) -> "go.Figure":
        """Return a picture of the page as a Plotly figure, by its title; the first one by default. Raises UsageError."""
        return figure_of(self._pictures(), picture, str(self.record["command"]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._line()})"

    def _repr_html_(self) -> str:
        shown = (html_table((table.title, *table.columns[1:]), table.rows) for table in self._tables())
        return "".join([html_table((), [(f"kvsim {self.record['command']}", self._line())]), *shown])

    def _run(self, name: str, settings: dict[str, str]) -> SweepRun:
        folder = self.folder / name
        return SweepRun(name=name, settings=settings, record=read_result(folder), folder=folder, kept=self.kept)

    def _csv(self) -> Any:
        columns = columns_of((self.folder / f"{self.record['command']}.csv").read_text().splitlines())
        return frame({name: column for name, column in columns.items() if name != "job"})

    @abstractmethod
    def _line(self) -> str: ...
    @abstractmethod
    def _tables(self) -> list[Table]: ...
    @abstractmethod
    def _pictures(self) -> list[Picture]: ...


class Saturation(SearchResult):
    """The highest rate at which a configuration holds its objectives.

    ``record`` is the content of ``saturate.json``. Its fields are attributes, such as ``fails_at``, ``gpus`` and
    ``price_per_hour``.
    """

    @property
    def rate(self) -> float | None:
        """The highest rate that holds: what the arrival times of the trace are divided by. None if none does."""
        found: float | None = self.record["rate"]
        return found

    @cached_property
    def runs(self) -> list[SweepRun]:
        """The runs of the search, by rate."""
        return [self._run(run["folder"], {"trace.rate": f"{run['rate']:g}"}) for run in self.record["runs"]]

    @property
    def best(self) -> SweepRun | None:
        """The run at the highest rate that holds; None if none does."""
        highest = self.record["highest"]
        return None if highest is None else next(run for run in self.runs if run.name == highest["folder"])

    @property
    def table(self) -> Any:
        """A table with one row per run and the columns of ``saturate.csv``: a DataFrame or an array, as ``requests`` of a run."""
        return self._csv()

    def _line(self) -> str:
        rate = "no rate holds" if self.rate is None else f"highest rate {self.rate:.4g}"
        fails = [] if self.record["fails_at"] is None else [f"fails at {self.record['fails_at']:.4g}"]
        return ", ".join([rate, *fails, f"{len(self.record['runs'])} runs"])

    def _tables(self) -> list[Table]:
        return saturation_page.tables([(self.folder.name, self.record)])

    def _pictures(self) -> list[Picture]:
        return saturation_page.pictures_of([(self.folder.name, self.record)])


class Purchase(SearchResult):
    """The cheapest configuration that holds its objectives.

    ``record`` is the content of ``plan.json``. Its fields are attributes, such as ``candidates``, ``simulate`` (the command
    that simulates the cheapest one) and ``start`` (how to start it on servers).
    """

    @property
    def cheapest(self) -> dict[str, Any] | None:
        """The cheapest configuration that holds: its ``price``, ``gpu``, ``engines`` and so on; None if none does."""
        at = self.record["cheapest"]
        return None if at is None else dict(self.record["candidates"][at])

    @cached_property
    def best(self) -> SweepRun | None:
        """The run of the cheapest configuration; None if none holds."""
        return None if self.cheapest is None else self._run(self.cheapest["folder"], {})

    @property
    def table(self) -> Any:
        """A table with one row per configuration, by price, and the columns of ``plan.csv``: a DataFrame or an array."""
        return self._csv()

    def _line(self) -> str:
        return plan_page.answer(self.record).rstrip(".")

    def _tables(self) -> list[Table]:
        return [plan_page.candidate_table(self.record, is_short=True)]

    def _pictures(self) -> list[Picture]:
        return plan_page.pictures_of(self.record)


class Validation(SearchResult):
    """How far simulations are from real runs.

    ``record`` is the content of ``validate.json``. Its fields are attributes, such as ``hit_rate``, ``ttft_s`` and ``checks``,
    or ``figures`` if there are several real runs.
    """

    def __init__(self, record: RunRecord, folder: Path, presentation: Presentation, *, is_temporary: bool) -> None:
        super().__init__(record, folder, is_temporary=is_temporary)
        self._presentation = presentation

    @property
    def holds(self) -> bool:
        """Whether all figures are within their tolerances."""
        return bool(self.record["holds"])

    @property
    def failures(self) -> str:
        """Which figures are outside their tolerances, by how much; empty if all hold."""
        return self._presentation.failures(self.record)

    @property
    def notes(self) -> list[str]:
        return list(self.record.get("notes", []))

    def _line(self) -> str:
        return "within its tolerances" if self.holds else f"outside its tolerances: {self.failures}"

    def _tables(self) -> list[Table]:
        return self._presentation.tables(self.record)

    def _pictures(self) -> list[Picture]:
        return self._presentation.pictures(self.record)


class Leaderboard(SearchResult):
    """The policies of a family, ranked.

    ``record`` is the content of ``leaderboard.json``. Its fields are attributes, such as ``best`` (the policy to take),
    ``baseline`` and ``standings`` (a mapping for each policy).
    """

    @property
    def table(self) -> Any:
        """A table with a row for each run and the columns of ``leaderboard.csv``: a DataFrame or an array."""
        return self._csv()

    def _line(self) -> str:
        return f"{self.record['best']}: {self.record['verdict']}"

    def _tables(self) -> list[Table]:
        return [leaderboard.order(self.record)]

    def _pictures(self) -> list[Picture]:
        return [leaderboard.picture(self.record)]
