"""One live engine, or one data-parallel rank of it: its tree, and the requests that its events tell of."""

from collections.abc import Callable, Sequence

from kvsim.kv_events.messages import GPU, BlockRemoved, BlockStored, EventBatch, tier_of
from kvsim.shadow.blocks import Block
from kvsim.shadow.from_events import RequestsFromEvents
from kvsim.shadow.joining import joined
from kvsim.shadow.live import ChainKeys, LiveRequest
from kvsim.shadow.mirror import EngineTree
from kvsim.shadow.score import REMOVED, STORED, Scorer
from kvsim.shadow.snapshot import EngineView

OF_A_PART = ("sliding_window", "chunked_local_attention", "mamba")
"""Kinds of groups of layers that keep only parts of a prompt, so that their events tell no path."""
CLOCK_JUMP_S = 60.0
"""By more than this, an engine's clock does not go back while it runs."""


class LiveEngine:
    """Takes an engine's batches of events, in order.

    Its requests are those of the first group of layers whose events tell of blocks of ``page_tokens`` tokens and whole paths.
    """

    def __init__(
        self, name: str, rank: int | None, page_tokens: int, keys: ChainKeys, give: Callable[[LiveRequest], None]
    ) -> None:
        self.name, self.rank = name, rank
        self.label = name if rank is None else f"{name}#{rank}"
        """Its name among the engines of the ghosts."""
        self.tree = EngineTree(keys)
        self.requests = RequestsFromEvents(self.label, page_tokens, give)
        self.scorer: Scorer | None = None
        """Compares the events with those of a ghost."""
        self.other_sizes = 0
        """Events with blocks of another size than ``page_tokens``."""
        self._page_tokens = page_tokens
        self._group: int | None = None
        """The group of layers that requests are made from."""
        self._at_s: float | None = None

    def take(self, batch: EventBatch) -> None:
        """Take the next batch."""
        at_s = self._time(batch.ts_s)
        self.requests.next_batch(at_s)
        for event in joined(batch.events):
            if isinstance(event, BlockStored):
                was_known = self.tree.is_known
                told = self.tree.store(event)
                if self._makes_requests(event):
                    self.requests.stored(event, told, at_s, is_known=was_known)
                if not told.is_report:
                    self._score(STORED, event, told.blocks, at_s)
            elif isinstance(event, BlockRemoved):
                self._score(REMOVED, event, self.tree.remove(event), at_s)
            else:
                self.tree.clear(event)
                if event.medium is None or tier_of(event.medium) == GPU:
                    self._reset()

    def _score(self, kind: str, event: BlockStored | BlockRemoved, blocks: Sequence[Block | None], at_s: float) -> None:
        """Let the scorer know of what the engine did with blocks of the group that requests are made from."""
        if self.scorer is not None and self._group == (event.group_idx or 0):
            self.scorer.told(at_s, kind, tier_of(event.medium), [None if block is None else block.key for block in blocks])

    def lose(self, batches: int) -> None:
        """Take note that batches were lost: requests under way end, since what they did is not known.

        No events are scored until the engine's cache is emptied: it does not have what kvsim's has.
        """
        self.tree.lose(batches)
        self.requests.end_all()
        if self.scorer is not None:
            self.scorer.restart()
            self.scorer.is_paused = True

    def restart(self) -> None:
        """Take note that the engine has started anew."""
        self.tree.restart()
        self._reset()
        self._at_s = None

    def _reset(self) -> None:
        """Take note that the engine's cache is empty."""
        self.requests.reset()
        if self.scorer is not None:
            self.scorer.restart()
            self.scorer.is_paused = False

    def _time(self, ts_s: float) -> float:
        """Return the time of a batch, which does not go back, but if the engine's clock was set back."""
        if self._at_s is not None and ts_s < self._at_s - CLOCK_JUMP_S:
            self.requests.end_all()
            self._at_s = None
        self._at_s = ts_s if self._at_s is None else max(ts_s, self._at_s)
        return self._at_s

    def _makes_requests(self, event: BlockStored) -> bool:
        if tier_of(event.medium) != GPU or event.kv_cache_spec_kind in OF_A_PART:
            return False
        if event.block_size != self._page_tokens:
            self.other_sizes += 1
            return False
        group = event.group_idx or 0
        if self._group is None:
            self._group = group
        return group == self._group

    def notes(self) -> list[str]:
        """Say what makes its numbers worth less than they seem."""
        tree, found = self.tree, []
        if self.other_sizes:
            found.append(
                f"{self.label}: {self.other_sizes:,} events tell of blocks of another size than {self._page_tokens} tokens, "
                "which make no requests: set page_tokens to the engine's block size"
            )
        if not tree.is_known:
            found.append(
                f"{self.label}: {tree.lost_batches:,} batches of events were lost; {tree.stale:,} of {tree.blocks:,} blocks are "
                "as they were before, and others may be missing"
            )
        if self.requests.rootless:
            found.append(
                f"{self.label}: {self.requests.rootless:,} events follow blocks that are not known, and make no requests"
            )
        if self.requests.cut:
            found.append(f"{self.label}: {self.requests.cut:,} blocks of answers came too late for their requests")
        return found

    def view(self, requests: int, hit_rate: float | None) -> EngineView:
        """Return what is known; ``requests`` and ``hit_rate`` are of those of which the engine told what it had cached."""
        tree = self.tree
        return EngineView(
            name=self.name,
            rank=self.rank,
            pages=tree.pages(),
            stored=tree.stored,
            removed=tree.removed,
            cleared=tree.cleared,
            unknown_parents=tree.unknown_parents,
            unknown_removed=tree.unknown_removed,
            gaps=tree.gaps,
            lost_batches=tree.lost_batches,
            known=tree.is_known,
            requests=requests,
            hit_rate=hit_rate,
            score=None if self.scorer is None else self.scorer.view(),
        )
