"""How close is the simulation to a GPU where the tiers below the GPU are hit?

Twelve configurations, drawn by the rule in tiers_draw.py so that the disk or the CPU tier is hit: among them storage beside the
GPU, a hybrid model, coarse CPU pages, and one that is overloaded. Each was served three times by a GPU (tiers_measure.py), which
had calibrated itself before, and is simulated with that machine's description and its noise, by ``kvsim validate``.

Claims, each of all configurations; a figure is inside the spread if it is not off by the 95 % interval of kvsim validate:

shares      real runs have what the draw asked for: at least 4 with more than 5 points from the disk, 4 with more than 10 from the
            CPU
hits        the hit rate of every tier is inside the spread of the machine's own runs
p50, p99    of time to first token: within 5 % (p50) or 3 % (p99), or inside the spread
bytes       no word of a reused page or state is wrong

As a yardstick, the page says in how many configurations hits, p50 and p99 would agree if the machine behaved as simulated: every
choice of as many simulations as there are real runs is compared with the other simulations instead.

    python experiments/hardware/tiers_draw.py
    python experiments/hardware/tiers_measure.py --part 1/3         (and 2/3, 3/3) on a machine with a GPU
    python experiments/hardware/tiers.py                            anywhere: simulates, and writes the tables

Reads tiers_configurations.json and the archives in tiers_recorded. Writes tiers.md, .csv, .html and, where a Chromium is
installed, .png; the page has tiers_findings.md after its claims, if there is such a file. Exits with 1 if a claim fails, with 2
if a configuration cannot be simulated.
"""

import argparse
import csv
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvsim.cli import main as kvsim
from kvsim.files.writing import replacing
from kvsim.report.figure import COLOURS, GREY
from kvsim.report.screenshot import take_screenshot
from kvsim.report.study import Claim, claim_table, markdown
from kvsim.report.validation.repeated import interval_of

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from tiers_launched import section, words_of  # noqa: E402
from tiers_measure import CONFIGURATIONS, Configuration, read_configurations  # noqa: E402
from validation_tables import cell, figures  # noqa: E402

Record = dict[str, Any]
TIERS = ("gpu", "cpu", "disk", "all")
ASKED = {"disk": (4, 5.0), "cpu": (4, 10.0)}
"""By tier: how many configurations should have more than so many points of the hit rate from it."""
WITHIN = {"ttft_p50": 0.05, "ttft_p99": 0.03}
"""How far times may be off where they are outside the spread."""
SHOWN = (*(f"hit_rate {tier}" for tier in TIERS), "ttft_p50", "ttft_p99", "tpot_p50")


@dataclass(frozen=True)
class Served:
    """The real runs of a configuration, all of one machine."""

    configuration: Configuration
    machine: Path
    """Folder with the machine's descriptions."""
    runs: Path

    @property
    def count(self) -> int:
        return len(list(self.runs.glob("*/result.json")))


def unpack(archives: Path, folder: Path) -> list[Path]:
    """Unpack all archives, and return the folders of the machines."""
    for archive in sorted(archives.glob("*.tar.xz")):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return sorted(path for path in folder.glob("*") if (path / "hardware").is_dir())


def served_by(machines: Sequence[Path], configurations: Sequence[Configuration]) -> dict[str, Served]:
    """Return, by configuration, the runs of the machine that has served it most often, if any has."""
    found = {}
    for one in configurations:
        candidates = [Served(one, machine, machine / "runs" / one.name) for machine in machines]
        best = max(candidates, key=lambda served: served.count, default=None)
        if best is not None and best.count >= 2:
            found[one.name] = best
    return found


def validate(served: Served, folder: Path, changes: Sequence[str] = ()) -> int:
    """Simulate a configuration, with ``changes``, and compare it with its runs. Return the exit code of kvsim validate."""
    one = served.configuration
    words = [*one.overrides, f"hardware=measured_{one.model}", "--config-dir", str(served.machine), *changes]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "validate.txt").open("w") as said, redirect_stdout(said):
        return kvsim(["validate", *words, f"validate.measured={served.runs}", f"output={folder}"])


# Claims


def claims(records: Mapping[str, Record], wanted: Sequence[str]) -> list[Claim]:
    """Return the claims; what has not been measured does not hold."""
    known = {name: figures(record) for name, record in records.items()}
    found = [claim_of_share(tier, *asked, known) for tier, asked in ASKED.items()]
    hits = {name: [one for key, one in some.items() if key.startswith("hit_rate")] for name, some in known.items()}
    inside = [name for name, some in hits.items() if not any(one["is_off"] for one in some)]
    text = "the hit rate of every tier is inside the spread of the machine's own runs"
    found.append(Claim(text, of_all(inside, records, wanted), len(inside) == len(wanted)))
    for key, within in WITHIN.items():
        close = [name for name, some in known.items() if is_within(some[key], within)]
        unspread = [name for name, some in known.items() if not some[key]["is_off"]]
        held = [name for name in known if name in close or name in unspread]
        text = f"{key} is within {within:.0%} or inside the spread"
        measured = f"{of_all(held, records, wanted)} (within {within:.0%}: {len(close)}, inside the spread: {len(unspread)})"
        found.append(Claim(text, measured, len(held) == len(wanted)))
    return [*found, claim_of_bytes(records)]


def claim_of_share(tier: str, least: int, points: float, known: Mapping[str, Mapping[str, Record]]) -> Claim:
    """Return the claim that enough real runs hit a tier."""
    shares = [100 * some[f"hit_rate {tier}"]["hardware"]["mean"] for some in known.values() if f"hit_rate {tier}" in some]
    count = sum(share > points for share in shares)
    text = f"in real runs of at least {least} configurations, more than {points:g} points of the hit rate are from the {tier}"
    return Claim(text, f"{count}", count >= least)


def claim_of_bytes(records: Mapping[str, Record]) -> Claim:
    """Return the claim that what was reused was right."""
    runs = [run for record in records.values() for run in record["hardware"]]
    wrong, verified, states = (
        sum(run.get(key, 0) for run in runs) for key in ("wrong_words", "verified_pages", "verified_states")
    )
    text = f"{wrong} wrong words in {verified:,} reused pages and {states:,} states of {len(runs)} runs"
    return Claim("no word of a reused page or state is wrong", text, wrong == 0 and verified > 0)


def is_within(figure: Record, most: float) -> bool:
    return figure["distance"] is not None and abs(figure["distance"]) <= most


@dataclass(frozen=True)
class Yardstick:
    """How many configurations would agree, in the mean, if the machine behaved as simulated."""

    hits: float
    ttft_p50: float
    ttft_p99: float

    def text(self, configurations: int) -> str:
        counts = f"hit rates in {self.hits:.1f}, ttft_p50 in {self.ttft_p50:.1f} and ttft_p99 in {self.ttft_p99:.1f}"
        return (
            f"If the machine behaved as simulated, {counts} of the {configurations} measured configurations would agree, in the "
            "mean: each choice of as many simulations as there are real runs is compared with the other simulations by the same "
            "rules."
        )


def yardstick(records: Mapping[str, Record]) -> Yardstick:
    """Let simulations stand in for the real runs."""
    sums = [0.0, 0.0, 0.0]
    for record in records.values():
        known = figures(record)
        hits = [one for key, one in known.items() if key.startswith("hit_rate")]
        for place, (some, within) in enumerate([(hits, 0.0), *(([known[key]], most) for key, most in WITHIN.items())]):
            sums[place] += share_that_agrees(some, within)
    return Yardstick(*sums)


def share_that_agrees(some: Sequence[Record], within: float) -> float:
    """Return the share of choices of simulations in which all these figures are inside the spread, or within a distance."""
    runs, simulations = len(some[0]["hardware"]["values"]), len(some[0]["simulated"]["values"])
    agreed = []
    for chosen in combinations(range(simulations), runs):
        is_agreed = True
        for one in some:
            values = one["simulated"]["values"]
            samples = [value for place, value in enumerate(values) if place not in chosen], [values[at] for at in chosen]
            interval, is_off = interval_of(one["unit"], samples)
            is_agreed &= not is_off or interval.distance is not None and abs(interval.distance) <= within
        agreed.append(is_agreed)
    return sum(agreed) / len(agreed)


def of_all(held: Sequence[str], records: Mapping[str, Record], wanted: Sequence[str]) -> str:
    missing = len(wanted) - len(records)
    return f"{len(held)} of {len(wanted)}" + (f", {missing} not measured" if missing else "")


# Tables and picture


def page(
    configurations: Sequence[Configuration],
    served: Mapping[str, Served],
    records: Mapping[str, Record],
    launched: Mapping[str, Record],
    image: str | None,
    findings: str,
) -> Iterator[str]:
    """Yield the lines of the page. ``image`` is the picture's file, if there is one; ``findings`` is Markdown, or empty."""
    yield from ("# Simulated and measured, where lower tiers are hit", "")
    yield from claim_table(claims(records, [one.name for one in configurations]))
    yield from ("", yardstick(records).text(len(records)))
    yield from ("", f"![Hit rates and times to first token, simulated and measured]({image})") if image else ()
    yield from ("", findings) if findings else ()
    devices = ", ".join(sorted({record["device"] for record in records.values()}))
    counts = sorted({len(record["measured"]) for record in records.values()})
    yield from (
        "", "## All configurations", "",
        f"{devices}, {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} real runs each, made by "
        "`python experiments/hardware/tiers_measure.py`; simulated by `python experiments/hardware/tiers.py` with the noise of "
        "the same machine. A cell has the mean ± the standard deviation of the real runs, then how far the mean of the "
        "simulations is from it, in points or percent: in italics where that is more than the spread of the runs but within the "
        "tolerance of `kvsim validate`, **bold** where it is more than both. tiers.csv has all figures.", "",
    )  # fmt: skip
    heads = [f"{name} ({'%' if name.startswith('hit_rate') else 'ms'})" for name in SHOWN]
    yield from markdown(("", "machine", "requests", *heads), table_rows(configurations, served, records))
    yield from section(records, launched)
    yield from ("", "## Settings", "")
    yield from markdown(("", "settings"), [(one.name, " ".join(f"`{word}`" for word in one.overrides)) for one in configurations])


def table_rows(
    configurations: Sequence[Configuration], served: Mapping[str, Served], records: Mapping[str, Record]
) -> Iterator[tuple[str, ...]]:
    for one in configurations:
        record = records.get(one.name)
        if record is None:
            yield (one.name, *["not measured"] * (len(SHOWN) + 2))
            continue
        known = figures(record)
        cells = [cell(known[name]) if name in known else "-" for name in SHOWN]
        yield (one.name, served[one.name].machine.name, str(record["requests"]), *cells)


def write_csv(path: Path, served: Mapping[str, Served], records: Mapping[str, Record]) -> None:
    """Write all figures: values of all runs, distance, interval, verdict."""
    columns = ("distance", "low", "high", "is_off")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("configuration", "machine", "figure", "unit", "measured", "simulated", *columns))
        for name, record in records.items():
            for figure in record["figures"]:
                values = [" ".join(f"{value:.6g}" for value in figure[side]["values"]) for side in ("hardware", "simulated")]
                rest = (f"{figure[key]:.6g}" if isinstance(figure[key], float) else figure[key] for key in columns)
                writer.writerow((name, served[name].machine.name, figure["name"], figure["unit"], *values, *rest))


def picture(records: Mapping[str, Record]) -> go.Figure:
    """Draw hit rates by tier, measured beside simulated, and how far times to first token are apart, with their intervals."""
    known = {name: figures(record) for name, record in records.items()}
    titles = ("hit rate: measured, simulated", "TTFT: how much longer it is simulated")
    drawn = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=titles)
    for place, tier in enumerate(TIERS[:-1]):
        for side, opacity in (("hardware", 1.0), ("simulated", 0.5)):
            shares = [some[f"hit_rate {tier}"][side]["mean"] if f"hit_rate {tier}" in some else 0.0 for some in known.values()]
            bar = go.Bar(
                x=list(known), y=shares, name=f"{tier}, {'measured' if side == 'hardware' else side}", offsetgroup=side,
                marker={"color": COLOURS[place], "opacity": opacity}, base=base_of(known.values(), place, side),
            )  # fmt: skip
            drawn.add_trace(bar, row=1, col=1)
    for place, key in enumerate(WITHIN):
        points = [some[key] for some in known.values()]
        ends = {
            "type": "data", "symmetric": False, "thickness": 1, "array": [one["high"] - one["distance"] for one in points],
            "arrayminus": [one["distance"] - one["low"] for one in points],
        }  # fmt: skip
        marker = {"color": COLOURS[len(TIERS) + place - 1], "size": 9}
        distances = [one["distance"] for one in points]
        drawn.add_trace(
            go.Scatter(x=list(known), y=distances, mode="markers", name=key, marker=marker, error_y=ends), row=2, col=1
        )
    drawn.add_hline(y=0, line={"color": GREY, "dash": "dash"}, row=2, col=1)  # type: ignore[arg-type]
    drawn.update_yaxes(tickformat=".0%")
    return drawn.update_layout(width=1000, height=760, template="plotly_white", barmode="group", margin={"t": 40})


def base_of(known: Any, place: int, side: str) -> list[float]:
    """Return what the bars of a tier stand on: the hit rates of the tiers above."""
    above = [f"hit_rate {tier}" for tier in TIERS[:place]]
    return [sum(some[key][side]["mean"] for key in above if key in some) for some in known]


def write_picture(path: Path, records: Mapping[str, Record]) -> str | None:
    """Write the picture as a page and, where a Chromium is installed, as an image, whose name is returned."""
    drawn = picture(records)
    drawn.write_html(path, include_plotlyjs=True, config={"displayModeBar": False})
    image = path.with_suffix(".png")
    return image.name if take_screenshot(path, image, width=drawn.layout.width + 16, height=drawn.layout.height + 16) else None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=Path, default=CONFIGURATIONS, help="file of tiers_draw.py")
    parser.add_argument("--recorded", type=Path, default=HERE / "tiers_recorded", help="folder of the archives")
    parser.add_argument("--folder", type=Path, default=Path("outputs") / "tiers", help="folder of the simulations")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the tables")
    parser.add_argument("--workers", type=int, default=2, help="simulations at the same time")
    return parser.parse_args(arguments)


def compared(served: Mapping[str, Served], folder: Path, workers: int, changes: Mapping[str, Sequence[str]]) -> dict[str, Record]:
    """Simulate all configurations, with these changes, and return the records. Exits with 2 if one cannot be simulated."""
    folders = {name: folder / name for name in served}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        codes = pool.map(validate, served.values(), folders.values(), [changes.get(name, ()) for name in served])
        for name, code in zip(served, codes, strict=True):
            if code == 2:
                print(f"{name} cannot be simulated", file=sys.stderr)
                sys.exit(2)
    return {name: json.loads((path / "validate.json").read_text()) for name, path in folders.items()}


def main(arguments: list[str] | None = None) -> int:
    """Simulate what has been recorded and write the tables. Return the exit code."""
    options = parse(arguments)
    configurations = read_configurations(options.configurations)
    served = served_by(unpack(options.recorded, options.folder / "recorded"), configurations)
    if not served:
        sys.exit(f"--recorded: {options.recorded} has no archive with two runs of a configuration: see tiers_measure.py")
    records = compared(served, options.folder / "compared", options.workers, {})
    changes = {name: words_of(record) for name, record in records.items()}
    launched = compared(served, options.folder / "launched", options.workers, changes)
    options.output.mkdir(parents=True, exist_ok=True)
    write_csv(options.output / "tiers.csv", served, records)
    image = write_picture(options.output / "tiers.html", records)
    findings = options.output / "tiers_findings.md"
    lines = page(configurations, served, records, launched, image, findings.read_text().rstrip() if findings.exists() else "")
    with replacing(options.output / "tiers.md") as file:
        file.write(("\n".join(lines) + "\n").encode())
    return 0 if all(claim.holds for claim in claims(records, [one.name for one in configurations])) else 1


if __name__ == "__main__":
    sys.exit(main())
