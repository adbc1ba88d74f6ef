"""What Python sees of a run: its record, a table of its requests, its pictures."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from kvsim.errors import UsageError
from kvsim.report.notebook import run_html, run_line
from kvsim.results.result import RunRecord
from kvsim.suggest import closest

if TYPE_CHECKING:
    import plotly.graph_objects as go


class RunResult(ABC):
    """The result of a run, however it was made."""

    record: RunRecord

    @property
    @abstractmethod
    def requests(self) -> Any:
        """A table with one row per request and the columns of ``requests.csv.gz``.

        It is a pandas DataFrame if pandas is installed, else a polars DataFrame if polars is, else a NumPy structured array.
        Whole numbers are int64; times, and numbers that some requests lack (then nan), are float64; everything else is text.
        """

    @property
    def hit_rate(self) -> float:
        """Hit tokens per prompt token, over all tiers."""
        return float(self.record["hit_rate"] or 0.0)

    @property
    def page_hit_rate(self) -> float:
        """Hit pages per prompt page, over all tiers."""
        return float(self.record["page_hit_rate"] or 0.0)

    def plot(self, picture: str | None = None) -> "go.Figure":
        """Return a picture of the run as a Plotly figure, by its title on the run's page; the hit rate over time by default.

        Raises UsageError for a picture that this run does not have.
        """
        from kvsim.report.pictures import figures

        found = dict(figures(self.record))
        if not found:
            raise UsageError("plot: the run has no pictures: no request was served")
        by_name = {title.lower(): title for title in found}
        title = next(iter(found)) if picture is None else by_name.get(picture.lower(), "")
        if title not in found:
            hint = closest(str(picture), found) or f"; choose from {', '.join(found)}"
            raise UsageError(f"plot: this run has no picture {picture!r}{hint}")
        return found[title]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({run_line(self.record)})"

    def _repr_html_(self) -> str:
        return run_html(self.record)
