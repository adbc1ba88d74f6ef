"""The head of a comparison's page: its title, and the best values with the names of their runs."""

from kvsim.report.comparison.compare import NEAR, Comparison, by_hit_rate, shown
from kvsim.report.comparison.differing import heading
from kvsim.report.headline import Tile, busiest, shared_subject
from kvsim.results.fields import BY_KEY
from kvsim.results.measures import Measure

ASKED = (
    ("hit_rate", "highest hit rate", ""),
    ("ttft_s_p99", "lowest TTFT p99", " s"),
    ("goodput_requests_per_s", "highest goodput", " requests/s"),
    ("prompt_tokens_per_s", "highest throughput", " prompt tokens/s"),
)
"""Measures, what their best value is called, and their units; throughput only where no run has objectives."""
MOST_NAMED = 2


def title_of(comparison: Comparison) -> str:
    """Return the title: what all runs share, how many there are, and what differs between them."""
    shared = shared_subject(comparison.results)
    runs, cases = len(comparison.runs), len(comparison.cases)
    number = f"{runs} run{'s' * (runs != 1)}" + (f" of {cases} configuration{'s' * (cases != 1)}" if comparison.has_seeds else "")
    varied = [heading(key) for key in comparison.keys if key != "seed"]
    by = f" by {', '.join(varied[:3])}{' and more' if len(varied) > 3 else ''}" if varied else ""
    return f"{', '.join(shared) or 'kvsim'}: {number}{by}"


def tiles(comparison: Comparison) -> list[Tile]:
    """Return the best values with the names of their runs, and what is busiest where most is reused; none of a mixture."""
    if comparison.is_mixed or not comparison.cases:
        return []
    known = {measure.key for measure in comparison.measures}
    asked = [row for row in ASKED if row[0] in known]
    found = [_best(comparison, BY_KEY[key], name, unit) for key, name, unit in asked[:3]]
    first = comparison.cases[by_hit_rate(comparison)[0]].first
    return [*found, *(tile._replace(note="where most is reused") for tile in busiest(first))]


def _best(comparison: Comparison, measure: Measure, name: str, unit: str) -> Tile:
    first = [place for place, how in comparison.standing(measure).items() if how != NEAR]
    if not first:
        means = [mean for place in comparison.competing() if (mean := comparison.cases[place].mean(measure)) is not None]
        return Tile(name, f"{shown(measure, means[0] if means else None)}{unit}", "all are equal" if len(means) > 1 else "")
    names = ", ".join(comparison.label(place) for place in first[:MOST_NAMED])
    more = f" and {len(first) - MOST_NAMED} more" if len(first) > MOST_NAMED else ""
    near = len(comparison.standing(measure)) - len(first)
    more += f"; {near} not distinguishable from it" if near else ""
    return Tile(name, f"{shown(measure, comparison.cases[first[0]].mean(measure))}{unit}", f"{names}{more}")
