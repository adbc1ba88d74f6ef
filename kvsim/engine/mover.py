"""Passes the core's transfers to the substrate, and their ends back to the core."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import isnan
from typing import Any

from simpy import Event

from kvsim.core.serving import Lower, ServedCache
from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import GPU
from kvsim.core.transfer import Transfer
from kvsim.core.watch import Watch
from kvsim.engine.outcome import Disagreement
from kvsim.engine.substrate import Substrate
from kvsim.engine.waiter import Waiter


@mypyc_attr(allow_interpreted_subclasses=True)
class Carried(Watch):
    """An engine for which transfers are carried. It is told of the end of those to its GPU; while it awaits others, of all."""

    @property
    def awaits_transfers(self) -> bool:
        """Whether the end of any transfer may concern it."""
        return True


class Landing(Waiter):
    """Waits for the end of a copy."""

    __slots__ = ("mover", "transfer")

    def __init__(self, mover: "Mover", transfer: Transfer) -> None:
        self.mover = mover
        self.transfer = transfer

    def happened(self, event: Any) -> None:
        self.mover.landed(self.transfer, event.value)


class Mover:
    """Begins each transfer as soon as the core allows it, and submits the transfers that follow from its end.

    Transfers without room in their target wait in one line per target, in order of submission. If several ranks
    carry a transfer, only the pages that every rank has moved arrive; the others are lost, and counted.
    """

    def __init__(self, substrate: Substrate, cache: ServedCache) -> None:
        self.env = substrate.env
        self.substrate = substrate
        self.lower: Lower | None = cache.lower
        """What lies below the GPUs; there are no transfers if nothing does."""
        self._engines: dict[int, Carried] = {}
        """Those above the tiers of the cache, by the owner of their GPU tier. They are told like ``watches``, before them."""
        self._alone: Carried | None = None
        """The only one."""
        self.awaiting: dict[int, None] = {}
        """Owners of the engines that may await transfers."""
        self.watches: list[Watch] = []
        self.lost_to_disagreement = Disagreement()
        self._lines: list[deque[Transfer] | None] = [None] * len(cache.tiers)
        """The transfers that wait in line for each target; None before the first one."""
        self._expected: dict[Transfer, list[tuple[int, Callable[[Event], None]]]] = {}
        """The pages that those who wait for a transfer expect of it, and what is called if it brings fewer."""
        self._last_copy_s: dict[int, float] = {}
        """Time at which the last copy from or to a GPU tier began, by the tier's owner."""

    def submit(self, transfers: Iterable[Transfer]) -> None:
        """Carry transfers through to their end; those submitted before are ignored."""
        for transfer in transfers:
            if not transfer.submitted:
                transfer.submitted = True
                self._join(transfer)
                self._move_up(transfer.target.index, transfer)

    def _join(self, transfer: Transfer) -> None:
        """Put a transfer at the end of its line."""
        line = self._lines[transfer.target.index]
        if line is None:
            line = self._lines[transfer.target.index] = deque()
        line.append(transfer)

    def end_of(self, transfer: Transfer) -> Event:
        """Return the event for the end of a transfer that is not done yet."""
        if transfer.ended is None:
            transfer.ended = self.env.event()
        event: Event = transfer.ended
        return event

    def expect(self, transfer: Transfer, pages: int, misses: Callable[[Event], None]) -> None:
        """Call ``misses`` at the end of a transfer that is not done yet, if it has brought fewer pages."""
        self._expected.setdefault(transfer, []).append((pages, misses))

    def begins_copies(self, owner: int) -> bool:
        """Return whether copies from or to the GPU tier of this owner begin now."""
        return self._last_copy_s.get(owner) == self.env.now

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer early, with the whole pages that have arrived; none, if it still waits in line or for another one."""
        target = transfer.target.index
        if not isnan(transfer.begun_s):
            self.substrate.cancel(transfer)
            return
        line = self._lines[target]
        if line and transfer in line:
            line.remove(transfer)
        self._land(transfer, 0)
        self._move_up(target)

    def _move_up(self, target: int, newest: Transfer | None = None) -> None:
        """Begin transfers from the head of a line for as long as there is room."""
        line = self._lines[target]
        while line and (newest is None or line[0] is newest):
            transfer = line[0]
            if transfer.after and (unfinished := [earlier for earlier in transfer.after if not earlier.done]):
                line.popleft()
                self._rejoin_after(unfinished[0], transfer)
                continue
            assert self.lower is not None
            now = self.env.now
            begun = self.lower.begin(transfer, now)
            if not begun.can_run:
                self.submit(begun.waits)
                return
            line.popleft()
            self._copy(transfer, now)

    def _rejoin_after(self, earlier: Transfer, transfer: Transfer) -> None:
        self.end_of(earlier).callbacks.append(lambda _: self._rejoin(transfer))

    def _rejoin(self, transfer: Transfer) -> None:
        """Put a transfer back in line, since what it reads has arrived, unless it has been cancelled."""
        if transfer.done:
            return
        self._join(transfer)
        self._move_up(transfer.target.index)
        self._tell(transfer)

    def _copy(self, transfer: Transfer, now: float) -> None:
        transfer.begun_s = now
        source, target = transfer.source, transfer.target
        if source.level == GPU:
            self._last_copy_s[source.owner] = now
        if target.level == GPU:
            self._last_copy_s[target.owner] = now
        self.substrate.copy(transfer).callbacks.append(Landing(self, transfer))

    def landed(self, transfer: Transfer, answer: Any) -> None:
        """A copy has ended, with the substrate's ``answer``."""
        self._land(transfer, answer if isinstance(answer, int) else self._agreed(answer))

    def _agreed(self, answers: Sequence[int]) -> int:
        """Return the pages that all ranks have, given one number per rank, and count those that only some have.

        SGLang also takes the minimum over the ranks (``check_prefetch_progress`` in ``mem_cache/hiradix_cache.py``).
        """
        lowest = min(answers)
        if more := max(answers) - lowest:
            self.lost_to_disagreement.pages += more
            self.lost_to_disagreement.transfers += 1
        return lowest

    def _land(self, transfer: Transfer, arrived: int) -> None:
        now = self.env.now
        assert self.lower is not None
        if arrived < transfer.pages:
            follow_ups = self.lower.abort(transfer, arrived, now)
        else:
            follow_ups = self.lower.finish(transfer, now)
        for pages, misses in self._expected.pop(transfer, ()):
            if transfer.arrived_pages < pages:
                self.end_of(transfer).callbacks.append(misses)
        if transfer.ended is not None:
            transfer.ended.succeed()
        if follow_ups:
            self.submit(follow_ups)
        if self._lines[transfer.source.index]:
            self._move_up(transfer.source.index)
        self._tell(transfer)

    def add(self, owner: int, engine: Carried) -> None:
        """Carry transfers for the engine above a GPU tier of this owner."""
        self._alone = None if self._engines else engine
        self._engines[owner] = engine
        self.awaiting[owner] = None

    def _tell(self, transfer: Transfer) -> None:
        if self._alone is not None:
            self._alone.ended(transfer)
        else:
            self._tell_concerned(transfer)
        for watch in self.watches:
            watch.ended(transfer)

    def _tell_concerned(self, transfer: Transfer) -> None:
        """Tell those of several engines whom the end of a transfer may concern."""
        awaiting = self.awaiting
        concerned = awaiting if transfer.target.level != GPU else {**awaiting, transfer.target.owner: None}
        for owner in sorted(concerned):
            engine = self._engines[owner]
            engine.ended(transfer)
            if not engine.awaits_transfers:
                awaiting.pop(owner, None)
