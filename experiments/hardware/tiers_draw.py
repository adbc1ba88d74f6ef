"""Draws the configurations of tiers.py: a seed draws candidates, and simulations alone decide which are served.

Strata, each with its number of configurations and what a candidate must show when it is simulated:

disk        4  GPU, CPU, disk; more than 6 points of the hit rate from the disk
cpu         4  GPU, CPU, and in half of the candidates a disk; more than 12 points from the CPU
beside      1  ``tiers.disk.below=gpu``, beside a CPU tier; more than 6 points from the disk
hybrid      1  GPU and CPU with Nemotron-H 8B, whose states are saved at the ends of prompts and answers; more than 12 points
               from the CPU
coarse      1  ``preset=lightllm``: single tokens on the GPU, pages of 256 tokens on the CPU; more than 12 points from the CPU
overloaded  1  GPU, CPU, disk, and requests that arrive in a third of the time; half of them wait for 0.5 s and more, and more
               than 5 points come from each of the two lower tiers

A candidate draws, each evenly: the kinds of sessions of the synthetic trace (its seed, which kind prevails, by how much texts
are shortened), the number of requests, placement, eviction and, for a disk that prefetch can read, prefetch, and the tiers'
shares of the bytes that the requests use. The GPU has room for the largest request and a quarter more.

Every candidate is simulated on the H100 of the datasheet, without noise. Besides what its stratum asks, it must reject no
request and end in ``SECONDS``. The first that do are taken, in the order in which they are drawn: nothing measured decides.

    python experiments/hardware/tiers_draw.py              writes tiers_configurations.json
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvsim

HERE = Path(__file__).resolve().parent
FILE = HERE / "tiers_configurations.json"
SEED = 1
DISK_POINTS, CPU_POINTS = 6, 12
"""Points of the simulated hit rate that a stratum asks of a tier. Real runs may have a few less."""
MACHINE = "hardware=h100"
SECONDS = (5.0, 8.0)
"""Simulated duration of a run: at least, at most."""
ARRIVING_S, ARRIVING_OVERLOADED_S = 6.0, 2.0
"""Time over which the requests of a run arrive."""
COUNTS = (64, 96, 128, 192)
KINDS = ("chat", "agent", "document")
PREVAILING, OTHERS = 0.7, 0.15
SHORTER = (3, 4, 6)
SHORTER_ANSWERS = 8
TOKENS = {
    "chat": {"system_tokens": 600, "message_tokens": 5000, "answer_tokens": 343},
    "agent": {"system_tokens": 5000, "message_tokens": 500, "answer_tokens": 200},
    "document": {"system_tokens": 300, "document_tokens": 8000, "message_tokens": 80, "answer_tokens": 300},
}
"""Lengths of the sessions before they are shortened, as in conf/trace/synthetic.yaml."""
PLACEMENTS = ("write_back", "write_through", "write_through_selective")
EVICTIONS = ("lru", "slru", "lfu", "arc", "s3_fifo", "gdsf")
PREFETCHES = ("none", "threshold")
SHARES = {"gpu": (0.05, 0.1, 0.2), "cpu": (0.05, 0.1, 0.2, 0.4), "disk": (1.0,)}
MOST_MIB = {"gpu": 20 << 10, "cpu": 8 << 10, "disk": 16 << 10}
"""What a machine prepares for a run takes time, too."""
TOKEN_BYTES = 131_072
"""Keys and values of a token of Llama 3 8B."""
LLAMA, HYBRID = ("page_tokens=16", "model=llama3_8b"), ("page_tokens=16", "model=nemotron_h_8b", "checkpoint=last")
LIGHTLLM = ("preset=lightllm", "model=llama3_8b")

Shares = Mapping[str, float]
"""Points of the hit rate, by tier."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the simulation of a candidate shows."""

    hit_points: Shares
    queue_p50_s: float
    seconds: float
    rejected: int


@dataclass(frozen=True, kw_only=True)
class Stratum:
    """A kind of configurations. ``tiers`` are those below the GPU; each candidate has one of them."""

    name: str
    count: int
    tiers: tuple[tuple[str, ...], ...]
    accepts: Callable[[Facts], bool]
    model: tuple[str, ...] = LLAMA
    more: tuple[str, ...] = ()
    arriving_s: float = ARRIVING_S
    can_choose: bool = True
    """Whether policies are drawn; a preset has its own."""


THREE = (("cpu", "disk"),)


def from_tier(tier: str, points: float) -> Callable[[Facts], bool]:
    return lambda facts: facts.hit_points.get(tier, 0.0) > points


STRATA = (
    Stratum(name="disk", count=4, tiers=THREE, accepts=from_tier("disk", DISK_POINTS)),
    Stratum(name="cpu", count=4, tiers=(("cpu",), *THREE), accepts=from_tier("cpu", CPU_POINTS)),
    Stratum(name="beside", count=1, tiers=THREE, accepts=from_tier("disk", DISK_POINTS), more=("tiers.disk.below=gpu",)),
    Stratum(
        name="hybrid", count=1, tiers=(("cpu",),), accepts=from_tier("cpu", CPU_POINTS), model=HYBRID,
        more=("engine.max_running_requests=32",),
    ),
    Stratum(name="coarse", count=1, tiers=(("cpu",),), accepts=from_tier("cpu", CPU_POINTS), model=LIGHTLLM, can_choose=False),
    Stratum(
        name="overloaded", count=1, tiers=THREE, arriving_s=ARRIVING_OVERLOADED_S,
        accepts=lambda facts: facts.queue_p50_s >= 0.5 and min(facts.hit_points[tier] for tier in ("cpu", "disk")) > 5,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A configuration to serve."""

    name: str
    stratum: str
    overrides: list[str]
    """All but the machine's description and the output."""
    simulated_hit_points: dict[str, float]
    simulated_s: float
    candidates: int
    """Candidates of its stratum that were simulated for it, itself included."""


def draw(seed: int) -> Iterator[Drawn]:
    """Yield the configurations of all strata. Each stratum has a generator of its own."""
    for place, stratum in enumerate(STRATA):
        rng, tried = np.random.default_rng([seed, place]), 0
        for number in range(stratum.count):
            accepted = None
            while accepted is None:
                tried += 1
                accepted = tried_one(rng, stratum)
            overrides, facts = accepted
            name = stratum.name if stratum.count == 1 else f"{stratum.name}-{number + 1}"
            points = {tier: round(share, 2) for tier, share in facts.hit_points.items()}
            yield Drawn(
                name=name, stratum=stratum.name, overrides=overrides, simulated_hit_points=points,
                simulated_s=round(facts.seconds, 2), candidates=tried,
            )  # fmt: skip
            tried = 0


def tried_one(rng: np.random.Generator, stratum: Stratum) -> tuple[list[str], Facts] | None:
    """Draw a candidate and simulate it; None if it is not accepted."""
    overrides = candidate(rng, stratum)
    facts = simulated(overrides)
    is_fit = facts.rejected == 0 and SECONDS[0] <= facts.seconds <= SECONDS[1]
    return (overrides, facts) if is_fit and stratum.accepts(facts) else None


def candidate(rng: np.random.Generator, stratum: Stratum) -> list[str]:
    """Return the overrides of a candidate."""
    trace = drawn_trace(rng)
    below = stratum.tiers[rng.integers(len(stratum.tiers))]
    shares = {tier: float(rng.choice(SHARES[tier])) for tier in ("gpu", *below)}
    policies = drawn_policies(rng, below, stratum)
    requests = load(trace).requests
    rate = max(request.arrival_s for request in requests) / stratum.arriving_s
    used_tokens = 16 * max(start + pages for request in requests for start, pages in request.runs)
    largest_tokens = max(request.prompt_tokens + request.output_tokens for request in requests)
    mib = {tier: min(MOST_MIB[tier], int(share * used_tokens * TOKEN_BYTES) >> 20) for tier, share in shares.items()}
    mib["gpu"] = max(mib["gpu"], int(1.25 * largest_tokens * TOKEN_BYTES) >> 20)
    tiers = [f"tiers.{tier}.capacity={max(size, 64)}MiB" for tier, size in mib.items()]
    return [*stratum.model, *trace, f"trace.rate={rate:.4g}", *tiers, *stratum.more, *policies]


def drawn_trace(rng: np.random.Generator) -> list[str]:
    """Draw what is served; it arrives at the rate of the generator."""
    prevailing, shorter, count = str(rng.choice(KINDS)), int(rng.choice(SHORTER)), int(rng.choice(COUNTS))
    mix = [
        f"trace.mix.{kind}.{key}={tokens // (SHORTER_ANSWERS if key == 'answer_tokens' else shorter)}"
        for kind, lengths in TOKENS.items()
        for key, tokens in lengths.items()
    ]
    weights = [f"trace.mix.{kind}.weight={PREVAILING if kind == prevailing else OTHERS}" for kind in KINDS]
    seed = f"trace.seed={rng.integers(2**31)}"
    return ["trace=synthetic", "trace.arrivals=open_loop", "trace.sessions=400", seed, *weights, *mix, f"trace.limit={count}"]


def drawn_policies(rng: np.random.Generator, below: tuple[str, ...], stratum: Stratum) -> list[str]:
    """Draw the policies that have an effect."""
    placement, eviction, prefetch = (str(rng.choice(names)) for names in (PLACEMENTS, EVICTIONS, PREFETCHES))
    if not stratum.can_choose:
        return []
    reads_ahead = "disk" in below and "tiers.disk.below=gpu" not in stratum.more
    return [f"placement={placement}", f"eviction={eviction}", *([f"prefetch={prefetch}"] if reads_ahead else [])]


def load(words: list[str], page_tokens: int = 16) -> Any:
    """Load a trace that is given by overrides."""
    given = dict(word.split("=", 1) for word in words)
    settings = {key.removeprefix("trace."): value for key, value in given.items() if key.startswith("trace.")}
    return kvsim.load_trace(given["trace"], page_tokens=page_tokens, **settings)


def simulated(overrides: list[str]) -> Facts:
    """Simulate a candidate."""
    trace = load([word for word in overrides if word.startswith("trace")], 16 if "page_tokens=16" in overrides else 1)
    others = [word for word in overrides if not word.startswith(("trace", "page_tokens"))]
    record = kvsim.simulate(trace, *others, MACHINE).record
    return Facts(
        hit_points={tier: 100 * tokens / record["prompt_tokens"] for tier, tokens in record["hit_tokens"].items()},
        queue_p50_s=record["phases_s"]["queue"]["p50"],
        seconds=record["simulated_s"],
        rejected=record["rejected"],
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the draw")
    parser.add_argument("--output", type=Path, default=FILE, help="file of the configurations")
    options = parser.parse_args(arguments)
    drawn = []
    for one in draw(options.seed):
        shares = " ".join(f"{tier} {points:.1f}" for tier, points in one.simulated_hit_points.items())
        print(f"{one.name}: {shares} points, {one.simulated_s:.1f} s, {one.candidates} candidates", flush=True)
        drawn.append(asdict(one))
    options.output.write_text(json.dumps({"seed": options.seed, "drawn": drawn}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
