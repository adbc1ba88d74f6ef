"""The clusters that the study plays: engines, hosts, loads and routers."""

from argparse import Namespace
from dataclasses import dataclass
from functools import cache

import kvsim
from kvsim.report.study import capacities, with_conversations
from kvsim.trace.base import Trace

CHATS, AGENTS = "conversation", "agents (WEKA)"
ENGINES = (2, 4, 8, 16, 32)
ENGINES_PER_HOST = 4
LOADS = {CHATS: (0.2, 0.35, 0.5, 0.65), AGENTS: (4, 8, 12, 16)}
"""By trace, the load per engine: factor of the recorded rate, concurrent sessions."""
USUAL = {CHATS: 0.35, AGENTS: 12}
"""The load with which all numbers of engines are played."""
LOADED_ENGINES = 8
"""The number of engines that is played with all loads."""
MACHINES = {
    CHATS: ("hardware.gpus=1", *capacities(gpu=80)),
    AGENTS: ("hardware.gpus=2", "hardware.allreduce_bytes_per_s=null", *capacities(gpu=200)),
}
CPU_GIB = {CHATS: 128, AGENTS: 256}
"""CPU memory per engine of a host."""
PLAIN = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "prefix_aware", "kv_aware")
STALENESS_S = (1, 10)
STALEST = f"kv_aware, {STALENESS_S[-1]} s"
WEIGHTED = "kv_aware, weight 8"
ROUTERS = {
    **{name: (f"routing={name}",) for name in PLAIN},
    **{f"kv_aware, {age} s": ("routing=kv_aware", f"routing.staleness_s={age}") for age in STALENESS_S},
    WEIGHTED: ("routing=kv_aware", "routing.overlap_score_weight=8"),
}


@dataclass(frozen=True)
class Place:
    """A trace, and the cluster and the load with which it is played."""

    trace: str
    engines: int
    load: float

    def __str__(self) -> str:
        return f"{self.trace}, {self.engines} engines, {self.load:g} per engine"


@dataclass(frozen=True)
class Cell:
    """One run."""

    place: Place
    router: str


@dataclass(frozen=True)
class Row:
    """Results of a run."""

    hit_rate: float
    mean_s: float
    p50_s: float
    p99_s: float
    imbalance: float
    """Prompt tokens computed by the engine with the most, over the mean."""
    busy_imbalance: float
    """Time in steps of the engine with the most, over the mean."""
    busy_share: float
    """Share of the run that an engine spends in steps; mean."""
    simulated_s: float


Rows = dict[Cell, Row]


def sizes(trace: str) -> list[Place]:
    """All numbers of engines, at the same load each."""
    return [Place(trace, engines, USUAL[trace]) for engines in ENGINES]


def loads(trace: str) -> list[Place]:
    """All loads, on the same engines."""
    return [Place(trace, LOADED_ENGINES, load) for load in LOADS[trace]]


def places() -> list[Place]:
    return list(dict.fromkeys(place for trace in (CHATS, AGENTS) for place in (*sizes(trace), *loads(trace))))


def cells() -> list[Cell]:
    return [Cell(place, router) for place in places() for router in ROUTERS]


@cache
def load_chats(path: str, limit: int, rate: float) -> Trace:
    return with_conversations(kvsim.load_trace("mooncake", path=path, page_tokens=512, limit=limit, rate=rate))


@cache
def load_agents(path: str, limit: int, sessions: int) -> Trace:
    closed_loop = {"arrivals": "closed_loop", "concurrent_sessions": sessions}
    return kvsim.load_trace("weka", path=path, page_tokens=64, limit=limit, **closed_loop)


def load(options: Namespace, place: Place) -> Trace:
    chats, agents = options.limit
    if place.trace == CHATS:
        return load_chats(options.conversation, chats, place.load * place.engines)
    return load_agents(options.weka, max(1, agents * place.engines // max(ENGINES)), round(place.load * place.engines))


def run(options: Namespace, cell: Cell) -> Row:
    place = cell.place
    on_host = min(ENGINES_PER_HOST, place.engines)
    cluster = (f"cluster.engines={place.engines}", f"cluster.engines_per_host={on_host}")
    memory = (*MACHINES[place.trace], *capacities(cpu=CPU_GIB[place.trace] * on_host))
    result = kvsim.simulate(load(options, place), *cluster, *memory, *ROUTERS[cell.router], "warmup=0.25")
    record, times = result.record, result.record["ttft_s"]
    uneven = record["imbalance"]["both"]
    return Row(
        result.hit_rate,
        times["mean"],
        times["p50"],
        times["p99"],
        uneven["computed_tokens"],
        uneven["busy"],
        sum(engine["busy_share"] for engine in record["engines"]) / place.engines,
        record["simulated_s"],
    )
