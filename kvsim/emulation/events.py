"""The KV events of emulated engines: what they have stored and removed, as the engines themselves would tell it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs
from simpy import Event as Happening

from kvsim.core.lease import Lease
from kvsim.core.tier import Tier
from kvsim.emulation.emulator import Emulator
from kvsim.emulation.served import Served, ServedWatch
from kvsim.emulation.tellers import Teller
from kvsim.emulation.told_blocks import Blocks, pages_of
from kvsim.engine.engine import Engine
from kvsim.engine.job import Job
from kvsim.engine.substrate import Work
from kvsim.engine.watch import EngineWatch
from kvsim.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvsim.pages.extents import Extent, join_extents, split_extents
from kvsim.substrate.simulated.substrate import SimulatedSubstrate

Send = Callable[[tuple[Event, ...]], None]
"""Takes what has happened in a step."""


@dataclass(slots=True)
class Change:
    """Pages that have entered a medium or left it, of one path if they have entered."""

    medium: str
    is_stored: bool
    is_gpu: bool
    unit: int
    """Pages that are stored as one: the last of them are told."""
    pages: list[int] = field(default_factory=list)


class EngineEvents(EngineWatch):
    """What one engine tells of its cache: a batch when a step has taken effect.

    The pages of a step that follow each other make one event, as in vLLM (a request's new blocks) and in SGLang (its recorder
    joins them). A reset is one event. While answers grow, a leap of decode steps ends where a page becomes full, so that it is
    told then.
    """

    def __init__(self, teller: Teller, blocks: Blocks, engine: Engine, send: Send, *, self_describing: bool) -> None:
        substrate = engine.substrate
        assert isinstance(substrate, SimulatedSubstrate)
        self._leap_s = substrate.steps.leap_s
        self._teller, self._blocks, self._engine, self._send = teller, blocks, engine, send
        self._self_describing = self_describing
        self._pending: list[Change | Event] = []
        self._is_computing = self._is_awaited = False
        """Whether a step is under way; whether ``_tell_if_idle`` is about to be called."""
        self.under_way: dict[int, Served] = {}
        """The requests whose hits are told, by their numbers."""

    # --- what happens in the cache -------------------------------------------------------------------------------------------

    def stored(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        joins = not (self._teller.offloads_blindly and tier.level)
        for page in pages_of(extents):
            last = self._pending[-1] if self._pending else None
            if joins and isinstance(last, Change) and self._continues(last, tier, page):
                last.pages.append(page)
            else:
                self._pending.append(self._change(tier, [page], is_stored=True))
        self._await_step()

    def _continues(self, last: Change, tier: Tier, page: int) -> bool:
        """Whether a page that has been stored is the next one on the path of the last change."""
        if not last.is_stored or last.medium != self._teller.medium(tier):
            return False
        block, before = self._blocks[page], last.pages[-1]
        return block.before == before and block.session == self._blocks[before].session

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        pages, last = list(pages_of(extents)), self._pending[-1] if self._pending else None
        if isinstance(last, AllBlocksCleared):
            return  # part of it
        if self._teller.removes_singly and not tier.level:
            self._pending += [self._change(tier, [page], is_stored=False) for page in reversed(pages)]
        elif isinstance(last, Change) and not last.is_stored and last.medium == self._teller.medium(tier):
            last.pages += pages
        elif pages:
            self._pending.append(self._change(tier, pages, is_stored=False))
        self._await_step()

    def _change(self, tier: Tier, pages: list[int], *, is_stored: bool) -> Change:
        return Change(self._teller.medium(tier), is_stored, not tier.level, tier.told_unit, pages)

    def emptied(self, gpu: Tier | None) -> None:
        self._is_computing = False
        if gpu is None:
            self._pending = [AllBlocksCleared()]
            self._await_step()

    def admitted(self, lease: Lease, pages: int, load_pages: int) -> None:
        served = self.under_way.get(lease.request.index)
        if served is None or not lease.gpu_pages:
            return
        request = served.request
        path = join_extents(request.runs, request.output_runs or ())
        hits = list(pages_of(split_extents(path, lease.gpu_pages)[0]))
        event = self._stored_event(self._teller.medium(self._engine.gpu), hits)
        self._pending.append(structs.replace(event, session_id=served.extras.session))

    # --- when it is told -----------------------------------------------------------------------------------------------------

    def computes(self, work: Work, done: Happening) -> None:
        if work.engine == self._engine.number:
            self._is_computing = True
            if work.max_steps > 1:
                self._watch_leap(work, done)

    def _watch_leap(self, work: Work, done: Happening) -> None:
        """Let a leap end with the first step that takes a page: it names the page before it, where pages are taken late."""
        if not self._engine.cache.takes_pages_late:
            return
        size = self._blocks.page_tokens
        computed = [job.cached_tokens(work.decode_step) for job in work.decoding if isinstance(job, Job)]
        steps = min([-tokens % size + 1 for tokens in computed], default=work.max_steps)
        if steps < work.max_steps:
            before_s = self._leap_s(work, steps - 1) if steps > 1 else 0.0
            middle_s = (before_s + self._leap_s(work, steps)) / 2
            self._engine.env.timeout(middle_s).callbacks.append(lambda _: self._end_leap(done))

    def _end_leap(self, done: Happening) -> None:
        if not done.triggered:
            self._engine.wake()

    def worked(self, work: Work) -> None:
        if work.engine == self._engine.number:
            self._is_computing = False
            self.tell()

    def _await_step(self) -> None:
        """Let what has happened be told now if no step begins now."""
        if not (self._is_computing or self._is_awaited):
            self._is_awaited = True
            self._engine.env.timeout(0.0).callbacks.append(self._tell_if_idle)

    def _tell_if_idle(self, _: Happening) -> None:
        self._is_awaited = False
        if not self._is_computing:
            self.tell()

    def tell(self) -> None:
        """Send what has happened since the last time."""
        pending, self._pending = self._pending, []
        if pending:
            self._send(tuple([self._event(one) if isinstance(one, Change) else one for one in pending]))

    # --- events --------------------------------------------------------------------------------------------------------------

    def _event(self, change: Change) -> Event:
        is_blind = self._teller.offloads_blindly and not change.is_gpu and not self._self_describing
        pages = change.pages
        if change.unit > 1 and not is_blind:
            pages = [page for last in pages for page in self._blocks.ending_at(last, change.unit)]
        if not change.is_stored:
            hashes = tuple([self._blocks.told(page) for page in pages])
            return BlockRemoved(hashes, change.medium, self._teller.group_idx)
        if is_blind:
            return BlockStored(
                (self._blocks.told(pages[0]),), None, (), 0, medium=change.medium, group_idx=self._teller.group_idx
            )
        return self._stored_event(change.medium, pages)

    def _stored_event(self, medium: str, pages: Sequence[int]) -> BlockStored:
        teller, blocks = self._teller, self._blocks
        first = blocks[pages[0]]
        extra_keys = None
        if teller.has_extra_keys:
            extra_keys = tuple(
                [(salt,) if not at and first.before < 0 and (salt := first.salt) else None for at in range(len(pages))]
            )
        return BlockStored(
            tuple([blocks.told(page) for page in pages]),
            None if first.before < 0 else blocks.told(first.before),
            tuple([token for page in pages for token in blocks[page].tokens]),
            blocks.page_tokens,
            medium=medium,
            extra_keys=extra_keys,
            group_idx=teller.group_idx,
            kv_cache_spec_kind=teller.spec_kind,
            session_id=first.session,
            cache_salt=None if teller.has_extra_keys else first.salt,
        )


class EventFeed(ServedWatch):
    """The events of an emulator's engines, from its first request on."""

    def __init__(
        self,
        emulator: Emulator,
        teller: Teller,
        publish: Callable[[EventBatch], None],
        clock: Callable[[], float],
        *,
        self_describing: bool = False,
    ) -> None:
        """``publish`` takes each batch with the number of its engine as rank; ``clock`` returns seconds since 1970.

        ``self_describing``: blocks below the GPU are told with their tokens where the engine can do so, as vLLM does with
        ``self_describing_kv_events``.
        """
        self.blocks = Blocks(emulator.plan.page_tokens, teller.hashing)
        self._teller, self._publish, self._clock = teller, publish, clock
        self._engines = [
            EngineEvents(teller, self.blocks, engine, partial(self._send, engine.number), self_describing=self_describing)
            for engine in emulator.cluster.engines
        ]
        told: set[int] = set()
        for engine, events in zip(emulator.cluster.engines, self._engines, strict=True):
            engine.watches = [*engine.watches, events]
            engine.cache.watch(events)
            for tier in [engine.gpu, *engine.gpu.all_below()]:
                if id(tier) not in told:  # a tier of several engines is told of by the first
                    told.add(id(tier))
                    tier.watches.append(events)
        emulator.watches.append(self)
        emulator.pages.on_forget.append(self.blocks.forget)

    def _send(self, rank: int, events: tuple[Event, ...]) -> None:
        self._publish(EventBatch(self._clock(), events, rank))

    def comes(self, served: Served, tokens: Sequence[int]) -> None:
        request, extras = served.request, served.extras
        self.blocks.add(join_extents(request.runs, request.output_runs or ()), tokens, extras.salt, extras.session)
        if extras.reports_hits and self._teller.reports_hits:
            for events in self._engines:
                events.under_way[served.number] = served

    def ended(self, served: Served) -> None:
        for events in self._engines:
            events.under_way.pop(served.number, None)
