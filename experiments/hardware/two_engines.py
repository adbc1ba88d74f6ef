"""Are two engines on two GPUs what the simulation says: one host tier for both under two routers, and prefill and decode apart?

Each configuration is served twice on the GPUs, a process each, and simulated once. A real run differs from the other one, so the
distance between the two is shown beside the simulation's distance from each.

Claims, each a row of the first table:

bytes       no word of a reused page is wrong
hits        the simulation agrees with a real run on at least as many requests' hits as the real runs with each other,
            less 5 points
times       p50 of the time to first token: simulated within 10 % of a real run, or as close as the real runs are to each other
CPU hits    requests hit pages in the CPU tier that both engines share
ranking     the mean time to first token orders the two routers in the same way in both real runs and in the simulation

    python experiments/hardware/two_engines.py --serve DIR    on a machine with two GPUs: 8 minutes
    python experiments/hardware/two_engines.py --read DIR     writes the tables of the runs in DIR
    TRITON_INTERPRET=1 python experiments/hardware/two_engines.py --tiny --serve DIR    on the CPU: minutes, for tests

Writes two_engines.md and two_engines.json, and exits with 1 if a claim fails.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvsim.plans.build import build_run
from kvsim.run.execute import execute
from kvsim.settings.configuration import compose

HERE = Path(__file__).resolve().parent
FULL = [
    "trace=synthetic", "trace.seed=31", "trace.sessions=40", "trace.sessions_per_s=1.8", "trace.arrivals=open_loop",
    "trace.limit=150", "trace.mix.chat.weight=0", "trace.mix.document.weight=0", "trace.mix.agent.weight=1",
    "trace.mix.agent.turns=5", "trace.mix.agent.message_tokens=2500", "trace.mix.agent.answer_tokens=32",
    "trace.mix.agent.pause_s=2", "page_tokens=16", "model=llama3_8b", "hardware=h200_measured", "placement=write_through",
    "tiers.gpu.capacity=3GiB", "tiers.cpu.capacity=12GiB",
]  # fmt: skip
TINY = [
    "trace=synthetic", "trace.seed=3", "trace.sessions=3", "trace.sessions_per_s=3", "trace.limit=6",
    "trace.arrivals=open_loop", "trace.mix.chat.weight=0", "trace.mix.document.weight=0", "trace.mix.agent.weight=1",
    "trace.mix.agent.turns=2", "trace.mix.agent.message_tokens=8", "trace.mix.agent.system_tokens=24",
    "trace.mix.agent.answer_tokens=4", "trace.mix.agent.pause_s=0.1", "page_tokens=4", "model=tiny", "model.layers=2",
    "hardware=h200", "placement=write_through", "tiers.gpu.capacity=4000pages", "tiers.cpu.capacity=8000pages",
    "engine.max_batch_tokens=64",
]  # fmt: skip
CONFIGURATIONS = {
    "round_robin": ["cluster.engines=2", "routing=round_robin"],
    "kv_aware": ["cluster.engines=2", "routing=kv_aware"],
    "prefill and decode apart": ["cluster.prefill=1", "cluster.decode=1"],
}
SIDES = ("simulated", "real 1", "real 2")
ROUTERS = ("round_robin", "kv_aware")


def serve(folder: Path, base: list[str]) -> None:
    """Run every configuration on the GPUs, twice, and in the simulation; write one file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in CONFIGURATIONS.items():
        for side in SIDES:
            substrate = "simulated" if side == "simulated" else "hardware"
            overrides = [*base, *words, f"substrate={substrate}", f"output={folder / 'run'}"]
            began = perf_counter()
            plan = build_run(compose(overrides), command="simulate", overrides=overrides)
            result = execute("simulate", plan)
            record, outcome = result.record, result.outcome
            run = {
                "configuration": name, "side": side, "hits": outcome.hit_pages.tolist(), "ttft_s": outcome.ttft_s.tolist(),
                "tpot_s": outcome.tpot_s.tolist(), "rejected": record["rejected"], "hit_tokens": record["hit_tokens"],
                "prompt_tokens": record["prompt_tokens"], "hardware": record.get("hardware"),
                "links": {link: use["bytes"] for link, use in record["links"].items()},
            }  # fmt: skip
            (folder / f"{name.replace(' ', '_')}.{side.replace(' ', '_')}.json").write_text(json.dumps(run))
            print(f"{name}, {side}: {perf_counter() - began:.0f} s, hits {record['hit_rate']:.4f}", record["ttft_s"], flush=True)
            print("   ", record.get("hardware"), flush=True)


def read(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the runs in a folder by configuration and side."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != "two_engines.json"]
    return {(run["configuration"], run["side"]): run for run in runs}


def same_hits(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the share of requests that hit the same pages in every tier."""
    return float(np.mean([a == b for a, b in zip(one["hits"], other["hits"], strict=True)]))


def quantile(run: dict[str, Any], name: str, percent: float) -> float:
    return float(np.nanpercentile(np.array(run[name], dtype=float), percent))


def apart(one: dict[str, Any], other: dict[str, Any], name: str, percent: float) -> float:
    """Return by how much the first run's quantile exceeds the second's, relative to that."""
    return quantile(one, name, percent) / quantile(other, name, percent) - 1


def median_error(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the median relative difference of a request's time to first token."""
    a, b = (np.array(run["ttft_s"], dtype=float) for run in (one, other))
    return float(np.nanmedian(np.abs(a / b - 1)))


def pairs(runs: dict[tuple[str, str], dict[str, Any]], name: str) -> list[tuple[str, float, float, float, float, float]]:
    """Return (pair, same hits, p50, p99, p99 of TPOT, median error) for each pair of runs of a configuration."""
    rows = []
    for one, other in ((SIDES[0], SIDES[1]), (SIDES[0], SIDES[2]), (SIDES[1], SIDES[2])):
        a, b = runs[name, one], runs[name, other]
        times = apart(a, b, "ttft_s", 50), apart(a, b, "ttft_s", 99), apart(a, b, "tpot_s", 99)
        rows.append((f"{one} : {other}", same_hits(a, b), *times, median_error(a, b)))
    return rows


def claims(runs: dict[tuple[str, str], dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """(claim, finding, whether it holds)"""
    found = []
    real = [run for (_, side), run in runs.items() if side != "simulated"]
    wrong = sum(run["hardware"]["wrong_words"] for run in real)
    verified = sum(run["hardware"]["verified_pages"] for run in real)
    found.append(("bytes", f"{wrong} wrong words in {verified:,} reused pages", wrong == 0 and verified > 0))
    for name in CONFIGURATIONS:
        first, second, spread = pairs(runs, name)
        hits = max(first[1], second[1])
        found.append((f"hits, {name}", f"{hits:.3f} the same; real runs {spread[1]:.3f}", hits >= spread[1] - 0.05))
        p50 = min(abs(first[2]), abs(second[2]))
        text = f"{100 * first[2]:+.1f} and {100 * second[2]:+.1f} %; real runs {100 * spread[2]:+.1f} % apart"
        found.append((f"times, {name}", text, p50 <= max(0.1, abs(spread[2]))))
    foreign = [run["hit_tokens"]["cpu"] for (name, side), run in runs.items() if name in ROUTERS and side != "simulated"]
    found.append(("CPU hits, real runs", f"at least {min(foreign):,} tokens", min(foreign) > 0))
    means = {side: [float(np.nanmean(np.array(runs[name, side]["ttft_s"], dtype=float))) for name in ROUTERS] for side in SIDES}
    orders = {tuple(np.argsort(values)) for values in means.values()}
    text = "; ".join(f"{side}: {values[0]:.3f} s, {values[1]:.3f} s" for side, values in means.items())
    found.append((f"ranking of {ROUTERS[0]}, {ROUTERS[1]}", text, len(orders) == 1))
    return found


def write(runs: dict[tuple[str, str], dict[str, Any]], folder: Path) -> bool:
    """Write both files; return whether all claims hold."""
    found = claims(runs)
    device = next(run["hardware"]["device"] for (_, side), run in runs.items() if side != "simulated")
    lines = [
        "# Two engines, simulated and on two GPUs", "",
        f"{device}, one process a GPU. Made by `python experiments/hardware/two_engines.py --serve DIR` and "
        "`--read DIR`; the file lists the settings.", "", "| claim | finding | |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {claim} | {text} | {'holds' if holds else '**fails**'} |" for claim, text, holds in found]
    for name in CONFIGURATIONS:
        lines += ["", f"## {name.capitalize()}", "", "| run | hits | TTFT p50 | TTFT p99 | TPOT p99 |", "|---|---|---|---|---|"]
        for side in SIDES:
            run = runs[name, side]
            rate = sum(run["hit_tokens"].values()) / run["prompt_tokens"]
            times = [quantile(run, "ttft_s", 50), quantile(run, "ttft_s", 99), quantile(run, "tpot_s", 99)]
            lines.append(f"| {side} | {100 * rate:.2f} % | " + " | ".join(f"{value:.4f} s" for value in times) + " |")
        head = "| pair | identical hits | TTFT p50 | TTFT p99 | TPOT p99 | median error of a request's TTFT |"
        lines += ["", head, "|---|---|---|---|---|---|"]
        for pair, same, *differences, error in pairs(runs, name):
            percents = " | ".join(f"{100 * value:+.1f} %" for value in differences)
            lines.append(f"| {pair} | {same:.3f} | {percents} | {100 * error:.1f} % |")
    (folder / "two_engines.md").write_text("\n".join(lines) + "\n")
    table = [{"claim": claim, "finding": text, "holds": holds} for claim, text, holds in found]
    (folder / "two_engines.json").write_text(json.dumps(table, indent=1) + "\n")
    return all(holds for _, _, holds in found)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=Path, help="run everything and write the runs to this folder")
    parser.add_argument("--read", type=Path, help="write the tables of the runs in this folder")
    parser.add_argument("--tiny", action="store_true", help="few tokens, for the CPU")
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, TINY if options.tiny else FULL)
    if options.read:
        return 0 if write(read(options.read), options.output) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
