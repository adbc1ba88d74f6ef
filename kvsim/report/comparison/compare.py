"""Compares many runs: their differing settings, a table with bounds, and the text on a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.text import Text

from kvsim.report.comparison.cases import Case, cases_of
from kvsim.report.comparison.differing import differing, heading, overridden, setting_text
from kvsim.report.comparison.noise import MOST_COMPARED, Against, against
from kvsim.report.ghosts import MEANING
from kvsim.report.shown_paths import shortest, without_folders
from kvsim.report.summary import shed_requests
from kvsim.report.terminal import Cell, print_table, width_of
from kvsim.results.fields import BY_KEY, measures_of
from kvsim.results.measures import Measure
from kvsim.results.result import RunRecord, hit_definition
from kvsim.results.runs import Run
from kvsim.results.statistics import Mean
from kvsim.results.warnings import ENDLESS

MOST_ROWS = 40
"""Most runs shown on a terminal."""
SIZES = ("cluster.engines", "cluster.engines_per_host", "cluster.prefill", "cluster.decode")
"""Settings that decide how many tiers there are."""
OVER_ALL = ("slo_attainment", "goodput_requests_per_s", "rejected", "shed")
"""Measures in which requests that were shed count."""
BOUND_MEASURES = ("hit_rate", "page_hit_rate", "rejected")
OVERLOAD = " !"
OF_WAITING = ("ttft_s_mean", "ttft_s_p99", "queue_s_mean")
"""Measures that have no meaning where the queue grows without end."""
MOST_OVERLOADED = 12
MOST_SETS = 4
"""Most sets of identical cases that are named."""
BEST, TIE, NEAR = "best", "=", "≈"
"""How a value stands in its column: alone the best, one of several that are equal as shown, not distinguishable from the best."""


DRAWN = {"sessions": "the trace's sessions", "stretches": "stretches of the trace", "seeds": "seeds"}
"""What is drawn again to know the noise of a difference."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the comparison: its name, its values of the differing settings, and a text for each measure."""

    name: str
    settings: list[str]
    cells: list[str]
    values: list[float | int | None]
    is_bound: bool = False


class Comparison:
    """Runs grouped into cases (configurations), the settings in which these differ, and the measures worth showing."""

    def __init__(
        self, runs: Sequence[Run], *, by_run: bool = False, has_full_paths: bool = False, is_resampled: bool = True
    ) -> None:
        """``by_run`` makes a case of each run, also where runs differ in the seed only. Without ``has_full_paths``, settings that
        are paths have the last parts that tell them apart. Without ``is_resampled``, nothing is said of the noise of single
        runs, for which all of their requests are read."""
        self.runs = [run for run in runs if run.result is not None]
        self.failed = [run for run in runs if run.error is not None]
        self.results: list[RunRecord] = [run.result for run in self.runs if run.result is not None]
        self.cases = cases_of(self.runs, by_run=by_run)
        self.has_seeds = any(len(case.runs) > 1 for case in self.cases)
        self._most_compared = MOST_COMPARED if is_resampled else 0
        self._against: dict[tuple[str, int, tuple[int, ...]], list[Against]] = {}
        self.keys = differing([case.settings for case in self.cases], overridden(self.results))
        if not has_full_paths:
            self._shorten_paths()
        self.known = measures_of(self.results)
        """All measures; ``measures`` are those worth showing."""
        self.measures = [measure for measure in self.known if self._is_worth_a_column(measure)]

    def _shorten_paths(self) -> None:
        for key in self.keys:
            names = shortest(case.settings[key] for case in self.cases if key in case.settings)
            for case in self.cases:
                if key in case.settings:
                    case.settings[key] = names[case.settings[key]]

    def _is_worth_a_column(self, measure: Measure) -> bool:
        if measure.key.startswith("hit_rate_") and all(len(result["tiers"]) == 1 for result in self.results):
            return False
        values = [measure.of(result) for result in self.results]
        return any(values) or measure.key == "hit_rate"

    def differing_values(self, place: int) -> list[str]:
        """Return a case's values of the differing settings."""
        return [self.cases[place].settings.get(key, "") for key in self.keys]

    def name_without(self, place: int, left_out: Iterable[str] = ()) -> str:
        """Return a case's differing settings, except those left out; the eviction policy if no setting is left."""
        keys = [key for key in self.keys if key not in left_out]
        settings = self.cases[place].settings
        return " ".join(setting_text(key, settings[key]) for key in keys if settings.get(key)) or settings.get("eviction", "run")

    def label(self, place: int) -> str:
        """Return the name of a case in legends."""
        settings = " ".join(
            setting_text(key, value) for key, value in zip(self.keys, self.differing_values(place), strict=True) if value
        )
        return f"{self.cases[place].name}: {settings}" if settings else self.cases[place].name

    def rows(self) -> list[Row]:
        """Return the rows: no cache, the cases, then Belady's bounds and unlimited caches with the settings of their cases."""
        rows = [self._row(case, self.differing_values(place)) for place, case in enumerate(self.cases)]
        nothing: dict[str, Any] = {"hit_rate": 0.0, "page_hit_rate": 0.0}
        return [self._bound_row("no cache", [""] * len(self.keys), nothing), *rows, *self._bounds()]

    def _row(self, case: Case, settings: list[str]) -> Row:
        means = [case.mean(measure) for measure in self.measures]
        cells = [shown(measure, mean) for measure, mean in zip(self.measures, means, strict=True)]
        values = [None if mean is None else mean.mean for mean in means]
        return Row(name=case.name, settings=settings, cells=cells, values=values)

    def _bound_row(self, name: str, settings: list[str], bound: Mapping[str, Any]) -> Row:
        cells = [
            measure.text(bound.get(measure.key)) if measure.key in BOUND_MEASURES and measure.key in bound else ""
            for measure in self.measures
        ]
        return Row(name=name, settings=settings, cells=cells, values=[None] * len(cells), is_bound=True)

    def _bounds(self) -> list[Row]:
        rows = []
        for kind in ("belady", "unlimited"):
            groups = list(self.framed(kind).values())
            settings = [[self._shared(places, key) for key in range(len(self.keys))] for places in groups]
            for places, shared in zip(groups, settings, strict=True):
                rates = {key: list(self.cases[places[0]].bound(kind, key).values()) for key in BOUND_MEASURES}
                means = {key: sum(values) / len(values) for key, values in rates.items() if values}
                room = f" {self._room(places[0])}" if kind == "belady" and settings.count(shared) > 1 else ""
                rows.append(self._bound_row(f"{kind}{room}", shared, means))
        return rows

    def _room(self, place: int) -> str:
        """Return how much all tiers of a case hold, where settings do not say it, as with ``tiers.gpu.capacity=auto``."""
        measure = BY_KEY["capacity_bytes"]
        return measure.text(measure.of(self.cases[place].first))

    def framed(self, kind: str) -> dict[str, list[int]]:
        """Return the cases that share each bound of a kind, by the bound's name."""
        groups: dict[str, list[int]] = {}
        for place, case in enumerate(self.cases):
            if name := case.bound_name(kind):
                groups.setdefault(name, []).append(place)
        return groups

    def _shared(self, places: list[int], key: int) -> str:
        values = {self.differing_values(place)[key] for place in places}
        name = self.keys[key]
        is_of_the_bound = (
            name.endswith((".capacity", ".scope")) or name.startswith(("trace", "page_tokens", "warmup")) or name in SIZES
        )
        return values.pop() if len(values) == 1 and is_of_the_bound else ""

    @cached_property
    def served(self) -> list[str]:
        """Which requests each case served, as far as its numbers tell: cases of the same requests have equal texts."""
        has_tokens = not any(result["rejected"] or shed_requests(result) for result in self.results)
        by_seed = [{result["seed"]: _served(result, has_tokens) for result in case.results} for case in self.cases]
        common = set.intersection(*map(set, by_seed)) if by_seed else set()
        return [" ".join(served[seed] for seed in sorted(common or served)) for served in by_seed]

    @property
    def is_mixed(self) -> bool:
        """Whether some cases served other requests than others, so that their numbers cannot be compared."""
        return len(set(self.served)) > 1

    def overloaded(self) -> list[int]:
        """Return the cases in which, with some seed, the queue grew for as long as requests arrived."""
        return [
            place
            for place, case in enumerate(self.cases)
            if any(text.startswith(ENDLESS) for result in case.results for text in result.get("warnings") or ())
        ]

    def overload_note(self) -> list[str]:
        """Say in which cases latencies have no meaning of their own; nothing if in none."""
        places = self.overloaded()
        if not places:
            return []
        names = ", ".join(self.cases[place].name for place in places[:MOST_OVERLOADED])
        more = f" and {len(places) - MOST_OVERLOADED} more" if len(places) > MOST_OVERLOADED else ""
        why = "more requests arrived than were served, so these times only tell how long the trace is"
        return [f"!: {ENDLESS} in {names}{more}: {why}"]

    def mixture(self) -> list[str]:
        """Say that the runs served different requests; nothing if they served the same."""
        if not self.is_mixed:
            return []
        counts = sorted({result["requests"] + result["warmup_requests"] for result in self.results})
        numbers = f" ({', '.join(f'{number:,}' for number in counts[:MOST_SETS])})" if len(counts) > 1 else ""
        return [
            f"These runs served different requests{numbers}: their hit rates and times are not comparable, so none is called the "
            "best of all"
        ]

    def standing(self, measure: Measure, places: Sequence[int] | None = None) -> dict[int, str]:
        """Return how cases stand among ``places`` (by default all): BEST, TIE (equal to the best as shown) or NEAR.

        Nothing is said where all values are equal as shown. Only the cases with the fewest rejected requests compete, and for all
        but ``OVER_ALL`` only those of them that shed the fewest: the rates of others exclude requests that are hard to serve.
        NEAR is a case whose difference from the best has a 95 % interval that includes zero: by their seeds or, with one run
        each, by resampling the requests.
        """
        competing = self.competing(places, sheds=measure.key in OVER_ALL)
        if len({self.served[place] for place in competing}) > 1:
            return {}
        means = {place: mean.mean for place in competing if (mean := self.cases[place].mean(measure)) is not None}
        texts = {place: measure.text(value) for place, value in means.items()}
        if not measure.better or len(set(texts.values())) < 2:
            return {}
        best = max(means, key=lambda place: measure.better * means[place])
        first = [place for place, text in texts.items() if text == texts[best]]
        found = dict.fromkeys(first, BEST if len(first) == 1 else TIE)
        others = [place for place in means if place not in found]
        return found | {other.place: NEAR for other in self.against(measure, best, others) if other.difference.holds_zero}

    def against(self, measure: Measure, best: int, others: Sequence[int]) -> list[Against]:
        """Return the best case against others, the nearest first, where their noise is known."""
        key = measure.key, best, tuple(others)
        if key not in self._against:
            self._against[key] = against(self.cases, measure, best, others, self._most_compared)
        return self._against[key]

    def competing(self, places: Iterable[int] | None = None, *, sheds: bool = False) -> list[int]:
        """Return those of ``places``, by default of all cases, that have the fewest rejected requests and, unless ``sheds``, of
        these those that shed the fewest."""
        places = range(len(self.cases)) if places is None else places
        left_out = {
            place: (
                sum(result["rejected"] for result in self.cases[place].results),
                0 if sheds else sum(map(shed_requests, self.cases[place].results)),
            )
            for place in places
        }
        fewest = min(left_out.values(), default=(0, 0))
        return [place for place, numbers in left_out.items() if numbers == fewest]

    def best(self) -> set[tuple[int, int]]:
        """Return the cells (case, column) with the best value of each column as shown; none where all values are equal."""
        return {
            (place, column)
            for column, measure in enumerate(self.measures)
            for place, stands in self.standing(measure).items()
            if stands != NEAR
        }

    def identical(self) -> list[list[int]]:
        """Return the sets of cases, each of several, whose results are equal in everything."""
        groups: dict[str, list[int]] = {}
        for place, case in enumerate(self.cases):
            groups.setdefault(case.outcome(), []).append(place)
        return [places for places in groups.values() if len(places) > 1]

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        shed = any(shed_requests(result) for result in self.results)
        lines = list(dict.fromkeys(hit_definition(result["config"], has_shed=shed) for result in self.results))
        if self.framed("belady"):
            lines.append(MEANING)
        if self.has_seeds:
            lines.append(
                "Means over seeds, ± the half-width of the 95 % confidence interval of the mean (Student's t); a mean without "
                "± is the same for all seeds. ≈: not distinguishable from the best of its column, by the differences by seed."
            )
            if any(len(case.runs) == 2 for case in self.cases):
                lines.append("An interval from two seeds extends some 13 standard errors to each side; more seeds narrow it.")
        lines += self._noise_note()
        lost = [run.name for run, result in zip(self.runs, self.results, strict=True) if result.get("bounds") and not run.bounds]
        if lost:
            lines.append(f"No bounds for these runs, because their traces can no longer be read: {', '.join(lost[:8])}.")
        return lines

    def _noise_note(self) -> list[str]:
        """Say what ≈ means where cases have one run each; nothing if no case has the mark."""
        drawn = {other.drawn for found in self._against.values() for other in found if other.difference.holds_zero} - {"seeds"}
        if not drawn:
            return []
        what = " or ".join(DRAWN[name] for name in sorted(drawn))
        how = f"the 95 % interval of the difference, by resampling {what}, holds zero"
        return [f"≈: not distinguishable from the best of its column: {how}."]

    def same_results(self) -> list[str]:
        """Say which cases have equal results in everything, and which ones the seed makes no difference to."""
        lines = []
        if sets := [self._alike(places) for places in self.identical()]:
            more = f"; and {len(sets) - MOST_SETS} more sets" if len(sets) > MOST_SETS else ""
            named = "; ".join(sets[:MOST_SETS])
            lines.append(f"Identical results in everything, so what differs within each set had no effect: {named}{more}.")
        same = [case.name for case in self.cases if case.is_same_for_all_seeds]
        if same:
            lines.append(
                f"The seed made no difference to {'any configuration' if len(same) == len(self.cases) else ', '.join(same[:8])}."
            )
        return lines

    def _alike(self, places: Sequence[int]) -> str:
        """Name a set of cases: their names, what differs between them, and what they share."""
        settings = [self.cases[place].settings for place in places]
        keys = [key for key in self.keys if key != "seed"]
        differing_keys = [key for key in keys if len({each.get(key) for each in settings}) > 1]
        shared = " ".join(
            setting_text(key, settings[0][key]) for key in keys if key not in differing_keys and settings[0].get(key)
        )
        varied = ", ".join(
            " ".join(setting_text(key, each[key]) for key in differing_keys if each.get(key)) for each in settings[:6]
        )
        names = ", ".join(self.cases[place].name for place in places[:6]) + (", …" if len(places) > 6 else "")
        return " ".join(part for part in (names, f"({varied})" if varied else "", f"at {shared}" if shared else "") if part)


def _served(result: RunRecord, has_tokens: bool) -> str:
    """Return how many requests a run was given and, if no run rejected any, how many tokens their prompts had."""
    counts = [result["requests"], result["warmup_requests"], *([result["prompt_tokens"]] if has_tokens else [])]
    return ":".join(map(str, counts))


def by_hit_rate(comparison: Comparison) -> list[int]:
    """Return the cases, those with the highest mean hit rate first; those without one last."""
    means = [case.mean(BY_KEY["hit_rate"]) for case in comparison.cases]
    return sorted(range(len(means)), key=lambda place: -mean.mean if (mean := means[place]) else 0.0)


def shown(measure: Measure, mean: Mean | None) -> str:
    """Format a mean and the half-width of its interval, if there is one, as ``53.0±1.2%``."""
    if mean is None:
        return measure.text(None)
    text = measure.text(mean.mean)
    if not mean.half_width:
        return text
    if text.endswith("%"):  # the interval says how exact it is, so neither needs a "<" or to stay below 100%
        return f"{100 * mean.mean:.2f}±{mean.half_width:.2%}"
    return f"{text}±{measure.text(mean.half_width)}"


def print_comparison(runs: Sequence[Run], console: Console) -> None:
    """Print the table; of more than ``MOST_ROWS`` runs, those with the highest hit rates."""
    comparison = Comparison(runs)
    rows, stands = comparison.rows(), [comparison.standing(measure) for measure in comparison.measures]
    order = by_hit_rate(comparison)
    listed = set(order[:MOST_ROWS])
    width = width_of(console)
    columns = [column for column, measure in enumerate(comparison.measures) if measure.on_terminal]
    titles = ["job", *map(heading, comparison.keys), *(comparison.measures[column].title for column in columns)]
    settings = range(1, len(comparison.keys) + 1)
    overloaded = comparison.overloaded()
    drawn: list[list[Cell]] = []
    for number, row in enumerate(rows):
        place = number - 1
        if row.is_bound or place in listed:
            cells = [_marked(row.cells[column], stands[column], place) for column in columns]
            for cell, column in zip(cells, columns, strict=True):
                if place in overloaded and comparison.measures[column].key in OF_WAITING:
                    cell.append(OVERLOAD, "bold red")
            drawn.append([Text(row.name, "dim" if row.is_bound else ""), *row.settings, *cells])
    first = len(settings) + 1
    rest = [first + at for at, column in enumerate(columns) if comparison.measures[column].key != "hit_rate"]
    from_tiers = [first + at for at, column in enumerate(columns) if comparison.measures[column].key.startswith("hit_rate_")]
    drop = [*from_tiers, *(column for column in reversed(rest) if column not in from_tiers), *reversed(settings)]
    print_table(console, titles, drawn, width, words=settings, left=(0, *settings), drop=drop)
    if len(order) > MOST_ROWS:
        console.print(f"{len(order) - MOST_ROWS} configurations with lower hit rates are not shown", style="dim", highlight=False)
    for line in (*comparison.overload_note(), *comparison.mixture(), *comparison.same_results(), *comparison.notes()):
        console.print(Text(without_folders(line), "dim"), width=min(width, 100))


def _marked(cell: str, stands: Mapping[int, str], place: int) -> Text:
    """Return a cell, bold if it is the best of its column, with its mark; without one, blanks in a column with marks."""
    how = stands.get(place, "")
    marks = {TIE: f" {TIE}", NEAR: f" {NEAR}"}
    blank = "\u00a0\u00a0" if any(each in marks for each in stands.values()) else ""
    return Text(cell, "bold" if how in (BEST, TIE) else "").append(marks.get(how, blank), "dim")
