"""What Python sees of a run: its record, a table of its requests, its pictures."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvsim.errors import UsageError
from kvsim.report.figure import Picture
from kvsim.report.notebook import run_html, run_line
from kvsim.results.attributes import Attributes, attributes_of
from kvsim.results.result import RunRecord
from kvsim.suggest import closest

if TYPE_CHECKING:
    import plotly.graph_objects as go


def figure_of(pictures: Iterable[Picture], title: str | None, whose: str) -> "go.Figure":
    """Return a picture as plotly's object, by its title; the first one without. Raises UsageError if there is none such."""
    import plotly.graph_objects as go

    found = {picture.title: picture.figure for picture in pictures if picture.figure is not None}
    if not found:
        raise UsageError(f"plot: the {whose} has no pictures: no request was served")
    by_name = {name.lower(): name for name in found}
    name = next(iter(found)) if title is None else by_name.get(title.lower(), "")
    if name not in found:
        hint = closest(str(title), found) or f"; choose from {', '.join(found)}"
        raise UsageError(f"plot: this {whose} has no picture {title!r}{hint}")
    return go.Figure(found[name])


class RunResult(Attributes, ABC):
    """The result of a run, however it was made.

    Its numbers are attributes: ``ttft_p99``, ``hit_rate_gpu``, ``goodput``, and all others of ``dir(result)``.
    """

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

    def _numbers(self) -> dict[str, Callable[[], Any]]:
        return attributes_of(self.record)

    def plot(self, picture: str | None = None) -> "go.Figure":
        """Return a picture of the run as a Plotly figure, by its title on the run's page; the hit rate over time by default.

        Raises UsageError for a picture that this run does not have.
        """
        from kvsim.report.pictures import pictures_of

        return figure_of(pictures_of(self.record), picture, "run")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({run_line(self.record)})"

    def _repr_html_(self) -> str:
        return run_html(self.record)
