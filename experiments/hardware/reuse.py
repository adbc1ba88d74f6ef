"""Does every reused page hold the right data, whichever tiers it has passed through?

A hundred sessions of document questions and agents share tiers that hold only part of their KV: pages are written to pinned
memory and to disk and loaded back, while others take their slots. Each reused page is verified word by word on the GPU.

Claims, each a row of the table:

moves        at least 200,000 page movements in one run, at least 10,000 of them on each link
verified     every page that was hit
wrong words  none, and no disk faults

    python experiments/hardware/reuse.py [--output DIR] [OVERRIDE ...]      on a machine with a GPU: five minutes
    TRITON_INTERPRET=1 python experiments/hardware/reuse.py --tiny          a few hundred movements on the CPU

Writes reuse.md, and exits with 1 if a claim fails.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvsim.cli import main as kvsim

HERE = Path(__file__).resolve().parent
RUN = [
    "substrate=hardware", "hardware=h200_measured", "model=llama3_8b", "page_tokens=16", "trace=synthetic",
    "trace.seed=3", "trace.sessions=100", "trace.sessions_per_s=4", "trace.arrivals=closed_loop", "trace.spread=0.3",
    "trace.mix.chat.weight=0", "trace.mix.agent.weight=0.3", "trace.mix.agent.turns=8", "trace.mix.agent.pause_s=3",
    "trace.mix.agent.message_tokens=800", "trace.mix.agent.answer_tokens=8", "trace.mix.document.weight=1",
    "trace.mix.document.turns=12", "trace.mix.document.pause_s=1", "trace.mix.document.document_tokens=6000",
    "trace.mix.document.message_tokens=40", "trace.mix.document.answer_tokens=8", "placement=write_back", "eviction=lru",
    "prefetch=threshold", "prefetch.stop=wait_complete", "tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=8GiB",
    "tiers.disk.capacity=40GiB",
]  # fmt: skip
TINY = [
    "model=tiny", "trace.limit=28", "trace.sessions=8", "trace.sessions_per_s=20", "trace.mix.agent.weight=0",
    "trace.mix.document.turns=4", "trace.mix.document.system_tokens=16", "trace.mix.document.document_tokens=96",
    "trace.mix.document.answer_tokens=2", "trace.mix.document.pause_s=0.1", "prefetch.min_tokens=16",
    "prefetch.in_flight_fraction=1", "tiers.gpu.capacity=12pages", "tiers.cpu.capacity=12pages",
    "tiers.disk.capacity=200pages",
]  # fmt: skip
"""Replaces settings of RUN, for Triton's interpreter."""
MOVES, LINK_MOVES = 200_000, 10_000
TINY_MOVES, TINY_LINK_MOVES = 100, 3


def claims(result: dict[str, Any], least: int, link_least: int) -> list[tuple[str, str, str, bool]]:
    """(claim, measured, goal, holds)"""
    found, moves, hits = result["hardware"], result["hardware"]["page_moves"], sum(result["hit_pages"].values())
    total, fewest = sum(moves.values()), min(moves.get(link, 0) for link in ("gpu-cpu", "cpu-disk", "disk-cpu", "cpu-gpu"))
    faults = sum(found["disk_faults"].values())
    return [
        ("page movements", f"{total:,}", f">= {least:,}", total >= least),
        ("movements on the link with the fewest", f"{fewest:,}", f">= {link_least:,}", fewest >= link_least),
        (
            "pages verified",
            f"{found['verified_pages']:,}",
            f">= {hits:,}, all that were hit",
            found["verified_pages"] >= hits > 0,
        ),
        ("wrong words", f"{found['wrong_words']:,}", "0", found["wrong_words"] == 0),
        ("disk faults", f"{faults:,}", "0", faults == 0),
    ]


def page(result: dict[str, Any], rows: list[tuple[str, str, str, bool]]) -> str:
    """The text of reuse.md."""
    found, tiers = result["hardware"], result["tiers"]
    lines = [
        "# Reused pages", "",
        f"{found['device']}, {result['requests']:,} requests in {result['simulated_s']:.0f} s, pages of "
        f"{result['page_bytes'] / 2**20:.3g} MiB. Made by `python experiments/hardware/reuse.py`, which lists the settings.", "",
        "| tier | pages | pages hit, share of prompt pages |", "|---|---|---|",
    ]  # fmt: skip
    for name, tier in tiers.items():
        share = result["hit_pages"][name] / result["prompt_pages"]
        lines.append(f"| {name} | {tier['capacity_pages']:,} | {result['hit_pages'][name]:,}, {100 * share:.1f} % |")
    lines += ["", "| link | pages moved |", "|---|---|"]
    lines += [f"| {link} | {moved:,} |" for link, moved in found["page_moves"].items()]
    lines += ["", "| claim | measured | goal | |", "|---|---|---|---|"]
    lines += [f"| {claim} | {value} | {goal} | {'holds' if holds else '**fails**'} |" for claim, value, goal, holds in rows]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run and write the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small run, for the CPU")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR", help="folder for reuse.md")
    parser.add_argument("overrides", nargs="*", help="overrides of the run, as for kvsim simulate")
    chosen = parser.parse_args(arguments)
    changes = [*(TINY if chosen.tiny else []), *chosen.overrides]
    names = {change.split("=")[0] for change in changes}
    settings = [setting for setting in RUN if setting.split("=")[0] not in names]
    with tempfile.TemporaryDirectory() as folder:
        code = kvsim(["simulate", *settings, *changes, f"output={folder}/run"])
        if code == 2:
            return 2
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
    rows = claims(result, *((TINY_MOVES, TINY_LINK_MOVES) if chosen.tiny else (MOVES, LINK_MOVES)))
    text = page(result, rows)
    print(text)
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "reuse.md").write_text(text)
    return 0 if all(holds for *_, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
