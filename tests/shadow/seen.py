"""Snapshots for tests of what shows them."""

from typing import Any

from kvsim.shadow.snapshot import EngineView, GhostView, ScoreView, Share, Snapshot


def ghost(name: str, **about: Any) -> GhostView:
    """A ghost that has served ten requests."""
    known: dict[str, Any] = {
        "differs": "",
        "requests": 10,
        "rejected": 0,
        "hit_rate": 0.5,
        "hit_rate_by_tier": {"gpu": 0.5},
        "points": 0.0,
        "recent_hit_rate": 0.25,
        "recent_requests": 4,
        "checked_requests": 0,
        "alike_requests": 0,
        "engine_points": None,
        "occupancy": {"gpu": (3, 10)},
        "emptied": 0,
        "problem": "",
    }
    return GhostView(name=name, **known | about)


def engine(name: str, **about: Any) -> EngineView:
    """An engine that has stored three blocks."""
    known: dict[str, Any] = {
        "rank": None,
        "pages": {"gpu": 3},
        "stored": 3,
        "removed": 0,
        "cleared": 0,
        "unknown_parents": 0,
        "unknown_removed": 0,
        "gaps": 0,
        "lost_batches": 0,
        "known": True,
        "requests": 1,
        "hit_rate": 0.5,
        "score": ScoreView({"gpu": Share(3, 1)}, {}),
    }
    return EngineView(name=name, **known | about)


def snapshot(*ghosts: GhostView, **about: Any) -> Snapshot:
    """A snapshot after ten requests."""
    known: dict[str, Any] = {
        "at_s": 100.0,
        "events": 0,
        "requests": 10,
        "skipped": 0,
        "late": 0,
        "gaps": 0,
        "memory_bytes": 2048,
        "forgotten_pages": 0,
        "engines": (),
        "notes": (),
    }
    return Snapshot(ghosts=ghosts, **known | about)
