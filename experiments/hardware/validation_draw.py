"""Draws the configurations of validation.py: nobody chooses them, and nothing measured decides about them.

The rule, for each draw:

trace       one of three, evenly: generated sessions with a seed of their own; a stretch of the conversation trace, from a line
            drawn evenly; eight sessions of the agents' trace, drawn among those whose first prompt has at most 32,000 tokens.
            Prompts are a quarter as long as there, with the same reuse by page, and answers an eighth, so that more of them fit
            into the time
policies    placement, eviction and, above a disk, prefetch, each evenly
tiers       shares of the pages that the requests use, each evenly: GPU a tenth, a quarter or half; CPU none, a quarter or half;
            below a CPU tier a disk for all of them, or none. The GPU has room for the largest request and a quarter more. At
            most 40, 16 and 32 GiB: what a machine prepares for a run takes time, too
requests    the most of ``COUNTS`` with which a run is simulated to end in time on the H200 of the datasheet, without noise, if
            they arrive over 80 % of that time; or a half or three quarters of them, evenly, for less load

A draw is repeated if even the fewest requests take too long, or one does not fit.

Two further lists come from the draws, by simulations on that same machine:

ranking     of those with a disk, the one whose four pairs of policies differ most in p50 of time to first token: the largest
            over the least
hybrid      the first with a CPU tier and no disk that, with a hybrid model in place of Llama 3 8B, loads from the CPU tier.
            Trace, requests, their rate, policies and the tiers' bytes are those of the draw; states take pages of the tiers and
            are saved at the ends of prompts and answers
"""

import gzip
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import kvsim

MACHINE = ("page_tokens=16", "model=llama3_8b")
COUNTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
ARRIVING = 0.8
"""Share of the time of a run over which its requests arrive."""
LOADS = (0.5, 0.75, 1.0)
PLACEMENTS = ("write_back", "write_through", "write_through_selective")
EVICTIONS = ("lru", "slru", "lfu", "arc", "s3_fifo", "gdsf")
PREFETCHES = ("none", "threshold")
SHARES = {"gpu": (0.1, 0.25, 0.5), "cpu": (0.0, 0.25, 0.5), "disk": (0.0, 1.0)}
MOST_GIB = {"gpu": 40, "cpu": 16, "disk": 32}
PAGE_BYTES = 16 * 131_072
"""A page of 16 tokens of Llama 3 8B."""
ORDERS = ("fcfs", "shortest_prefill")
"""Orders of the queue, which change times by much; ranked with the first two placement policies."""
HYBRID = ("model=nemotron_h_8b", "checkpoint=last")
SMALLER_PAGES = 8
"""Pages of Nemotron-H 8B in the bytes of one of Llama 3 8B: 4 of its layers have keys and values, of 32 there."""
SHORTER, SHORTER_ANSWERS = 4, 8
MIX = {
    "chat": {"system_tokens": 600, "message_tokens": 5000, "answer_tokens": 343},
    "agent": {"system_tokens": 5000, "message_tokens": 500, "answer_tokens": 200},
    "document": {"system_tokens": 300, "document_tokens": 8000, "message_tokens": 80, "answer_tokens": 300},
}
"""Lengths of the generated sessions before they are shortened."""
AGENTS, LARGEST_FIRST_PROMPT = 8, 32_000


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A configuration."""

    name: str
    trace: str
    requests: int
    overrides: list[str]
    """All but the machine's description and the output."""
    refused: int
    """Draws before it that were repeated."""

    def has(self, tier: str) -> bool:
        return any(word.startswith(f"tiers.{tier}.") for word in self.overrides)


def draw(seed: int, count: int, traces: dict[str, Path], seconds: float, folder: Path) -> Iterator[Drawn]:
    """Yield ``count`` configurations whose runs take about ``seconds`` each.

    ``traces`` are the files of the conversation and of the agents; what is drawn from them is written to ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng, refused = np.random.default_rng(seed), 0
    makers = makers_of(traces, folder)
    for number in range(count):
        drawn = None
        while drawn is None:
            name = f"drawn-{number + 1:02d}"
            trace = str(rng.choice(list(makers)))
            choices, load = choices_of(rng), float(rng.choice(LOADS))
            drawn = sized(name, trace, makers[trace](rng, name), choices, load, seconds, refused)
            refused = 0 if drawn else refused + 1
        yield drawn


def choices_of(rng: np.random.Generator) -> dict[str, Any]:
    """Draw policies and the shares of the tiers."""
    shares = {tier: float(rng.choice(some)) for tier, some in SHARES.items()}
    if not shares["cpu"]:
        shares["disk"] = 0.0
    policies = {"placement": PLACEMENTS, "eviction": EVICTIONS, "prefetch": PREFETCHES}
    return {"shares": shares} | {family: str(rng.choice(names)) for family, names in policies.items()}


def sized(
    name: str, trace: str, settings: list[str], choices: dict[str, Any], load: float, seconds: float, refused: int
) -> Drawn | None:
    """Return the configuration with as many requests as the rule says; None if the fewest are too many."""
    fitting = bisect_left(COUNTS, True, key=lambda count: takes_longer(settings, choices, count, seconds))
    if not fitting:
        return None
    requests = max(COUNTS[0], int(load * COUNTS[fitting - 1]))
    overrides = overrides_of(settings, choices, requests, seconds)
    return overrides and Drawn(name=name, trace=trace, requests=requests, overrides=overrides, refused=refused)


def takes_longer(settings: list[str], choices: dict[str, Any], count: int, seconds: float) -> bool:
    """Whether so many requests do not fit, or take longer than ``seconds``; so then do more of them."""
    overrides = overrides_of(settings, choices, count, seconds)
    return overrides is None or simulated_s(overrides) > seconds


def overrides_of(settings: list[str], choices: dict[str, Any], count: int, seconds: float) -> list[str] | None:
    """Return the overrides of the first ``count`` requests of a trace; None if it has fewer, or one that does not fit."""
    limited = [*settings, f"trace.limit={count}"]
    requests = load(limited).requests
    used = max(start + pages for request in requests for start, pages in request.runs)
    largest = max(-(-(request.prompt_tokens + request.output_tokens) // 16) for request in requests)
    most = {tier: gib * 2**30 // PAGE_BYTES for tier, gib in MOST_GIB.items()}
    pages = {tier: min(most[tier], int(share * used)) for tier, share in choices["shares"].items()}
    pages["gpu"] = max(pages["gpu"], largest + largest // 4)
    if len(requests) < count or pages["gpu"] > most["gpu"]:
        return None
    span_s = max(request.arrival_s for request in requests)
    rate = f"trace.rate={max(span_s / (ARRIVING * seconds), 1e-3):.4g}"
    tiers = [f"tiers.{tier}.capacity={number}pages" for tier, number in pages.items() if number]
    families = ["eviction", *(["placement"] if pages["cpu"] else []), *(["prefetch"] if pages["disk"] else [])]
    return [*MACHINE, *limited, rate, *tiers, *(f"{family}={choices[family]}" for family in families)]


def simulated_s(overrides: list[str]) -> float:
    """Return the simulated duration."""
    return float(simulated(overrides)["simulated_s"])


def simulated(overrides: list[str]) -> Mapping[str, Any]:
    """Return the record of a simulation on the H200 of the datasheet, without noise."""
    of_trace = [word for word in overrides if word.startswith("trace")]
    others = [word for word in overrides if not word.startswith(("trace", "page_tokens"))]
    return kvsim.simulate(load(of_trace), *others, "hardware=h200").record


def load(words: list[str]) -> Any:
    """Load a trace that is given by overrides."""
    return loaded(tuple(words))


@lru_cache(maxsize=16)
def loaded(words: tuple[str, ...]) -> Any:
    given = dict(word.split("=", 1) for word in words)
    settings = {key.removeprefix("trace."): value for key, value in given.items() if key != "trace"}
    return kvsim.load_trace(given["trace"], page_tokens=16, **settings)


# What else is made of the draws


def to_rank(overrides: list[str]) -> dict[str, list[str]]:
    """Return a drawn configuration's overrides with each of the four pairs of policies, by their names."""
    others = [word for word in overrides if not word.startswith("placement=")]
    return {
        f"{placement} {order}": [*others, f"placement={placement}", f"scheduling={order}"]
        for placement in PLACEMENTS[:2]
        for order in ORDERS
    }


def with_hybrid_model(overrides: list[str]) -> list[str]:
    """Return a drawn configuration's overrides with the hybrid model and tiers of the same bytes."""
    pages = re.compile(r"(?<=capacity=)\d+(?=pages)")
    others = [word for word in overrides if not word.startswith("model=")]
    return [*(pages.sub(lambda found: str(SMALLER_PAGES * int(found[0])), word) for word in others), *HYBRID]


def pick_to_rank(drawn: Sequence[Drawn]) -> str | None:
    """Return the name of the draw to rank policies with; None if none has a disk."""

    def ratio(one: Drawn) -> float:
        medians = [simulated(overrides)["ttft_s"]["p50"] for overrides in to_rank(one.overrides).values()]
        return float(max(medians) / min(medians))

    with_disk = [one for one in drawn if one.has("disk")]
    return max(with_disk, key=ratio).name if with_disk else None


def pick_for_hybrid(drawn: Sequence[Drawn]) -> str | None:
    """Return the name of the draw to serve with the hybrid model; None if there is none."""
    fitting = (one for one in drawn if one.has("cpu") and not one.has("disk"))
    return next((one.name for one in fitting if "cpu-gpu" in simulated(with_hybrid_model(one.overrides))["links"]), None)


# Stretches of traces

Maker = Callable[[np.random.Generator, str], list[str]]
"""Draws what of a trace is served by the configuration of this name, and returns the overrides that say so."""


def makers_of(traces: dict[str, Path], folder: Path) -> dict[str, Maker]:
    """Return how each trace is drawn from."""

    def synthetic(rng: np.random.Generator, name: str) -> list[str]:
        lengths = [
            f"trace.mix.{kind}.{key}={tokens // (SHORTER_ANSWERS if key == 'answer_tokens' else SHORTER)}"
            for kind, settings in MIX.items()
            for key, tokens in settings.items()
        ]
        return [
            "trace=synthetic", "trace.arrivals=open_loop", "trace.sessions=400", f"trace.seed={rng.integers(2**31)}", *lengths,
        ]  # fmt: skip

    def conversation(rng: np.random.Generator, name: str) -> list[str]:
        path = folder / f"{name}.conversation.jsonl"
        with opened(traces["conversation"]) as lines:
            total = sum(1 for _ in lines)
        with opened(traces["conversation"]) as lines:
            first = int(rng.integers(max(1, total - COUNTS[-1])))
            path.write_text("".join(stretch(islice(lines, first, first + COUNTS[-1]))))
        return ["trace=mooncake", f"trace.path={path}", f"trace.block_tokens={512 // SHORTER}"]

    def agents(rng: np.random.Generator, name: str) -> list[str]:
        path = folder / f"{name}.agents.jsonl"
        with opened(traces["agents"]) as lines:
            fitting = [line for line in lines if first_prompt(line) <= LARGEST_FIRST_PROMPT]
        chosen = sorted(rng.choice(len(fitting), size=min(AGENTS, len(fitting)), replace=False).tolist())
        path.write_text("".join(shorter_session(fitting[place]) for place in chosen))
        return ["trace=weka", f"trace.path={path}", f"trace.block_tokens={64 // SHORTER}"]

    return {"synthetic": synthetic, "conversation": conversation, "agents": agents}


def opened(path: Path) -> TextIO:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def stretch(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines with times that begin with 0, and shorter requests. The last block of a prompt may be partial."""
    first = None
    for line in lines:
        record = json.loads(line)
        first = record["timestamp"] if first is None else first
        lengths = {
            "input_length": -(-record["input_length"] // SHORTER), "output_length": shorter_answer(record["output_length"])
        }  # fmt: skip
        yield json.dumps(record | lengths | {"timestamp": record["timestamp"] - first}) + "\n"


def shorter_session(line: str) -> str:
    """Return a session, with its sub-agents, of shorter requests. Only full blocks have ids."""

    def shorter(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            request
            | ({"in": request["in"] // SHORTER, "out": shorter_answer(request["out"])} if "in" in request else {})
            | ({"requests": shorter(request["requests"])} if "requests" in request else {})
            for request in requests
        ]

    session = json.loads(line)
    return json.dumps(session | {"requests": shorter(session["requests"]), "block_size": 64 // SHORTER}) + "\n"


def shorter_answer(tokens: int) -> int:
    return max(1, tokens // SHORTER_ANSWERS)


def first_prompt(line: str) -> int:
    """Return the length of the first prompt of an agent's session."""
    return next((int(request["in"]) for request in json.loads(line)["requests"] if "in" in request), LARGEST_FIRST_PROMPT + 1)
