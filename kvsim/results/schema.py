"""What the JSON files of runs contain: the types of their fields, against which a file is checked when it is read.

Only what readers rely on is listed; ``docs/reference/results.md`` says what the fields mean. Numbers are finite, counts fit into
64 bits, and rates lie between 0 and 1.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

MOST = 1e18
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=0, le=MOST)]
"""A time, a rate per second or any other number that is never negative."""
Finite = Annotated[float, Meta(ge=-MOST, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(pattern=r"\A[\w.,: /()@+=-]{0,200}\Z")]
Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
BoundFile = Annotated[str, Meta(pattern=r"\A[a-z]+-[0-9a-f]{16}\Z")]


class Tokens(TypedDict):
    gpu: Count
    cpu: Count
    disk: Count


class Spread(TypedDict):
    mean: Number | None
    p50: Number | None
    p90: Number | None
    p99: Number | None


Rates = dict[str, list[Number | None]]


class Bound(TypedDict):
    """A file of a sweep's folder ``bounds``."""

    hit_rate: Share | None
    page_hit_rate: Share | None
    hit_tokens: Tokens
    prompt_tokens: Count
    rejected: Count


class Failure(TypedDict):
    """``error.json``."""

    error: str
    is_crash: bool
    overrides: list[str]
    traceback: NotRequired[list[str]]


class Objective(TypedDict):
    """What a sweep optimizes."""

    name: str
    direction: Literal["minimize", "maximize"]


class SweepFile(TypedDict):
    """``sweep.json``."""

    command: str
    command_line: str
    swept: list[str]
    objectives: NotRequired[list[Objective]]


class Link(TypedDict):
    """What a link has carried."""

    bytes: Count
    transfers: Count
    busy_s: Number
    utilization: Number | None


class Tier(TypedDict):
    """The counters of a tier."""

    capacity_pages: Count | None
    peak_pages: Count
    evicted_pages: Count
    inserted_pages: Count


class Phases(TypedDict):
    """The parts of the time to first token."""

    queue: Spread
    load: Spread
    prefill: Spread


class Throughput(TypedDict):
    """What was finished per second."""

    offered_requests_per_s: Number | None
    requests_per_s: Number | None
    prompt_tokens_per_s: Number | None
    output_tokens_per_s: Number | None


SloClass = TypedDict(
    "SloClass",
    {
        "by": str,
        "class": str,
        "requests": Count,
        "attainment": Share | None,
        "ttft_s_p99": Number | None,
        "tpot_s_p99": Number | None,
    },
)


class Slo(TypedDict):
    """The objectives, and how far they were met."""

    ttft_s: Number | None
    tpot_s: Number | None
    attainment: Share | None
    goodput_requests_per_s: Number | None
    classes: list[SloClass]


class Queue(TypedDict):
    """Requests waiting at an engine."""

    mean: Number | None
    most: Count


class Engine(TypedDict):
    """One engine of several."""

    engine: Count
    host: Count
    role: Literal["both", "prefill", "decode"]
    requests: Count
    decoded: NotRequired[Count]
    prompt_tokens: Count
    hit_tokens: Tokens
    hit_rate: Share | None
    capacity_pages: Count | None
    peak_pages: Count
    evicted_pages: Count
    inserted_pages: Count
    busy_share: Number | None
    queue: Queue
    retractions: Count
    failures: Count
    down_s: Number
    ttft_s: Spread
    tpot_s: Spread
    links: dict[str, Link]


class HitSeries(TypedDict):
    """Hit rates over the run."""

    axis: Literal["request", "arrival_s"]
    edges: list[Number]
    counted_from: Number | None
    prompt_tokens: list[Count]
    hit_rate: dict[str, list[Number]]
    known_rate: NotRequired[list[Number]]


class LinkSeries(TypedDict):
    """Use of links over the run."""

    edges_s: list[Number]
    utilization: Rates


class LoadSeries(TypedDict):
    """Requests at engines over the run."""

    edges_s: list[Number]
    requests: dict[str, list[Finite | None]]


class EngineHits(TypedDict):
    """Hit rates of engines over the run."""

    edges_s: list[Number]
    prompt_tokens: dict[str, list[Count]]
    hit_rate: Rates


class EngineSeries(TypedDict):
    """What engines did over the run."""

    load: LoadSeries
    hits: EngineHits


class FreePages(TypedDict):
    """Free pages over the run."""

    edges_s: list[Number]
    mean: dict[str, list[Finite]]


class Timeline(TypedDict):
    """What the pictures show."""

    hits: HitSeries
    links: LinkSeries
    engines: NotRequired[EngineSeries]
    free_pages: NotRequired[FreePages]


class GpuMemory(TypedDict):
    """How the memory of an engine's GPUs is divided."""

    gpus: Count
    memory_bytes: Count
    gpu_memory_utilization: Share
    kv_bytes: Count
    weights_bytes: Count
    workspace_bytes: Count
    states_bytes: Count


class StepSum(TypedDict):
    """Steps of one kind and size of a run on hardware."""

    kind: Literal["prefill", "both", "decode"]
    least: Count
    leaps: Count
    steps: Count
    measured_s: Number
    expected_s: Number


class Hardware(TypedDict):
    """What a run on hardware found."""

    device: str
    verified_pages: Count
    wrong_words: Count
    disk_faults: dict[str, Count]
    steps: NotRequired[list[StepSum]]


class Result(TypedDict):
    """``result.json``."""

    schema: int
    config_hash: NotRequired[Hash]
    command: Literal["replay", "simulate"]
    command_line: NotRequired[str]
    status: Literal["complete"]
    config: dict[str, Any]
    choices: dict[str, str]
    versions: dict[str, str]
    seed: Seed
    bounds: NotRequired[dict[Literal["belady", "unlimited"], BoundFile]]
    warnings: NotRequired[list[str]]
    page_bytes: NotRequired[Count]
    rules_note: NotRequired[str]
    trace_note: NotRequired[str]
    model_note: NotRequired[str]
    gpu_memory: NotRequired[GpuMemory]
    requests: Count
    warmup_requests: Count
    rejected: Count
    prompt_tokens: Count
    prompt_pages: Count
    hit_tokens: Tokens
    hit_pages: Tokens
    hit_rate: Share | None
    page_hit_rate: Share | None
    hit_requests: NotRequired[Count]
    request_hit_rate: NotRequired[Share | None]
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    phases_s: NotRequired[Phases]
    throughput: Throughput
    slo: NotRequired[Slo | None]
    links: dict[str, Link]
    tiers: dict[Literal["gpu", "cpu", "disk"], Tier]
    prefetch: dict[str, Count]
    placement: dict[str, Count]
    checkpoints: dict[str, Count]
    retractions: Count | None
    lost_to_disagreement: NotRequired[dict[str, Count]]
    imbalance: NotRequired[dict[str, dict[Literal["busy", "computed_tokens", "output_tokens"], Number | None]]]
    engines: NotRequired[list[Engine]]
    simulated_s: Number
    hardware: NotRequired[Hardware]
    load_s: Number
    wall_s: Number
    requests_per_s: Number | None
    timeline: Timeline
    ttft_quantiles_s: list[Number]


class Probed(TypedDict):
    """A run of a search for the highest rate."""

    rate: Number
    requests_per_s: Number
    attainment: Share
    goodput_requests_per_s: Number | None
    ttft_s_p99: Number | None
    tpot_s_p99: Number | None
    hit_rate: Share | None
    rejected: Count
    folder: str


class Wanted(TypedDict):
    """What a search for the highest rate is held against."""

    ttft_s: Number | None
    tpot_s: Number | None
    attainment: Share


class Saturation(TypedDict):
    """``saturate.json``."""

    schema: int
    command: Literal["saturate"]
    command_line: str
    config: dict[str, Any]
    choices: dict[str, str]
    versions: dict[str, str]
    seed: Seed
    slo: Wanted
    rate: Number | None
    fails_at: Number | None
    highest: Probed | None
    wanted_rate: Number | None
    holds_wanted_rate: bool | None
    gpus: Count
    capacity_bytes: dict[str, Count | None]
    price_per_hour: Number | None
    notes: list[str]
    runs: list[Probed]
