"""Who plays on a leaderboard, and on what: the policies of a family, the traces, the capacities of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsim.errors import UsageError
from kvsim.numbers import Whole, check_settings
from kvsim.plans.build import build_run, build_trace
from kvsim.settings.bare_file import is_path
from kvsim.settings.configuration import compose, compose_with_choices
from kvsim.settings.sources import files_of
from kvsim.suggest import closest
from kvsim.sweeps.measures import MEASURES
from kvsim.trace.base import Trace
from kvsim.trace.formats import load_source
from kvsim.trace.memory import loaded_from
from kvsim.trace.statistics import unlimited_hit_pages

CAPACITY = "tiers.gpu.capacity"
SHARES = (0.05, 0.1, 0.2, 0.4)
"""Capacities by default, as shares of the trace's unique pages."""
SIZES = "numbers of pages such as 8000, sizes such as 40GiB, or shares of a trace's unique pages such as 5%"
OF_TRACES = ("trace", "page_tokens")
BESIDE_TRACES = ("page_tokens", "model")
"""Settings that may stand beside those of a trace."""


class Family(NamedTuple):
    """How policies of a family are compared."""

    command: str
    measure: str
    bound: str | None = None


FAMILIES = {
    "eviction": Family("replay", "hit_rate", "belady"),
    "placement": Family("replay", "hit_rate"),
    "checkpoint": Family("replay", "hit_rate"),
    "prefetch": Family("simulate", "ttft_s"),
    "routing": Family("simulate", "ttft_s"),
    "scheduling": Family("simulate", "ttft_s"),
}
UNRANKED = {
    "admission": "a leaderboard compares runs that serve the same requests, and these policies serve different ones: compare "
    "goodput and attainment with `kvsim simulate -m admission=NAME,NAME`",
    "autoscaling": "what these policies are judged by is two numbers, goodput and the hours of engines, and a leaderboard has "
    "one: compare both with `kvsim simulate -m autoscaling=NAME,NAME`",
}
"""Why the policies of some families have no places."""


@dataclass(frozen=True, kw_only=True)
class LeaderboardSettings:
    """What ``kvsim leaderboard`` plays."""

    family: str = "eviction"
    policies: list[str] | None = None
    traces: list[str] | None = None
    capacities: list[Any] | None = None
    measure: str | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        for name, known in (("family", FAMILIES), ("measure", MEASURES)):
            value = getattr(self, name)
            if name == "family" and value in UNRANKED:
                raise ValueError(f"family={value}: {UNRANKED[value]}")
            if value is not None and value not in known:
                hint = closest(value, known) or f"; choose from {', '.join(known)}"
                raise ValueError(f"{name}: there is no {value!r}{hint}")
        for name in ("policies", "traces", "capacities"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise ValueError(f"{name} is empty: give some, or leave it out")
        for name, kinds, hint in (("policies", (str,), "names"), ("traces", (str,), "names"), ("capacities", (int, str), SIZES)):
            if wrong := [one for one in getattr(self, name) or () if type(one) not in kinds]:
                raise ValueError(f"{name} are {hint}, not {wrong[0]!r}")
        sizes: list[float | str] = []
        for one in self.capacities or ():
            share = share_of(one)
            size = share if share is not None else f"{one}pages" if isinstance(one, int) else str(one)
            if size in sizes:
                raise ValueError(f"capacities has {one!r} more than once")
            sizes.append(size)
        if twice := next((one for one in self.traces or () if self.traces and self.traces.count(one) > 1), None):
            raise ValueError(f"traces has {twice!r} more than once")
        check_settings(self, Whole(1), "workers")


def share_of(capacity: int | str) -> float | None:
    """Return the share of a trace's unique pages that a capacity such as ``5%`` is; None for another. Raises ValueError."""
    if not isinstance(capacity, str) or not capacity.endswith("%"):
        return None
    try:
        share = float(capacity.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"capacities: {capacity!r} is no share: give one above 0% and up to 100%")
    return share


class Entry(NamedTuple):
    """A policy that takes part: its name with settings, and the overrides that choose it."""

    name: str
    lines: list[str]


class Ground(NamedTuple):
    """A trace on which all play."""

    name: str
    trace: Trace
    capacities: list[str]
    fixed: list[str]
    """Overrides of all its runs."""

    def record(self) -> dict[str, Any]:
        """Return what is recorded of it."""
        sizes = {"requests": len(self.trace.requests), "page_tokens": self.trace.page_tokens}
        return {"name": self.name, **sizes, "capacities": self.capacities}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked for."""

    settings: LeaderboardSettings
    overrides: Sequence[str]
    """Those of all runs, and of the user's own policy; none of the leaderboard's."""
    command_line: str | None
    """The line that repeats it, if one does."""
    traces: Sequence[tuple[str, Trace]] = ()
    """Traces that a program has loaded, in place of those that the settings name."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.settings.family]

    @property
    def measure(self) -> str:
        return self.settings.measure or self.family.measure

    @property
    def command(self) -> str:
        """What runs: a replay has no times."""
        return "simulate" if MEASURES[self.measure].has_clock else self.family.command

    @property
    def bound(self) -> str | None:
        """The policy that bounds the others, which takes no place."""
        return self.family.bound if MEASURES[self.measure].has_bound else None

    @property
    def own(self) -> list[str]:
        """The overrides that choose the user's own policy."""
        return [line for line in self.overrides if _group(line) == self.settings.family]

    @property
    def shared(self) -> list[str]:
        """Those of all runs."""
        return [line for line in self.overrides if _group(line) != self.settings.family]


def baseline_of(asked: Asked) -> str:
    """Return the policy that the others are compared with: the one of a run that chooses none."""
    lines = [line for line in asked.shared if _group(line) != "trace"]
    config, choices = compose_with_choices(lines)
    if choices[asked.settings.family] is None:  # it follows from the model
        choices = build_run(config, command=asked.command, overrides=lines, choices=choices).choices
    return str(choices[asked.settings.family])


def _group(line: str) -> str:
    return line.lstrip("+~").partition("=")[0].partition(".")[0]


def entries(asked: Asked, baseline: str) -> list[Entry]:
    """Return the baseline, the user's own policy, and the others by name. Raises UsageError for a name that does not exist."""
    names = sorted(files_of(asked.settings.family))
    others = names if asked.settings.policies is None else asked.settings.policies
    found = [_entry(asked.settings.family, baseline, names), *_own_entries(asked, names)]
    found += [_entry(asked.settings.family, text, names) for text in others]
    once = {frozenset(entry.lines): entry for entry in reversed(found)}
    return [entry for lines, entry in reversed(once.items()) if lines != {f"{asked.settings.family}={asked.family.bound}"}]


def _own_entries(asked: Asked, names: Sequence[str]) -> list[Entry]:
    """Return the user's policy with its settings, if there is one."""
    family, words = asked.settings.family, [line.partition("=") for line in asked.own]
    chosen = [value for key, _, value in words if key == family]
    if words and not chosen:
        raise UsageError(f"{asked.own[0]}: say which policy, {family}=NAME; it joins the others with these settings")
    settings = [f"{key.partition('.')[2]}={value}" for key, _, value in words if "." in key]
    return [_named(family, chosen[-1], settings, names)] if chosen else []


def _entry(family: str, text: str, names: Sequence[str]) -> Entry:
    """Return a policy that is written as ``slru protected_hits=3``."""
    name, *words = text.split() or [""]
    if word := next((word for word in words if "=" not in word), None):
        raise UsageError(f"leaderboard.policies: cannot parse {word!r} in {text!r}: use {name!r} or '{name} KEY=VALUE'")
    return _named(family, name, words, names)


def _named(family: str, name: str, settings: Sequence[str], names: Sequence[str]) -> Entry:
    if name not in names:
        hint = closest(name, names) or f"; choose from {', '.join(names)}"
        raise UsageError(f"leaderboard.policies: there is no {family} policy {name!r}{hint}")
    return Entry(" ".join([name, *settings]), [f"{family}={name}", *(f"{family}.{word}" for word in settings)])


def grounds(asked: Asked) -> Iterator[Ground]:
    """Load the traces, with their capacities. Raises UsageError."""
    own = [line for line in asked.shared if _group(line) in OF_TRACES]
    rest = [line for line in asked.shared if line not in own]
    texts = asked.settings.traces
    if asked.traces:
        yield from (_ground(asked, name, trace, rest) for name, trace in asked.traces)
    elif texts is None:
        trace = _loaded(own)
        yield _ground(asked, trace.name, trace, rest)
    elif line := next((line for line in own if _group(line) == "trace"), None):
        raise UsageError(f"{line}: leaderboard.traces says which traces play: leave one out, or put its settings there")
    else:
        for text in texts:
            lines = [*own, *_lines_of(text)]
            more = [line for line in lines if _group(line) not in OF_TRACES]
            yield _ground(asked, text, _loaded([line for line in lines if line not in more]), [*rest, *more])


def _loaded(lines: Sequence[str]) -> Trace:
    of_trace = [line for line in lines if _group(line) == "trace"]
    source, pages = build_trace(compose([*of_trace, *(line for line in lines if line not in of_trace)]))
    return loaded_from(load_source(source, pages), *of_trace)


def _lines_of(text: str) -> list[str]:
    """Return the overrides of a trace, given as a file or a name, and settings: ``synthetic sessions=600``."""
    name, *words = text.split() or [""]
    if not name or any("=" not in word for word in words):
        raise UsageError(f"leaderboard.traces: cannot parse {text!r}: use a file or a name, then KEY=VALUE")
    chosen = ["trace=auto", f"trace.path={name}"] if is_path(name) else [f"trace={name}"]
    return [*chosen, *(word if word.partition("=")[0] in BESIDE_TRACES else f"trace.{word}" for word in words)]


def _ground(asked: Asked, name: str, trace: Trace, overrides: Sequence[str]) -> Ground:
    fixed = [line for line in overrides if not line.startswith(f"{CAPACITY}=")]
    return Ground(name, trace, list(dict.fromkeys(_capacities(asked, trace, overrides))), fixed)


def _capacities(asked: Asked, trace: Trace, overrides: Sequence[str]) -> list[str]:
    """Return those that are given; by default the shares of SHARES."""
    if given := [line.partition("=")[2] for line in overrides if line.startswith(f"{CAPACITY}=")]:
        if asked.settings.capacities is not None:
            raise UsageError(f"{CAPACITY}: leaderboard.capacities says which capacities play: leave one out")
        return given
    if asked.settings.capacities is None:
        return _of_shares(trace, overrides, SHARES)
    found: list[str] = []
    for one in asked.settings.capacities:
        share = share_of(one)
        pages = f"{one}pages" if isinstance(one, int) else str(one)
        found += [pages] if share is None else _of_shares(trace, overrides, (share,))
    return found


def _of_shares(trace: Trace, overrides: Sequence[str], shares: Sequence[float]) -> list[str]:
    """Return shares of the trace's unique pages as capacities of each engine, none below the largest request."""
    requests = trace.requests
    unique = sum(request.prompt_pages for request in requests) - sum(unlimited_hit_pages(requests))
    largest = max(request.pages_in_all(trace.page_tokens) + 1 for request in requests)
    engines = int(compose(list(overrides)).cluster.engines)
    return [f"{pages}pages" for pages in sorted({max(largest, round(share * unique / engines)) for share in shares})]
