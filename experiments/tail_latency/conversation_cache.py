"""The published algorithms on the paper's own model of a cache: how many leading tokens of each conversation are kept.

Arrival by arrival (arXiv:2510.15152, section 2 and Algorithm 1): a turn finds what its conversation still has, everything before
its answer's end is then cached, and what exceeds the capacity leaves. A turn in service takes no room, so a prompt may be longer
than the cache. It is written from the paper and knows nothing of kvsim's core; the study compares both.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple


class Turn(NamedTuple):
    """One turn of a conversation, in tokens; ``history`` is everything before its prompt."""

    at_s: float
    session: int
    history: int
    prompt: int
    answer: int

    @property
    def end(self) -> int:
        """Tokens of the conversation when the turn has been answered."""
        return self.history + self.prompt + self.answer


@dataclass(frozen=True)
class Rule:
    """What is kept after a turn, and what leaves first."""

    threshold: float | None = None
    """Tokens that the next turn may have to compute, the paper's xi in tokens. None: nothing is trimmed, which is LRU."""
    next_prompt: int = 0
    """Tokens that the next prompt is expected to have, the paper's Q."""
    least_history: int = 0
    """Threshold LRU: a conversation of fewer tokens is not cached at all."""
    knows_future: bool = False
    """Tail-optimized Belady: the real next prompt instead of an estimate, and the latest next turn leaves first."""


def uncached_tokens(turns: Sequence[Turn], capacity: int, rule: Rule) -> list[int]:
    """Return what each turn has to compute, in order of arrival, with room for ``capacity`` tokens."""
    following = next_turns(turns)
    kept: OrderedDict[int, int] = OrderedDict()
    needed: dict[int, float] = {}
    next_at: dict[int, float] = {}
    used, uncached = 0, []
    for at, turn in enumerate(turns):
        found = kept.pop(turn.session, 0)
        used -= found
        uncached.append(turn.history + turn.prompt - found)
        if turn.end < rule.least_history:
            continue
        kept[turn.session] = turn.end
        used += turn.end
        needed[turn.session] = tokens_needed(turns, at, following[at], rule)
        next_at[turn.session] = following[at]
        used -= trim(kept, needed, used - capacity)
        used -= evict(kept, next_at if rule.knows_future else None, used - capacity)
    return uncached


def next_turns(turns: Sequence[Turn]) -> list[float]:
    """Return the index of the next turn of each turn's conversation; infinite after the last one."""
    following: list[float] = [inf] * len(turns)
    seen: dict[int, int] = {}
    for at in range(len(turns) - 1, -1, -1):
        following[at] = seen.get(turns[at].session, inf)
        seen[turns[at].session] = at
    return following


def tokens_needed(turns: Sequence[Turn], at: int, following: float, rule: Rule) -> float:
    """Return how many tokens of a conversation must stay, so that its next turn computes no more than the threshold."""
    if rule.threshold is None:
        return inf
    if not rule.knows_future:
        return max(turns[at].end + rule.next_prompt - rule.threshold, 0)
    return 0 if following == inf else max(turns[at].end + turns[int(following)].prompt - rule.threshold, 0)


def trim(kept: OrderedDict[int, int], needed: dict[int, float], excess: int) -> int:
    """Drop what conversations can lose within their budget, least recently used first; return how many tokens that was."""
    dropped = 0
    for session, tokens in list(kept.items()):
        if dropped >= excess:
            break
        if (spare := tokens - needed[session]) > 0:
            dropped += shorten(kept, session, min(int(spare), excess - dropped))
    return dropped


def evict(kept: OrderedDict[int, int], next_at: dict[int, float] | None, excess: int) -> int:
    """Drop the least recently used conversation's end, or that of the one used last again; return how many tokens that was."""
    dropped = 0
    while dropped < excess:
        session = next(iter(kept)) if next_at is None else max(kept, key=next_at.__getitem__)
        dropped += shorten(kept, session, min(kept[session], excess - dropped))
    return dropped


def shorten(kept: OrderedDict[int, int], session: int, tokens: int) -> int:
    kept[session] -= tokens
    if not kept[session]:
        del kept[session]
    return tokens
