"""How close is the simulation to a GPU, in view of how close the GPU is to itself?

Every configuration is served several times by the GPU, and simulated with the noise that kvsim calibrate measured; see kvsim
validate. Four lists of configurations:

drawn       twelve, drawn from a seed by a rule (validation_draw.py), so that none is chosen because it agrees; all are reported
ranking     one of them, which the rule names, with two write policies and two orders of the queue
chosen      agents with two write policies and two evictions, chosen by hand: all tiers are hit. Each takes 10 s (simulated). They
            are those of validation.md, five times as fast; its conversation takes seven minutes and is not repeated here
hybrid      one of the drawn ones, which the rule names, with a model of attention and recurrent layers

Claims, of every configuration of all lists but the ranking:

figures     identical hits, hit rates, bytes of links, and time to first token (p50, p99) are within the machine's spread or,
            where they are off, within the tolerances of kvsim validate
ranking     policies that differ by more than the spread of the real runs have the same order in the simulation
bytes       no word of a reused page or state is wrong

From nothing to the tables, on a machine with the GPU:

    kvsim calibrate name=h200_measured
    kvsim calibrate name=h200_measured_hybrid model=nemotron_h_8b
    python experiments/hardware/validation.py --draw-only --conversation FILE --agents FILE
    python experiments/hardware/validation.py --most-seconds 500        (again, until all is done)
    python experiments/hardware/validation.py --pack

The draw takes minutes and no GPU. What has been drawn or served is in ``--folder`` and is not repeated. The last command writes
the real runs to validation_recorded.tar.xz. With these, after the same draw, anywhere:

    tar xf experiments/hardware/validation_recorded.tar.xz -C outputs/validation
    python experiments/hardware/validation.py --again                   simulates the recorded runs anew
    python experiments/hardware/validation.py --read                    only writes the tables

Writes validation_drawn.md, .csv, .html and, where a Chromium is installed, .png; the page has validation_drawn_findings.md after
its claims, if there is such a file. Exits with 1 if a claim fails, with 2 if a configuration cannot be run.
"""

import argparse
import json
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from kvsim.cli import main as kvsim
from kvsim.files.writing import replacing

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from loaded_model import choice  # noqa: E402
from validation_draw import Drawn, draw, pick_for_hybrid, pick_to_rank, to_rank, with_hybrid_model  # noqa: E402
from validation_tables import Part, claims, page, write_csv, write_picture  # noqa: E402

COUNT = 12
SET_UP_S = 15
"""Seconds that a machine needs to prepare a run, roughly."""
SHAPES = ["page_tokens=16", "model=llama3_8b", "prefetch=threshold"]
AGENTS = [
    "trace=synthetic", "trace.seed=89", "trace.sessions=18", "trace.sessions_per_s=0.32", "trace.arrivals=open_loop",
    "trace.limit=50", "trace.rate=5", "trace.mix.chat.weight=0", "trace.mix.agent.weight=1", "trace.mix.agent.turns=8",
    "trace.mix.agent.message_tokens=2000", "trace.mix.agent.answer_tokens=24", "trace.mix.agent.pause_s=6",
    "trace.mix.document.weight=0.1", "trace.mix.document.document_tokens=6000", "trace.mix.document.message_tokens=40",
    "trace.mix.document.answer_tokens=16", "trace.mix.document.pause_s=10", "prefetch.stop=wait_complete",
    "tiers.gpu.capacity=6GiB", "tiers.cpu.capacity=8GiB", "tiers.disk.capacity=40GiB",
]  # fmt: skip
CHOSEN = {
    f"agents {placement} {eviction}": [*AGENTS, *SHAPES, f"placement={placement}", f"eviction={eviction}"]
    for placement in ("write_back", "write_through")
    for eviction in ("lru", "arc")
}
"""Overrides of the chosen configurations, by name."""
PARTS = ("drawn", "ranking", "chosen", "hybrid")
RECORDED = "validation_recorded.tar.xz"
PACKED = ("requests.csv.gz", "result.json")
"""The files of a real run that are recorded."""


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


def read_picked(options: argparse.Namespace, drawn: list[Drawn]) -> dict[str, Drawn | None]:
    """Return the draws that the ranking and the hybrid model are served with, picked before or now."""
    path = options.folder / "picked.json"
    if not path.exists():
        path.write_text(json.dumps({"ranking": pick_to_rank(drawn), "hybrid": pick_for_hybrid(drawn)}) + "\n")
    by_name = {one.name: one for one in drawn}
    return {part: by_name.get(name) for part, name in json.loads(path.read_text()).items()}


def wanted(options: argparse.Namespace) -> dict[str, dict[str, list[str]]]:
    """Overrides by part and configuration."""
    drawn = read_drawn(options)
    picked = read_picked(options, drawn)
    ranking, hybrid = picked["ranking"], picked["hybrid"]
    lists = {
        "drawn": {one.name: one.overrides for one in drawn},
        "ranking": to_rank(ranking.overrides) if ranking else {},
        "chosen": CHOSEN,
        "hybrid": {f"{hybrid.name} hybrid": with_hybrid_model(hybrid.overrides)} if hybrid else {},
    }
    return {part: lists[part] for part in options.parts}


def texts(options: argparse.Namespace) -> dict[str, str]:
    """What the page says of each part."""
    return {
        "drawn": f"Drawn with seed {options.seed} by the rule in validation_draw.py, for runs of about {options.seconds:g} s.",
        "ranking": "The drawn configuration with a disk in which two write policies and two orders of the queue are simulated to "
        "differ most.",
        "chosen": "Chosen by hand: agents whose prompts are hit in all tiers.",
        "hybrid": "The first drawn configuration with two tiers in which states of Nemotron-H 8B come back from the CPU.",
    }


def description_of(options: argparse.Namespace, part: str) -> str:
    """Return the name of the description with which a part is simulated."""
    name: str = options.hybrid_hardware if part == "hybrid" else options.hardware
    return name


def described(hardware: str) -> dict[str, Any]:
    """Return a machine's description as plain data."""
    values: dict[str, Any] = choice("hardware", hardware)
    return values


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
            hardware = f"hardware={description_of(options, part)}"
            words = ["validate", *overrides, hardware, *options.more, *source, f"output={folder}"]
            if kvsim(words) == 2:
                return False
    return True


def read(options: argparse.Namespace, lists: dict[str, dict[str, list[str]]]) -> list[Part]:
    """Return the parts with the records that are there, without those of which nothing has been served yet.

    Raises SystemExit if one was simulated with another description of the machine, or before the description changed.
    """
    parts = []
    for part, configurations in lists.items():
        files = {name: options.folder / part / name.replace(" ", "_") / "validate.json" for name in configurations}
        records: dict[str, Any] = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        hardware = description_of(options, part)
        for name, record in records.items():
            used = record["config"]["hardware"]
            if any(used.get(key) != value for key, value in described(hardware).items()) and not options.more:
                sys.exit(f"{files[name]} was not simulated with hardware={hardware} as it is now: simulate it with --again")
        parts.append(Part(name=part, text=texts(options)[part], wanted=configurations, records=records))
    return [part for part in parts if part.records]


def pack(folder: Path, path: Path) -> int:
    """Write the real runs in a folder to an archive, which depends on nothing but their content. Returns their number."""
    files = sorted(file for part in PARTS for name in PACKED for file in folder.glob(f"{part}/*/hardware/*/{name}"))
    if not files:
        sys.exit(f"--pack: no real runs in {folder}")
    with replacing(path) as packed, tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        for file in files:
            member = tarfile.TarInfo(str(file.relative_to(folder)))
            member.size = file.stat().st_size
            with file.open("rb") as content:
                archive.addfile(member, content)
    return len(files) // len(PACKED)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path, help="the Mooncake conversation trace")
    parser.add_argument("--agents", type=Path, help="WEKA's agent sessions")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="lists to serve; default: all")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--count", type=int, default=COUNT, help="number of drawn configurations")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of a drawn run")
    parser.add_argument("--runs", type=int, default=3, help="real runs of each configuration, at least 2")
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="begin nothing that would last longer")
    parser.add_argument("--hardware", default="h200_measured", help="the machine's description")
    parser.add_argument("--hybrid-hardware", default="h200_measured_hybrid", help="its description for the hybrid model")
    parser.add_argument("--folder", type=Path, default=Path("outputs") / "validation", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the tables")
    parser.add_argument("--draw-only", action="store_true", help="end after the draw")
    parser.add_argument("--again", action="store_true", help="simulate recorded runs again, without a GPU")
    parser.add_argument("--read", action="store_true", help="only write the tables")
    parser.add_argument("--pack", action="store_true", help="only write the real runs to validation_recorded.tar.xz")
    parser.add_argument("--more", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args(arguments)
    if options.runs < 2:
        parser.error("--runs: a spread needs 2 or more")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Draw, serve, pack and write the tables, as far as that is wanted. Return the exit code."""
    options = parse(arguments)
    if options.pack:
        print(f"{options.output / RECORDED}: {pack(options.folder, options.output / RECORDED)} runs")
        return 0
    lists = wanted(options)
    if options.draw_only:
        return 0
    if not options.read and not serve(options, lists):
        return 2
    parts = read(options, lists)
    if not parts:
        sys.exit(f"--read: no runs in {options.folder}")
    options.output.mkdir(parents=True, exist_ok=True)
    made_by = f"python experiments/hardware/validation.py --parts {' '.join(part.name for part in parts)} --seed {options.seed}"
    write_csv(options.output / "validation_drawn.csv", parts)
    image = write_picture(options.output / "validation_drawn.html", parts)
    findings = options.output / "validation_drawn_findings.md"
    lines = page(parts, made_by, image, findings.read_text().rstrip() if findings.exists() else "")
    (options.output / "validation_drawn.md").write_text("\n".join(lines) + "\n")
    return 0 if all(claim.holds for claim in claims(parts)) else 1


if __name__ == "__main__":
    sys.exit(main())
