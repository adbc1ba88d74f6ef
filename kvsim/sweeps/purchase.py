"""Which configuration to buy: candidates by price, and the search for the cheapest one that meets its objectives.

A candidate is skipped only where the answer is certain. It costs more than is looked for; or a cheaper one has rejected too many
requests because they never fit into a GPU tier that is as large as its own, with the same rules: however many engines, host
memory and drives there are, these requests are served by one engine's GPUs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

from kvsim.plans.capacity import bytes_of
from kvsim.plans.plan import Plan
from kvsim.results.diagnosis import NONE
from kvsim.results.result import RunRecord
from kvsim.settings import catalog
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.planning import Planned, Way, planned
from kvsim.sweeps.prices import DEGREES, NO_DRIVE, Prices, overrides

HOLDS, FAILS, REFUSED, SKIPPED, DEARER = "holds", "fails", "cannot run", "fails for certain", "dearer"
"""How a candidate ends; those of ``SKIPPED`` and ``DEARER`` have not been run."""
BUSY = 0.5
SIZES = ("hardware", "cluster", "tiers")
"""Parts of a configuration that are of no matter to whether a request fits, if the GPU tier is as large."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that can be bought."""

    gpu: str
    engines: int
    gpus: int
    """Of each engine."""
    stages: int = 1
    """Of its pipeline."""
    expert_groups: int = 1
    """Groups of its GPUs with experts of their own."""
    cpu_bytes: int
    """KV in the CPU memory of each host, each copy counted once."""
    cpu_copies: int = 1
    """How many copies of it are there."""
    drive: str
    disk_bytes: int
    """Of each host."""
    policy: str
    lines: tuple[str, ...]
    """All overrides, those of the command line first."""
    hosts: int = 1
    drives: int = 0
    price: float = 0.0
    problem: str = ""
    """Why it cannot be built."""

    @property
    def host_bytes(self) -> int:
        """CPU memory for KV of each host."""
        return self.cpu_bytes * self.cpu_copies

    @property
    def memory_bytes(self) -> int:
        """What a host has below its GPUs."""
        return self.host_bytes + self.disk_bytes

    @property
    def order(self) -> tuple[float, ...]:
        """Cheaper ones come first, then those with less."""
        return self.price, self.engines * self.gpus, self.memory_bytes


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a candidate ended."""

    candidate: Candidate
    outcome: str
    reason: str = ""
    """Why it does not hold."""
    result: RunRecord | None = None
    """The result of its run."""
    folder: str = ""
    plan: Plan | None = None

    @property
    def attainment(self) -> float:
        """Share of the requests that meet the objectives."""
        return 0.0 if self.result is None else self.result["slo"]["attainment"] or 0.0


def candidates(prices: Prices, given: Sequence[str], compositions: Compositions) -> list[Candidate]:
    """Return all combinations of the choices, with the overrides of the command line, cheapest first. Raises UsageError."""
    chosen, found = prices.choices, list[Candidate]()
    for drive, policy in product(chosen.drives, chosen.policies):
        lines = (*given, *overrides(policy), *prices.drives[drive].lines)
        config = compositions.compose(lines).config
        degrees = list(product(chosen.pipeline_parallel, chosen.expert_parallel))
        sizes = product(prices.listed.gpus, chosen.engines, chosen.gpus_per_engine, degrees, chosen.cpu)
        for gpu, engines, gpus, (stages, groups), cpu in sizes:
            per_host = config.cluster.engines_per_host or prices.engines_per_host(engines, gpus) or engines
            one = Candidate(
                gpu=gpu,
                engines=engines,
                gpus=gpus,
                stages=stages,
                expert_groups=groups,
                cpu_bytes=bytes_of(cpu),
                drive=drive,
                disk_bytes=prices.drives[drive].n_bytes,
                policy=policy,
                lines=(*lines, *_hardware(gpu, engines, gpus, cpu, per_host, lines), *_degrees(stages, groups)),
            )
            hosts = -(-engines // per_host)
            drives = 0 if drive == NO_DRIVE else 1 if config.tiers.disk.scope == "cluster" else hosts
            one = replace(one, problem=_problem(prices, min(per_host, engines), gpus), hosts=hosts, drives=drives)
            found.append(replace(one, price=_price(prices, one)))
    return sorted(found, key=lambda one: one.order)


def _hardware(gpu: str, engines: int, gpus: int, cpu: Any, per_host: int, before: Sequence[str]) -> list[str]:
    """Return the overrides for hardware. Engines that are processes of their own have each their part of a host's memory."""
    keys = {line.partition("=")[0] for line in before}
    lines = [f"hardware={gpu}", f"hardware.gpus={gpus}", f"cluster.engines={engines}", f"tiers.cpu.capacity={cpu}"]
    lines += ["tiers.gpu.capacity=auto"] if "tiers.gpu.capacity" not in keys else []
    lines += ["tiers.cpu.scope=engine"] if engines > 1 and bytes_of(cpu) and "tiers.cpu.scope" not in keys else []
    lines += [f"cluster.engines_per_host={per_host}"] if per_host < engines and "cluster.engines_per_host" not in keys else []
    is_measured = any(setting.key.startswith("hardware.disk_curves") for setting in catalog.settings_of("hardware", gpu))
    has_rates = any(key.startswith("hardware.disk_") and key.endswith("bytes_per_s") for key in keys)
    return [*lines, *(["hardware.disk_curves=null"] if is_measured and has_rates else [])]


def _degrees(*degrees: int) -> list[str]:
    """Return the overrides for how an engine's GPUs share the model, besides tensor parallelism."""
    return [f"{key}={degree}" for key, degree in zip(DEGREES, degrees, strict=True) if degree > 1]


def _problem(prices: Prices, per_host: int, gpus: int) -> str:
    """Say why so many engines, as the command line or a policy sets, do not fit on a host; empty if they do."""
    most = prices.listed.gpus_per_host
    if most is None or per_host * gpus <= most:
        return ""
    needed = per_host * gpus
    return f"cluster.engines_per_host: {per_host} engines of {gpus} GPUs need {needed} on a host, and gpus_per_host is {most}"


def _price(prices: Prices, one: Candidate) -> float:
    return prices.price(one.gpu, one.engines * one.gpus, one.host_bytes * one.hosts, one.drive, one.drives)


def priced(found: Planned[Candidate], prices: Prices, copies: Callable[[Candidate], int]) -> Planned[Candidate]:
    """Return candidates in order of price, with CPU memory for as many copies of KV as ``copies`` says of those that can run."""
    jobs = []
    for at, one in enumerate(found.jobs):
        if one.cpu_bytes and at not in found.refused:
            one = replace(one, cpu_copies=copies(one))
        jobs.append(replace(one, price=_price(prices, one)))
    places = sorted(range(len(jobs)), key=lambda at: jobs[at].order)
    refused = {new: found.refused[at] for new, at in enumerate(places) if at in found.refused}
    return replace(found, jobs=[jobs[at] for at in places], refused=refused)


def checked(found: Sequence[Candidate], plan: Callable[[Candidate], Plan]) -> Planned[Candidate]:
    """Return the candidates without settings that have no effect on them, and each set of overrides once, the cheapest.

    Raises NoEffect for a setting that has no effect on any.
    """
    way = Way[Candidate](
        lines=lambda one: list(one.lines),
        without=lambda one, lines: replace(one, lines=tuple(line for line in one.lines if line not in lines)),
        plan=plan,
    )
    return planned(found, way)


def search(
    found: Sequence[Candidate],
    plan: Callable[[Candidate], Plan],
    attempt: Callable[[int, Candidate, Plan], Ended],
    *,
    refused: dict[int, Exception],
    attainment: float,
    beyond: float | None,
    is_certain: bool,
) -> list[Ended]:
    """Try candidates, which are in order of price, until they cost ``beyond`` more than the first one that holds.

    ``refused`` says why some cannot run. ``is_certain``: a request that was rejected would have been, too, if it had come alone.
    Returns how each one ended.
    """
    ended, most = list[Ended](), inf
    for number, one in enumerate(found):
        if one.price > most:
            ended.append(Ended(candidate=one, outcome=DEARER))
        elif number in refused:
            ended.append(Ended(candidate=one, outcome=REFUSED, reason=" ".join(str(refused[number]).split())))
        else:
            ended.append(_tried(number, one, plan(one), attempt, ended if is_certain else (), attainment))
        if ended[-1].outcome == HOLDS and most == inf and beyond is not None:
            most = one.price * (1 + beyond)
    return ended


def _tried(
    number: int,
    one: Candidate,
    plan: Plan,
    attempt: Callable[[int, Candidate, Plan], Ended],
    before: Sequence[Ended],
    attainment: float,
) -> Ended:
    """Return how a candidate ended, from one before it if that is certain."""
    for at, other in enumerate(before):
        if other.plan is not None and rejects_too_many(other, attainment) and fits_no_more(plan, other.plan):
            return Ended(
                candidate=one, outcome=SKIPPED, reason=f"{_rejected(other)}, as for number {at}: the GPU tier is no larger"
            )
    return attempt(number, one, plan)


def rejects_too_many(ended: Ended, attainment: float) -> bool:
    """Whether so many requests of a run were rejected, because they never fit, that no others could make up for them."""
    result = ended.result
    return result is not None and result["rejected"] > (1 - attainment) * result["requests"]


def fits_no_more(plan: Plan, other: Plan) -> bool:
    """Whether no request fits into a plan's GPU tier that does not fit into another one's."""
    mine, its = plan.tiers[0].capacity_pages, other.tiers[0].capacity_pages
    alike = [{name: value for name, value in one.config.items() if name not in SIZES} for one in (plan, other)]
    return mine is not None and its is not None and mine <= its and alike[0] == alike[1] and plan.states is other.states is None


def _rejected(ended: Ended) -> str:
    assert ended.result is not None
    return f"{ended.result['rejected']:,} requests never fit into the GPU tier"


def why(ended: Ended, attainment: float, alone: Callable[[], Sequence[str]]) -> str:
    """Return why a run does not hold: what held requests up, and what was rejected, which comes first if it is reason enough.

    If nothing was busy for ``BUSY`` of the run, what requests take ``alone`` comes before what held them up.
    """
    assert ended.result is not None
    diagnosis = ended.result["diagnosis"]
    parts = [] if diagnosis is None else [diagnosis["text"]]
    if diagnosis is not None and _busy(diagnosis) < BUSY:
        parts[:0] = alone()
    if ended.result["rejected"]:
        parts.insert(0 if rejects_too_many(ended, attainment) else len(parts), _rejected(ended))
    return "; ".join(parts)


def _busy(diagnosis: dict[str, Any]) -> float:
    """Return the share of a run in which its bottleneck was busy; 1 for room, which is no resource that works."""
    name = diagnosis["bottleneck"]
    return 0.0 if name == NONE else float(diagnosis["busy"].get(name, 1.0))


def cheapest(ended: Sequence[Ended]) -> int | None:
    """Return the place of the cheapest one that holds; at the same price, of the one with the least memory, then the fastest."""
    holding = [(_merit(one), at) for at, one in enumerate(ended) if one.outcome == HOLDS]
    return min(holding)[1] if holding else None


def _merit(ended: Ended) -> tuple[float, ...]:
    assert ended.result is not None
    one, ttft_s = ended.candidate, ended.result["ttft_s"]["p99"]
    return *one.order, -ended.attainment, inf if ttft_s is None else ttft_s
