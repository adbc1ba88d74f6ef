"""How close is the simulation to a GPU, in view of how close the GPU is to itself?

Every configuration is served several times by the GPU, and simulated with the noise that kvsim calibrate measured; see kvsim
validate. Three lists of configurations:

drawn       twelve, drawn from a seed by a rule (validation_draw.py), so that none is chosen because it agrees; all are reported
ranking     the first drawn one with a disk, with two write policies and two orders of the queue
chosen      agents with two write policies and two evictions, and a conversation: long runs in which all tiers are hit

Claims, of every configuration of the first and the last list:

figures     identical hits, hit rates, bytes of links, and time to first token (p50, p99) are within the machine's spread or,
            where they are off, within the tolerances of kvsim validate
ranking     policies that differ by more than the spread of the real runs have the same order in the simulation
bytes       no word of a reused page is wrong

    kvsim calibrate name=h200_measured              measures the machine with the GPU
    python experiments/hardware/validation.py --conversation FILE --agents FILE --draw-only
                                                    draws, anywhere, in a few minutes
    python experiments/hardware/validation.py --most-seconds 500
                                                    serves with the GPU, until all is done
    python experiments/hardware/validation.py --again --hardware NAME
                                                    simulates recorded runs anew, anywhere
    python experiments/hardware/validation.py --read
                                                    writes only the tables

What has been drawn or served is in ``--folder`` and is not repeated. Writes validation_drawn.md, .csv, .html and, where a
Chromium is installed, .png; the page ends with validation_drawn_findings.md, if there is such a file. Exits with 1 if a claim
fails, with 2 if a configuration cannot be run.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from kvsim.cli import main as kvsim

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from validation_draw import Drawn, draw  # noqa: E402
from validation_tables import Part, claims, page, write_csv, write_picture  # noqa: E402

COUNT = 12
SET_UP_S = 15
"""Seconds that a machine needs to prepare a run, roughly."""
PLACEMENTS, ORDERS = ("write_back", "write_through"), ("fcfs", "shortest_prefill")
"""What is ranked: when pages are written down, and the order of the queue, which change times by much."""
SHAPES = ["page_tokens=16", "model=llama3_8b", "prefetch=threshold"]
CONVERSATION = [
    "trace=mooncake", "trace.limit=300", "trace.rate=0.25", "tiers.gpu.capacity=64GiB", "tiers.cpu.capacity=24GiB",
    "tiers.disk.capacity=48GiB",
]  # fmt: skip
AGENTS = [
    "trace=synthetic", "trace.seed=89", "trace.sessions=18", "trace.sessions_per_s=0.32", "trace.arrivals=open_loop",
    "trace.limit=50", "trace.mix.chat.weight=0", "trace.mix.agent.weight=1", "trace.mix.agent.turns=8",
    "trace.mix.agent.message_tokens=2000", "trace.mix.agent.answer_tokens=24", "trace.mix.agent.pause_s=6",
    "trace.mix.document.weight=0.1", "trace.mix.document.document_tokens=6000", "trace.mix.document.message_tokens=40",
    "trace.mix.document.answer_tokens=16", "trace.mix.document.pause_s=10", "prefetch.stop=wait_complete",
    "tiers.gpu.capacity=6GiB", "tiers.cpu.capacity=8GiB", "tiers.disk.capacity=40GiB",
]  # fmt: skip
PARTS = ("drawn", "ranking", "chosen")


def chosen(conversation: str) -> dict[str, list[str]]:
    """Overrides of the chosen configurations, by name."""
    runs = {
        f"agents {placement} {eviction}": [*AGENTS, *SHAPES, f"placement={placement}", f"eviction={eviction}"]
        for placement in PLACEMENTS
        for eviction in ("lru", "arc")
    }
    path = f"trace.path={conversation}"
    return runs | {"conversation write_through lru": [*CONVERSATION, path, *SHAPES, "placement=write_through"]}


def ranking(drawn: list[Drawn]) -> dict[str, list[str]]:
    """Overrides of the configurations to rank: the first drawn one with a disk, with each pair of policies."""
    first = next((one for one in drawn if any(word.startswith("tiers.disk") for word in one.overrides)), None)
    if first is None:
        return {}
    others = [word for word in first.overrides if not word.startswith("placement=")]
    return {
        f"{placement} {order}": [*others, f"placement={placement}", f"scheduling={order}"]
        for placement in PLACEMENTS
        for order in ORDERS
    }


def read_drawn(options: argparse.Namespace) -> list[Drawn]:
    """Return what was drawn before into the folder, or draw it. Raises SystemExit if neither is possible."""
    path, rule = options.folder / "drawn.json", {"seed": options.seed, "count": options.count, "seconds": options.seconds}
    if path.exists():
        known = json.loads(path.read_text())
        if known["rule"] != rule:
            sys.exit(f"{path} was drawn with {known['rule']}, not {rule}: choose another --folder")
        return [Drawn(**one) for one in known["drawn"]]
    traces = {"conversation": options.conversation, "agents": options.agents}
    if missing := [name for name, file in traces.items() if file is None or not file.exists()]:
        sys.exit(f"--{missing[0]}: set it to the file of that trace, from which {COUNT} configurations are drawn")
    drawn = []
    for one in draw(options.seed, options.count, traces, options.seconds, options.folder / "traces"):
        print(f"{one.name}: {one.requests} requests, {one.trace}, {one.refused} draws refused before", flush=True)
        drawn.append(one)
    path.write_text(json.dumps({"rule": rule, "drawn": [asdict(one) for one in drawn]}, indent=1) + "\n")
    return drawn


def wanted(options: argparse.Namespace) -> dict[str, dict[str, list[str]]]:
    """Overrides by part and configuration."""
    drawn = read_drawn(options)
    lists = {
        "drawn": {one.name: one.overrides for one in drawn},
        "ranking": ranking(drawn),
        "chosen": chosen(str(options.conversation)),
    }
    return {part: lists[part] for part in options.parts}


def texts(options: argparse.Namespace) -> dict[str, str]:
    """What the page says of each part."""
    return {
        "drawn": f"Drawn with seed {options.seed} by the rule in validation_draw.py, for runs of about {options.seconds:g} s.",
        "ranking": "The first drawn configuration with a disk, with two write policies and two orders of the queue.",
        "chosen": "Chosen by hand: runs in which all tiers are hit, and a long conversation.",
    }


def serve(options: argparse.Namespace, lists: dict[str, dict[str, list[str]]]) -> bool:
    """Validate what has not been validated yet, or with ``again`` what has been recorded. Return False if one cannot run."""
    began = monotonic()
    for part, configurations in lists.items():
        for name, overrides in configurations.items():
            folder = options.folder / part / name.replace(" ", "_")
            recorded = folder / "hardware"
            if (not recorded.exists()) if options.again else (folder / "validate.json").exists():
                continue
            left = options.most_seconds - (monotonic() - began)
            if not options.again and left < options.runs * (options.seconds + SET_UP_S):
                print(f"{left:.0f} s are left: run this again for {part}, {name} and what follows")
                return True
            source = [f"validate.measured={recorded}"] if options.again else [f"validate.runs={options.runs}"]
            words = ["validate", *overrides, f"hardware={options.hardware}", *options.more, *source, f"output={folder}"]
            if kvsim(words) == 2:
                return False
    return True


def read(options: argparse.Namespace, lists: dict[str, dict[str, list[str]]]) -> list[Part]:
    """Return the parts with the records that are there."""
    parts = []
    for part, configurations in lists.items():
        files = {name: options.folder / part / name.replace(" ", "_") / "validate.json" for name in configurations}
        records: dict[str, Any] = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        parts.append(Part(name=part, text=texts(options)[part], wanted=configurations, records=records))
    return parts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path, help="the Mooncake conversation trace")
    parser.add_argument("--agents", type=Path, help="WEKA's agent sessions")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2], help="lists to serve; default: drawn ranking")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--count", type=int, default=COUNT, help="number of drawn configurations")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of a drawn run")
    parser.add_argument("--runs", type=int, default=3, help="real runs of each configuration, at least 2")
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="begin nothing that would last longer")
    parser.add_argument("--hardware", default="h200_measured", help="the machine's description")
    parser.add_argument("--folder", type=Path, default=Path("outputs") / "validation", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the tables")
    parser.add_argument("--draw-only", action="store_true", help="end after the draw")
    parser.add_argument("--again", action="store_true", help="simulate recorded runs again, without a GPU")
    parser.add_argument("--read", action="store_true", help="only write the tables")
    parser.add_argument("--more", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args(arguments)
    if options.runs < 2:
        parser.error("--runs: a spread needs 2 or more")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Draw, serve and write the tables, as far as that is wanted. Return the exit code."""
    options = parse(arguments)
    lists = wanted(options)
    if options.draw_only:
        return 0
    if not options.read and not serve(options, lists):
        return 2
    parts = read(options, lists)
    if not any(part.records for part in parts):
        sys.exit(f"--read: no runs in {options.folder}")
    options.output.mkdir(parents=True, exist_ok=True)
    made_by = f"python experiments/hardware/validation.py --parts {' '.join(options.parts)} --seed {options.seed}"
    write_csv(options.output / "validation_drawn.csv", parts)
    image = write_picture(options.output / "validation_drawn.html", parts)
    findings = options.output / "validation_drawn_findings.md"
    lines = [*page(parts, made_by, image), *(["", findings.read_text().rstrip()] if findings.exists() else [])]
    (options.output / "validation_drawn.md").write_text("\n".join(lines) + "\n")
    return 0 if all(claim.holds for claim in claims(parts)) else 1


if __name__ == "__main__":
    sys.exit(main())
