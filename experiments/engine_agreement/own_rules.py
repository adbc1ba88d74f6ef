"""What kvsim's own rules, with the same policies and sizes, show instead of an engine's: what exactness is worth.

Own rules evict pages singly from the end of a leaf, whatever the engine. They are played in the same way as the engine's, without
the settings that only the engine's rules have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ENGINES = {"sglang": "SGLang", "vllm": "vLLM", "fastdeploy": "FastDeploy", "lightllm": "LightLLM"}
ONLY_ENGINES = ("rules.", "replay.prefill_chunk_tokens=", "replay.copy_steps=")


@dataclass(frozen=True)
class Shown:
    """What a run shows of a trace."""

    hits: Sequence[int]
    """Of each request, in pages or tokens; all tiers together."""
    wanted: int
    """Pages or tokens of all prompts."""
    ttft_s: float = float("nan")
    """Mean; nan for a replay."""

    @property
    def hit_rate(self) -> float:
        return sum(self.hits) / self.wanted


@dataclass(frozen=True)
class Worth:
    """An engine's recording beside a run by kvsim's own rules."""

    engine: Shown
    own: Shown

    @property
    def other_requests(self) -> float:
        """Share of the requests whose hits are others by own rules."""
        return float(np.mean(np.asarray(self.engine.hits) != np.asarray(self.own.hits)))

    @property
    def hits_points(self) -> float:
        """By how many points own rules show a higher hit rate."""
        return 100 * (self.own.hit_rate - self.engine.hit_rate)

    @property
    def ttft_percent(self) -> float:
        """By how much own rules show a higher mean TTFT; nan for a replay."""
        return 100 * (self.own.ttft_s / self.engine.ttft_s - 1)


def own_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides that play the same by kvsim's own rules."""
    answers = [one for one in overrides if one.startswith("rules.cache_output=")]
    kept = [one for one in overrides if not one.startswith(ONLY_ENGINES)]
    return [kept[0], "rules=default", *answers, *kept[1:]]


def engine_of(overrides: Sequence[str]) -> str:
    """The engine whose preset the first override chooses."""
    return next(name for prefix, name in ENGINES.items() if overrides[0].startswith(f"preset={prefix}"))


def cells(worth: Worth | None) -> tuple[str, ...]:
    """The columns of a comparison: hit rates, the difference, requests with other hits, mean TTFTs and their difference."""
    if worth is None:
        return ("",) * 5
    ttft = ("", "") if np.isnan(worth.engine.ttft_s) else (f"{worth.engine.ttft_s:.3f}", f"{worth.ttft_percent:+.1f} %")
    return f"{worth.engine.hit_rate:.2%}", f"{worth.hits_points:+.2f}", f"{worth.other_requests:.1%}", *ttft


COLUMNS = ("hit rate", "own rules, points", "requests with other hits", "mean TTFT, s", "own rules")


def summary(worths: Sequence[tuple[Sequence[str], str, int, Worth | None]]) -> list[tuple[str, ...]]:
    """One row for each engine and kind of run.

    Each entry has a run's overrides, its kind, the requests that differ from the recording, and its comparison.
    """
    rows = []
    kinds = dict.fromkeys((engine_of(overrides), kind) for overrides, kind, _, _ in worths)
    for engine, kind in kinds:
        group = [(differ, worth) for overrides, its, differ, worth in worths if (engine_of(overrides), its) == (engine, kind)]
        compared = [worth for _, worth in group if worth is not None]
        exact = sum(not differ for differ, _ in group)
        rows.append((engine, kind, f"{exact} of {len(group)}", *_extremes(compared)))
    return rows


def _extremes(compared: Sequence[Worth]) -> tuple[str, str, str]:
    if not compared:
        return "", "", ""
    points = [worth.hits_points for worth in compared]
    others = [worth.other_requests for worth in compared]
    ttft = [worth.ttft_percent for worth in compared if not np.isnan(worth.ttft_percent)]
    return (
        f"{min(points):+.2f} to {max(points):+.2f}",
        f"up to {max(others):.1%}",
        f"{min(ttft):+.1f} to {max(ttft):+.1f} %" if ttft else "",
    )


SUMMARY = ("engine", "runs", "exact", "hit rate by own rules, points", "requests with other hits", "mean TTFT by own rules")
