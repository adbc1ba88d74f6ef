"""A snapshot in words and tables, for the terminal and the page."""

from collections.abc import Iterable, Mapping, Sequence

from kvsim.report.summary import Table
from kvsim.results.rates import UNKNOWN, count, percent, size
from kvsim.shadow.history import ENGINE
from kvsim.shadow.snapshot import EngineView, GhostView, Share, Snapshot

MOST_HEADLINES = 6
SAME = "as configured"
VARIES = " ±: half of the 95 % interval of the mean gain over stretches of that many requests, if these are alike."


def points(value: float | None) -> str:
    """Format percentage points with their sign."""
    return UNKNOWN if value is None else f"{value:+.1f} points"


def headlines(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return what each ghost gains over the first, and what differs in it, best first."""
    others = [ghost for ghost in snapshot.ghosts[1:] if ghost.points is not None and not ghost.problem]
    best = sorted(others, key=lambda ghost: -(ghost.points or 0.0))[:MOST_HEADLINES]
    return [(points(ghost.points), f"{ghost.name}: {ghost.differs}" if ghost.differs else ghost.name) for ghost in best]


def in_short(snapshot: Snapshot, engine: float | None) -> str:
    """Return one line with what matters."""
    told = [f"{count(snapshot.requests)} requests", *([f"{ENGINE} {percent(engine)}"] if engine is not None else [])]
    for ghost in snapshot.ghosts:
        gain = f" ({points(ghost.points)})" if ghost is not snapshot.ghosts[0] and ghost.points is not None else ""
        told.append(f"{ghost.name} {percent(ghost.hit_rate)}{gain}")
    return ", ".join(told)


def numbers(snapshot: Snapshot) -> dict[str, float]:
    """Return hit rates and points by ghost, and the number of requests, for a log of runs."""
    found: dict[str, float] = {"requests": snapshot.requests}
    for ghost in snapshot.ghosts:
        known = {"hit_rate": ghost.hit_rate, "points": ghost.points}
        found |= {f"{name}.{ghost.name}": value for name, value in known.items() if value is not None}
    return found


def tables(snapshot: Snapshot, engine: float | None, noise: Mapping[str, float]) -> list[Table]:
    """Return the table of ghosts and, if there are events, that of engines. ``noise`` is that of points, by ghost."""
    heard = [one for one in snapshot.engines if one.stored or one.removed or one.cleared or one.lost_batches]
    return [_ghosts(snapshot, engine, noise), *([_engines(heard)] if heard else [])]


def _ghosts(snapshot: Snapshot, engine: float | None, noise: Mapping[str, float]) -> Table:
    ghosts = snapshot.ghosts
    tiers = list(dict.fromkeys(tier for ghost in ghosts for tier in ghost.hit_rate_by_tier))
    by_tier = tiers if len(tiers) > 1 else []
    columns = ("cache", "points", "hit rate", "recent", *(f"from {tier}" for tier in by_tier), "settings")
    rows = [_ghost(ghost, by_tier, "" if not number else _gain(ghost, noise)) for number, ghost in enumerate(ghosts)]
    if engine is not None:
        rows.insert(0, (ENGINE, "", "", percent(engine), *("" for _ in by_tier), "as it says itself"))
    return Table("Ghost caches", columns, rows, _agreement(ghosts[0]) + VARIES * bool(noise))


def _gain(ghost: GhostView, noise: Mapping[str, float]) -> str:
    if ghost.points is None:
        return UNKNOWN
    return f"{ghost.points:+.1f}" + (f" ± {noise[ghost.name]:.1f}" if ghost.name in noise else "")


def _ghost(ghost: GhostView, by_tier: Sequence[str], gain: str) -> tuple[str, ...]:
    settings = f"stopped: {ghost.problem}" if ghost.problem else ghost.differs or SAME
    shares = (percent(ghost.hit_rate_by_tier.get(tier)) if ghost.hit_rate is not None else UNKNOWN for tier in by_tier)
    return (ghost.name, gain, percent(ghost.hit_rate), percent(ghost.recent_hit_rate), *shares, settings)


def _agreement(first: GhostView) -> str:
    """Say how the first ghost compares with the engine whose settings it should have."""
    recent = f"recent: the last {count(first.recent_requests)} requests. " if first.recent_requests else ""
    if not first.checked_requests or first.engine_points is None:
        return f"{recent}points: percentage points of the hit rate above {first.name}."
    share = first.alike_requests / first.checked_requests
    return (
        f"{recent}points: percentage points of the hit rate above {first.name}, which found as much as the engine said in "
        f"{share:.1%} of {count(first.checked_requests)} requests, and {first.engine_points:+.1f} points in all."
    )


def _engines(engines: Sequence[EngineView]) -> Table:
    media = list(dict.fromkeys(medium for engine in engines for medium in engine.pages))
    columns = ("engine", "rank", *(f"{medium} blocks" for medium in media), "stored", "removed", "hit rate")
    columns += ("predicted stored", "predicted removed", "state")
    return Table("Engines, by their events", columns, [_engine(engine, media) for engine in engines])


def _engine(engine: EngineView, media: Sequence[str]) -> tuple[str, ...]:
    stored, removed = (None, None) if engine.score is None else (engine.score.stored, engine.score.removed)
    return (
        engine.name,
        UNKNOWN if engine.rank is None else str(engine.rank),
        *(count(engine.pages.get(medium, 0)) for medium in media),
        count(engine.stored),
        count(engine.removed),
        percent(engine.hit_rate),
        _predicted(stored.values() if stored else ()),
        _predicted(removed.values() if removed else ()),
        "known" if engine.known else f"unknown since a gap ({count(engine.lost_batches)} batches lost)",
    )


def _predicted(shares: Iterable[Share]) -> str:
    """Return the predicted part of events in all media together."""
    found = list(shares)
    matched, sent = sum(share.matched for share in found), sum(share.matched + share.missed for share in found)
    return percent(matched / sent) if sent else UNKNOWN


def facts(snapshot: Snapshot, recorded: int | None) -> list[tuple[str, str]]:
    """Return pairs of a name and a text; names without data are left out."""
    pairs = [
        ("requests", count(snapshot.requests)),
        ("left out", count(snapshot.skipped) if snapshot.skipped else ""),
        ("events", count(snapshot.events) if snapshot.events else ""),
        ("gaps", count(snapshot.gaps) if snapshot.gaps else ""),
        ("recorded", "" if recorded is None else f"{count(recorded)} requests"),
        ("memory", size(snapshot.memory_bytes)),
    ]
    return [(name, text) for name, text in pairs if text]
