"""Keeps what a shadow remembers within its memory."""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvsim.core.request import Request
from kvsim.plans.plan import Plan
from kvsim.shadow.engine import LiveEngine
from kvsim.shadow.ghost import Ghost
from kvsim.shadow.prompts import Prompts

PAGE_BYTES = 170
"""A page id: its key, its number and its entry in a table, which is up to a half empty."""
SEGMENT_BYTES = 100
"""A stretch of page ids, and its parent."""
HELD_BYTES = 1_400
"""A node of a ghost: its lists by tier, its extents and slots, and its entries in the queues of policies."""
RECENT_BYTES = 140
"""A stretch of the path of a request, as long as it is kept only because it was recent."""
BLOCK_BYTES = 480
"""A block of an engine: its hash, its key, its places."""
OPEN_BYTES = 420
"""A block of a request that may go on: it may have left the engine's tree, and may be stored again."""
WAITING_BYTES = 350
"""An event that was not matched yet."""
ENGINES_SHARE = 0.5
"""The share of the memory that engines' trees and requests may take."""
LOOKS = 16
"""How often engines are looked at while they fill their share."""
SESSION_BYTES = 130
"""A session whose turns are counted."""
SESSIONS_SHARE = 16
"""Sessions take one part in this many of the memory."""
ASSUMED = 0.2
"""The share of what is taken that may be assumed where it is shown: to count takes as long as serving a tenth of it anew."""
FULL = 0.75
"""The share of the memory that may be taken after a clean-up, so that the next one is not due at once."""


def limited(plan: Plan, most_bytes: int) -> Plan:
    """Return a plan for a stream without end, in which an unlimited tier has as many pages as this memory has room to name."""
    most_pages = max(1, most_bytes // 2 // PAGE_BYTES // len(plan.tiers))
    tiers = [
        replace(tier, capacity_pages=most_pages - most_pages % tier.unit_pages) if tier.capacity_pages is None else tier
        for tier in plan.tiers
    ]
    return replace(plan, tiers=tiers)


class Bound:
    """Estimates the bytes of page ids and ghosts, and makes room when they are too many.

    1. Page ids that no ghost holds and no request has used since the last time are forgotten.
    2. If that is not enough, so are those that requests have used.
    3. If that is not enough, the cache of a ghost is emptied that holds the most, again and again.

    The first two change no hit of a policy that knows only of pages that it holds; one with a memory of others, such as ARC,
    takes a forgotten page for a new one. The third makes the ghost worse than it would be.
    """

    def __init__(self, most_bytes: int, ghosts: Sequence[Ghost], prompts: Sequence[Prompts]) -> None:
        self.most_bytes = most_bytes
        self._engines: dict[LiveEngine, None] = {}
        self._told_blocks = 0
        """Blocks in events since engines were last looked at."""
        self._ghosts = ghosts
        self._prompts = prompts
        self._held_bytes = 0
        """Of the ghosts' caches, when they were last counted."""
        self._new_extents = 0
        """An upper bound of what they may have got since."""
        self.cleanings = 0
        """How often page ids were forgotten."""

    def notes(self) -> list[str]:
        """Say what was given up."""
        emptied = [f"{ghost.name} {ghost.emptied:,} times" for ghost in self._ghosts if ghost.emptied]
        found = []
        if self.cleanings:
            found.append(
                f"memory was full {self.cleanings:,} times: pages that no ghost holds were forgotten, also by policies that "
                "remember such pages (arc, two_q, w_tinylfu and their like)"
            )
        if emptied:
            found.append(
                f"memory is too small for these ghosts, so that caches were emptied: {', '.join(emptied)}; give it more, or "
                "smaller tiers to the ghosts"
            )
        forgotten = sum(engine.tree.forgotten for engine in self._engines)
        if forgotten:
            found.append(f"memory is too small for the engines' trees: {forgotten:,} of their blocks were forgotten")
        return found

    def grew(self, requests: Iterable[Request]) -> None:
        """Take note of a request that all ghosts have served; make room if there may be too much now."""
        extents = 0
        for request in requests:
            extents += len(request.runs) + len(request.output_runs or ()) + 2
        self._new_extents += extents * len(self._ghosts)
        if self.bytes > self.most_bytes:
            self._count()
            if self.bytes > FULL * self.most_bytes:
                self.make_room()

    def told(self, engine: LiveEngine, blocks: int) -> None:
        """Take note of an engine's events, of so many blocks; make room if trees and requests that may go on are too much.

        That is looked at whenever a small part of the memory may have been filled since the last time.
        """
        self._engines[engine] = None
        self._told_blocks += blocks
        if self._told_blocks * BLOCK_BYTES * LOOKS < ENGINES_SHARE * self.most_bytes:
            return
        self._told_blocks = 0
        while self._engines_bytes() > ENGINES_SHARE * self.most_bytes:
            largest = max(self._engines, key=_bytes_of)
            if largest.scorer is not None and 2 * WAITING_BYTES * largest.scorer.waiting > _bytes_of(largest):
                largest.scorer.restart()
            elif OPEN_BYTES * largest.requests.open_blocks > BLOCK_BYTES * largest.tree.blocks:
                largest.requests.hand_on_oldest()
            else:
                largest.tree.forget_oldest(1 + largest.tree.blocks // 4)

    def _engines_bytes(self) -> int:
        return sum(map(_bytes_of, self._engines))

    @property
    def bytes(self) -> int:
        """An upper estimate of what is taken now."""
        return self._held_bytes + HELD_BYTES * self._new_extents + self._index_bytes() + self._engines_bytes()

    def check(self) -> None:
        """Recount what ghosts hold. Raises AssertionError if it is more than was assumed, or a page of theirs was forgotten."""
        assumed = self._held_bytes + HELD_BYTES * self._new_extents
        held = sum(len(extents) for ghost in self._ghosts for _, extents in ghost.held())
        assert HELD_BYTES * held <= assumed, f"{held} extents are held, more than assumed"

    def measured(self) -> int:
        """Return what is taken, counted again if much of that is only assumed."""
        if HELD_BYTES * self._new_extents > ASSUMED * self.bytes:
            self._count()
        return self.bytes

    def make_room(self) -> None:
        """Forget what is needed to have room again."""
        self.cleanings += 1
        self._forget(with_recent=True)
        if self.bytes > FULL * self.most_bytes:
            self._forget(with_recent=False)
        while self.bytes > FULL * self.most_bytes and self._empty_largest():
            self._forget(with_recent=False)

    def _index_bytes(self) -> int:
        return sum(
            PAGE_BYTES * each.index.pages + SEGMENT_BYTES * each.index.segments + RECENT_BYTES * len(each.recent)
            for each in self._prompts
        )

    def _count(self) -> dict[tuple[int, str], int]:
        """Count the extents that each cache holds, by its ghost's place and its engine."""
        held = {(at, engine): len(extents) for at, ghost in enumerate(self._ghosts) for engine, extents in ghost.held()}
        self._held_bytes, self._new_extents = HELD_BYTES * sum(held.values()), 0
        return held

    def _forget(self, *, with_recent: bool) -> None:
        for prompts in self._prompts:
            kept = prompts.recent.copy() if with_recent else []
            for ghost in self._ghosts:
                if ghost.plan.page_tokens == prompts.page_tokens:
                    kept += [extent for _, extents in ghost.held() for extent in extents]
            prompts.index.forget_all_but(kept)
            prompts.recent.clear()
        self._count()

    def _empty_largest(self) -> bool:
        """Empty the cache that holds the most. Returns False if none holds anything."""
        held = {place: extents for place, extents in self._count().items() if extents}
        if not held:
            return False
        at, engine = max(held, key=lambda place: held[place])
        self._ghosts[at].empty(engine)
        gc.collect()  # nodes know their parents and these their children
        return True


def _bytes_of(engine: LiveEngine) -> int:
    waiting = 0 if engine.scorer is None else engine.scorer.waiting
    return BLOCK_BYTES * engine.tree.blocks + OPEN_BYTES * engine.requests.open_blocks + WAITING_BYTES * waiting
