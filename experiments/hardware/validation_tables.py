"""The tables, claims and picture of validation.py, from the records that kvsim validate has written."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from kvsim.report.figure import COLOURS, GREY, SYMBOLS
from kvsim.report.screenshot import take_screenshot
from kvsim.report.study import Claim, claim_table, markdown
from kvsim.report.validation.repeated_page import shown
from kvsim.report.validation.spreads import deviation, mean
from kvsim.results.statistics import student_t

Record = dict[str, Any]
SHOWN = ("identical hits", "hit_rate all", "ttft by request", "ttft_p50", "ttft_p99", "tpot_p50")
"""Figures in the tables; the CSV file has all."""
SCALES = {"share": (100.0, "%"), "s": (1000.0, "ms"), "bytes": (1e-9, "GB")}
CLAIMED = ("identical hits", "hit_rate", "link_bytes", "ttft_p50", "ttft_p99")
"""Figures with tolerances: their names begin so."""
BY_CHANCE = 0.05
RANKED = "ttft_p50"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A list of configurations: what was asked for, and what has been measured of it."""

    name: str
    text: str
    """How the list came about."""
    wanted: Mapping[str, Sequence[str]]
    """Overrides, by configuration."""
    records: Mapping[str, Record]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.wanted if name not in self.records]


def figures(record: Record) -> dict[str, Record]:
    return {figure["name"]: figure for figure in record["figures"]}


# Claims


def claims(parts: Sequence[Part]) -> list[Claim]:
    """Return what is claimed of each part; what has not been measured fails."""
    found = [
        claim for part in parts for claim in (claims_of_ranking(part) if part.name == "ranking" else claims_of_figures(part))
    ]
    records = [record for part in parts for record in part.records.values()]
    runs = [run for record in records for run in record["hardware"]]
    wrong, verified = (sum(run[key] for run in runs) for key in ("wrong_words", "verified_pages"))
    states = sum(run.get("verified_states", 0) for run in runs)
    text = f"{wrong} wrong words in {verified:,} reused pages{f' and {states:,} states' if states else ''} of {len(runs)} runs"
    return [*found, Claim("bytes: no word of a reused page or state is wrong", text, wrong == 0 and verified > 0)]


def claims_of_figures(part: Part) -> list[Claim]:
    """Return a claim for each kind of figure with a tolerance: it holds in every configuration."""
    found = []
    for kind in CLAIMED:
        held = [
            all(one["holds"] for one in record["figures"] if one["name"].startswith(kind)) for record in part.records.values()
        ]
        text = f"{sum(held)} of {len(part.wanted)}" + (f", {len(part.missing)} not measured" if part.missing else "")
        claim = f"{part.name}: {kind} is within the machine's spread, or its tolerance, in every configuration"
        found.append(Claim(claim, text, sum(held) == len(part.wanted)))
    return found


def claims_of_ranking(part: Part) -> list[Claim]:
    """Return the claim that policies which real runs tell apart have the same order in the simulation, and that some are."""
    if part.missing:
        return [Claim("ranking: the order of policies", f"{len(part.missing)} not measured", False)]
    pairs = ranked_pairs(part.records)
    apart = [pair for pair in pairs if pair["is_apart"]]
    agreed = [pair for pair in apart if pair["agrees"]]
    text = f"{len(agreed)} of {len(apart)}; the real runs tell {len(apart)} of {len(pairs)} pairs apart"
    claim = "ranking: policies that real runs tell apart keep their order, and they tell at least half of the pairs apart"
    return [Claim(claim, text, agreed == apart and 2 * len(apart) >= len(pairs))]


def ranked_pairs(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Return, for each pair of configurations, how far the real runs and the simulations say that they are apart.

    Distances are natural logarithms of ratios. All configurations are taken to spread alike, relative to their size: their runs
    are on one machine, with one workload. A pair is apart if its distance exceeds the 95 % interval of Student's t.
    """
    values = {name: figures(record)[RANKED] for name, record in records.items()}
    logs = {name: [math.log(value) for value in figure["hardware"]["values"]] for name, figure in values.items()}
    freedom = sum(len(some) - 1 for some in logs.values())
    spread = math.sqrt(sum(deviation(some) ** 2 * (len(some) - 1) for some in logs.values()) / freedom)
    pairs = []
    for one, other in combinations(values, 2):
        real = mean(logs[one]) - mean(logs[other])
        half_width = student_t(freedom) * spread * math.sqrt(1 / len(logs[one]) + 1 / len(logs[other]))
        simulated = math.log(mean(values[one]["simulated"]["values"]) / mean(values[other]["simulated"]["values"]))
        pairs.append(
            {
                "pair": f"{one} : {other}", "real": real, "half_width": half_width, "simulated": simulated,
                "is_apart": abs(real) > half_width, "agrees": simulated * real > 0,
            }
        )  # fmt: skip
    return pairs


# Tables


def page(parts: Sequence[Part], made_by: str, image: str | None, findings: str) -> list[str]:
    """Return the lines of the Markdown page.

    ``image`` is the name of the picture's file, if there is one; ``findings`` is Markdown, or empty.
    """
    records = [record for part in parts for record in part.records.values()]
    devices = ", ".join(sorted({record["device"] for record in records}))
    lines = ["# Simulated and measured, with the spread of both", "", *claim_table(claims(parts)), ""]
    lines += [f"![Times simulated and measured, with the ranges of the runs]({image})", ""] if image else []
    lines += [findings, ""] if findings else []
    lines += [
        "## All configurations", "",
        f"{devices}. Made by `{made_by}`. Each configuration was served {runs_text(records)} by the machine, and simulated with "
        "the machine's noise. A cell has the mean ± the standard deviation of the real runs, then how far the mean of the "
        "simulations is from it, in points or percent: in italics where that is more than the spread of the runs but within the "
        "tolerance, **bold** where it is more than both. In the column ttft by request, the first number is how far the median "
        "request's TTFT is apart in two real runs, and the second how much further a simulation is from a real run. The last "
        "column counts the figures outside the spread, as about "
        f"{BY_CHANCE:.0%} are by chance. The CSV file beside this page has all figures.",
    ]  # fmt: skip
    for part in parts:
        lines += ["", f"### {part.name.capitalize()}", "", part.text, "", *table(part)]
        lines += ranking_table(part) if part.name == "ranking" and not part.missing else []
    lines += ["", "## Settings"]
    for part in parts:
        lines += ["", f"### Settings: {part.name}", "", *markdown(("", "settings"), settings_rows(part))]
    return lines


def runs_text(records: Iterable[Record]) -> str:
    counts = sorted({len(record["measured"]) for record in records})
    return f"{counts[0]} to {counts[-1]} times" if len(counts) > 1 else f"{counts[0]} times" if counts else "0 times"


def table(part: Part) -> list[str]:
    """Return the table of a part, a row for each configuration, measured or not."""
    rows = []
    for name in part.wanted:
        record = part.records.get(name)
        if record is None:
            rows.append((name, *["not measured"] * (len(SHOWN) + 2)))
            continue
        known = figures(record)
        cells = [cell(known[figure]) if figure in known else "-" for figure in SHOWN]
        rows.append((name, str(record["requests"]), *cells, f"{record['off']} of {len(record['figures'])}"))
    heads = [f"{figure} ({SCALES['s' if figure[-3:] in ('p50', 'p99') else 'share'][1]})" for figure in SHOWN]
    return markdown(("", "requests", *heads, "off"), rows)


def cell(figure: Record) -> str:
    """Return the spread of the real runs and the distance of the simulations, marked if it is off."""
    scale, real = SCALES[figure["unit"]][0], figure["hardware"]
    distance = shown(figure, figure["distance"])
    mark = "" if not figure["is_off"] else "*" if figure["holds"] else "**"
    return f"{real['mean'] * scale:.4g} ± {real['deviation'] * scale:.2g}, {mark}{distance}{mark}"


def ranking_table(part: Part) -> list[str]:
    """Return the table of pairs."""
    rows = [
        (
            pair["pair"], *(f"{math.expm1(pair[key]):+.1%}" for key in ("real", "simulated")),
            f"{math.expm1(pair['half_width']):.1%}",
            ("the same order" if pair["agrees"] else "**another order**") if pair["is_apart"] else "not told apart",
        )
        for pair in ranked_pairs(part.records)
    ]  # fmt: skip
    return ["", *markdown((f"{RANKED} of one relative to the other", "measured", "simulated", "told apart from", ""), rows)]


def settings_rows(part: Part) -> list[tuple[str, str]]:
    return [(name, " ".join(f"`{word}`" for word in overrides)) for name, overrides in part.wanted.items()]


def write_csv(path: Path, parts: Sequence[Part]) -> None:
    """Write all figures: values of all runs, distance, interval, verdict."""
    columns = ("distance", "low", "high", "is_off", "tolerance", "holds")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("part", "configuration", "figure", "unit", "measured", "simulated", *columns))
        for part in parts:
            for name, record in part.records.items():
                for figure in record["figures"]:
                    values = [" ".join(f"{value:.6g}" for value in figure[side]["values"]) for side in ("hardware", "simulated")]
                    rest = (f"{figure[key]:.6g}" if isinstance(figure[key], float) else figure[key] for key in columns)
                    writer.writerow((part.name, name, figure["name"], figure["unit"], *values, *rest))


# The picture


def write_picture(path: Path, parts: Sequence[Part]) -> str | None:
    """Write the picture as a page (``.html``) and, where a Chromium is installed, as an image, whose name is returned."""
    drawn = picture(parts)
    drawn.write_html(path, include_plotlyjs=True, config={"displayModeBar": False})
    image = path.with_suffix(".png")
    return image.name if take_screenshot(path, image, width=drawn.layout.width + 16, height=drawn.layout.height + 16) else None


def picture(parts: Sequence[Part]) -> go.Figure:
    """Draw times of every configuration, measured (x) and simulated (y): means, and the range of the runs on either side."""
    shown_times = ("ttft_p50", "ttft_p99", "tpot_p50")
    traces: list[Any] = []
    for place, part in enumerate(parts):
        for number, name in enumerate(shown_times):
            points = [(key, known[name]) for key, record in part.records.items() if name in (known := figures(record))]
            sides = {side: [one[side] for _, one in points] for side in ("hardware", "simulated")}
            marker = {"color": COLOURS[number], "symbol": SYMBOLS[place], "size": 9}
            x, y = ([one["mean"] for one in sides[side]] for side in ("hardware", "simulated"))
            spread = {"error_x": bars(sides["hardware"]), "error_y": bars(sides["simulated"]), "text": [key for key, _ in points]}
            traces.append(go.Scatter(x=x, y=y, mode="markers", name=f"{part.name}, {name}", marker=marker, **spread))
    ends = [value for one in traces for values in (one.x, one.y) for value in values if value]
    if ends:
        both = [min(ends) / 1.3, max(ends) * 1.3]
        traces.append(go.Scatter(x=both, y=both, mode="lines", name="equal", line={"color": GREY, "dash": "dash"}))
    axes = {"xaxis": {"type": "log", "title": "measured (s)"}, "yaxis": {"type": "log", "title": "simulated (s)"}}
    return go.Figure(traces, {"width": 860, "height": 620, "template": "plotly_white", "margin": {"t": 20}, **axes})


def bars(spreads: Sequence[Record]) -> dict[str, Any]:
    """Return error bars from the least to the most."""
    above = [one["most"] - one["mean"] for one in spreads]
    below = [one["mean"] - one["least"] for one in spreads]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
