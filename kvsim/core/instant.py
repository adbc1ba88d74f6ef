"""The cache for runs without a clock: what moves has moved when the call that decides it returns."""

from collections.abc import Sequence
from math import inf, nextafter

from kvsim.core.cache import NO_TRANSFERS, Lease, TieredCache
from kvsim.core.movement import CPU, DISK, GPU
from kvsim.core.request import Request
from kvsim.core.residency import is_same_history
from kvsim.core.rules import Rules
from kvsim.core.runs import split_runs
from kvsim.core.sinking import Sinking
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node


class InstantCache(TieredCache):
    """Decides like ``TieredCache``; copies change hands at once, without the pins, promises and records of a transfer.

    No call hands out transfers. ``fetch`` returns the one that it has carried out. Where the last pages of a node are evicted,
    and the node's child is what they would become, they pass to it: neither a cut nor a join is needed.
    """

    def __init__(self, tiers: list[Tier], rules: Rules, page_tokens: int) -> None:
        super().__init__(tiers, rules, page_tokens)
        self._hears_cuts = any(tier.on_insert or tier.on_split or tier.on_merge or tier.on_remove for tier in tiers)
        self._others = len(tiers) - 1
        self._prompt: Request | None = None
        """Whose prompt has just been computed and is being copied down."""
        self.moving: list[list[Node]] = [[] for _ in tiers]
        """What has left a tier in the pass under way, and arrives in the one below at its end."""
        self.held: list[list[Node]] | None = None
        """By tier, what has left the one above while copies are being decided on. It arrives when all have been."""
        if Sinking.suits(tiers):
            self.make_room = Sinking(self).make_room  # type: ignore[method-assign]

    # --- requests ----------------------------------------------------------------------------------------------------

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0) -> bool:
        gpu, hit_pages = self.gpu, lease.gpu_pages
        missing = pages - hit_pages - gpu.pool.free
        evictable = gpu.evictable_pages
        if missing > 0 and missing + hit_pages > evictable and missing + self._idle_pages(lease) > evictable:
            return False
        if now <= self.now:
            now = nextafter(self.now, inf)
        self.now = now
        for announce in self.announced:
            announce(lease.request, now)
        if lease.cpu_pages or lease.disk_pages:
            self._pin_path(lease, load_pages, now)
        else:
            self.use_path(lease.path, lease.gpu_pages, now)
            lease.node = lease.path[-1] if lease.path else self.tree.root
            lease.epoch = self.epoch
        if missing > 0:
            self.make_room(gpu, pages - hit_pages, now)
        lease.slots = gpu.pool.take(pages - hit_pages)
        self.leases[lease] = None
        return True

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        if lease.epoch != self.epoch:
            return NO_TRANSFERS
        if now <= self.now:
            now = nextafter(self.now, inf)
        self.now = now
        for announce in self.announced:
            announce(lease.request, now)
        rest = lease.rest
        if rest:
            if rest[0][0] in lease.node.children:
                rest = self.join_known(lease, now)
            if rest:
                self.add_leaf(lease, rest, now)
            lease.rest = ()
        if lease.request.persistent:
            self.persist(lease.node)
        if lease.is_finishing:
            self.offer(lease.node, now)
            return NO_TRANSFERS
        for announce in self.offering:
            announce(lease.request, now)
        self._prompt = lease.request
        self.offer(lease.node, now)
        self._prompt = None
        return NO_TRANSFERS

    def offer(self, node: Node, now: float) -> None:
        """Copy the path down to a node, which a request has just used, to the tiers whose policies want it."""
        decided: list[list[Node]] = [[] for _ in self.tiers]
        if len(self.tiers) > 2:
            self._hold()
        for tier in self.tiers[:-1]:
            lower = tier.lower
            if lower is not None and lower.wanted_pages:
                decided[lower.index] = self._decide_prompt(node, tier, lower, now)
            elif lower is not None and lower.after_use and (path := self._path_without_copy(node, lower.index)):
                decided[lower.index] = self._decide_offers(path, tier, lower, now)
        self._land(now, decided)

    def release(self, lease: Lease) -> None:
        if lease.epoch != self.epoch or lease.loading is not None:
            super().release(lease)
            return
        self.gpu.pool.give(lease.slots)
        del self.leases[lease]
        self.leave_path(lease.node)

    # --- eviction ----------------------------------------------------------------------------------------------------

    def make_room(self, tier: Tier, pages: int, now: float, arriving: Sequence[Node] = ()) -> bool:
        """As in ``Movement``; what is above nodes that are about to arrive in the tier stays."""
        missing = pages - tier.pool.free
        if missing <= 0:
            return True
        if missing > tier.evictable_pages:
            return False
        index, lower, others = tier.index, tier.lower, self._others
        fixed = self.idle_above(arriving, index) if arriving else []
        if missing > tier.evictable_pages - sum([node.pages for node in fixed]):
            return False
        self._fix(fixed, tier)
        moving, tail = self.moving[index], 0
        for victim in tier.eviction.victims(now):
            if victim.state.count(ABSENT) != others:
                missing -= self.evict_copy(victim, tier, missing)
            elif lower is None or not lower.placement.after_eviction(victim, now):  # type: ignore[union-attr]
                missing -= self.drop(victim, tier, missing)
            else:
                size = victim.pages
                if size > missing:
                    if self._heir(victim, lower):
                        tail, missing = missing, 0
                        break
                    self.cut(victim, size - missing)
                    size = missing
                self._leave(victim, tier, lower)
                moving.append(victim)
                missing -= size
            if not missing:
                break
        self._unfix(fixed, tier)
        if lower is not None and (moving or tail):
            if tail:
                self._sink_tail(victim, tail, tier, lower, now)
            self.sink(tier, lower, now)
        return not missing

    @staticmethod
    def idle_above(nodes: Sequence[Node], index: int) -> list[Node]:
        """Copies in a tier that nothing pins, but that are above one of ``nodes``."""
        seen: dict[Node, None] = {}
        for node in nodes:
            parent = node.parent
            while parent is not None and parent not in seen:
                seen[parent] = None
                parent = parent.parent
        return [node for node in seen if node.state[index] == READY and not node.pins[index]]

    @staticmethod
    def _fix(nodes: list[Node], tier: Tier) -> None:
        """Keep idle copies in a tier for a while."""
        for node in nodes:
            node.pins[tier.index] = 1
            tier.evictable_pages -= node.pages

    @staticmethod
    def _unfix(nodes: list[Node], tier: Tier) -> None:
        index = tier.index
        for node in nodes:
            left = node.pins[index] = node.pins[index] - 1
            if not left:
                tier.evictable_pages += node.pages
                if not node.kids[index]:
                    tier.on_evictable(node)

    def evict_copy(self, node: Node, tier: Tier, pages: int) -> int:
        """Evict so many pages of a node that another tier has, or all that it has. Returns how many."""
        size = node.pages
        if size > pages:
            if self._free_tail(node, tier, pages):
                return pages
            self.cut(node, size - pages)
            size = pages
        self.free(node, tier)
        if not self.is_offering and not any(node.pins):
            self.merge(node)
        return size

    def drop(self, node: Node, tier: Tier, pages: int) -> int:
        """Evict so many pages of a node that no other tier has or gets, or all that it has. Returns how many."""
        size = node.pages
        if size > pages:
            if not node.children and not self._hears_cuts:
                self.trim(node, tier, pages)
                self.counts.dropped_pages += pages
                return pages
            self.cut(node, size - pages)
            size = pages
        if node.children:
            self._forget_below(node)
            self.drop_descendants(node)
        self.counts.dropped_pages += size
        self.free(node, tier)
        return size

    def _forget_below(self, node: Node) -> None:
        """What moves and is below a node that is about to be dropped arrives nowhere. It counts as written all the same."""
        below = set(node.descendants())
        for tier, moving in zip(self.tiers, self.moving, strict=True):
            for other in below.intersection(moving):
                moving.remove(other)
                self._call_back(other, tier)
                self.counts.written_pages += other.pages
                tier.lower.inserted_pages += other.pages  # type: ignore[union-attr]

    @staticmethod
    def _call_back(node: Node, tier: Tier) -> None:
        """A node that has left a tier does not arrive in the one below."""
        node.state[tier.index] = ABSENT
        node.parent.kids[tier.index + 1] -= 1  # type: ignore[union-attr]

    def _leave(self, node: Node, tier: Tier, lower: Tier) -> None:
        """Take an evictable node out of a tier; it arrives in the lower one at the end of the pass."""
        index, parent, pages = tier.index, node.parent, node.pages
        assert parent is not None
        node.state[index] = LEAVING
        tier.evictable_pages -= pages
        tier.evicted_pages += pages
        tier.pool.give(node.slots[index])
        if tier.on_remove:
            tier.on_remove(node)
        kids = parent.kids
        kids[lower.index] += 1
        left = kids[index] = kids[index] - 1
        if not left and parent.state[index] == READY and not parent.pins[index]:
            tier.on_evictable(parent)

    def sink(self, tier: Tier, lower: Tier, now: float) -> None:
        """Bring the victims of a pass to the tier below; what finds no room there is dropped, the first victims first."""
        index, below, pool = tier.index, lower.index, lower.pool
        nodes = self.moving[index]
        while not self.make_room(lower, sum([node.pages for node in nodes]), now, nodes):
            node = nodes.pop(0)
            self.counts.no_room_pages += node.pages
            self.counts.dropped_pages += node.pages
            self.drop_descendants(node)
            self._call_back(node, tier)
            self.tree.remove(node)
        if not nodes:
            return
        self.moving[index] = []
        for node in nodes:
            node.state[index] = ABSENT
            node.slots[below] = pool.take(node.pages)
        if self.held is None:
            self._arrive_all(nodes, lower, now)
            return
        self.held[below] += nodes
        for node in nodes:
            node.state[below] = INCOMING
            self.pin(node, below)

    def _hold(self) -> list[list[Node]]:
        """From now on nothing arrives, so that it cannot be evicted again, until ``_land``."""
        held: list[list[Node]] = [[] for _ in self.tiers]
        self.held = held
        return held

    def _land(self, now: float, decided: Sequence[list[Node]] = ([], [], [])) -> None:
        """What was held arrives, and then the copies that were decided on, by tier, in the lowest one first."""
        held, self.held = self.held, None
        for tier in reversed(self.tiers[CPU:]):
            index = tier.index
            written = self._with_uppers(decided[index], index)
            if held is not None and (kept := self._with_uppers(held[index], index)):
                pages = sum([node.pages for node in kept if node.state[index] != INCOMING])
                tier.inserted_pages += pages
                self.counts.written_pages += pages
                self._arrive_all([*(node for node in kept if node.state[index] == INCOMING), *written], tier, now, kept)
            elif written:
                self._arrive_all(written, tier, now)

    def _arrive_all(self, nodes: list[Node], tier: Tier, now: float, pinned: Sequence[Node] = ()) -> None:
        """Nodes that have slots in a tier, and that their parents count there, come from the tier above.

        ``pinned`` have been kept there until now.
        """
        index, on_evictable, on_insert = tier.index, tier.on_evictable, tier.on_insert
        pages = evictable = 0
        for node in nodes:
            pages += node.pages
            node.state[index] = READY
            if on_insert:
                on_insert(node, now)
            if not node.pins[index]:
                evictable += node.pages
                if not node.kids[index]:
                    on_evictable(node)
        tier.evictable_pages += evictable
        tier.inserted_pages += pages
        self.counts.written_pages += pages
        for node in pinned:
            self.unpin(node, index)
        lower = tier.lower
        if lower is not None and lower.after_use:
            self.is_offering = True
            if lower.wanted_pages:
                written = self._decide_prompt(nodes[-1], tier, lower, now)
            else:
                written = self._decide_offers(self.parents_first(nodes), tier, lower, now)
            self.is_offering = False
            if written:
                self._arrive_all(self._with_uppers(written, lower.index), lower, now)
        for node in nodes:
            if node.children:
                self.merge(node)

    @staticmethod
    def _with_uppers(nodes: list[Node], index: int) -> list[Node]:
        """The nodes, each behind what was cut off it while it was waiting to arrive in a tier: another tier evicted its rest."""
        if all(node.parent.state[index] != INCOMING for node in nodes):  # type: ignore[union-attr]
            return nodes
        seen, whole = set(nodes), []
        for node in nodes:
            uppers, upper = [], node.parent
            while upper is not None and upper.state[index] == INCOMING and upper not in seen:
                uppers.append(upper)
                seen.add(upper)
                upper = upper.parent
            whole += [*reversed(uppers), node]
        return whole

    # --- the tails of nodes ------------------------------------------------------------------------------------------

    def _heir(self, node: Node, lower: Tier) -> Node | None:
        """The child, in the lower tier only, that the node's last pages become a part of when they move there.

        None if they could go on from there, which the child has not.
        """
        children = node.children
        if len(children) != 1 or self._hears_cuts or lower.lower is not None and lower.lower.after_use:
            return None
        (child,) = children.values()
        state = child.state
        if state[lower.index] != READY or state.count(ABSENT) != self._others or not is_same_history(node, child):
            return None
        return None if any(node.pins) or any(child.pins) else child

    def _sink_tail(self, node: Node, tail: int, tier: Tier, lower: Tier, now: float) -> None:
        """Bring the last pages of a pass's last victim to the tier below, if there is room for all that the pass evicts.

        They pass to the heir, or move with the other victims as a node of their own.
        """
        moving = self.moving[tier.index]
        fits = self.make_room(lower, tail + sum([other.pages for other in moving]), now, [*moving, node])
        heir = self._heir(node, lower) if fits else None
        if heir is None:
            self.cut(node, node.pages - tail)
            self._leave(node, tier, lower)
            moving.append(node)
            return
        index, below = tier.index, lower.index
        node.slots[index], freed = tier.pool.split(node.slots[index], node.pages - tail)
        tier.pool.give(freed)
        tier.evictable_pages -= tail
        tier.evicted_pages += tail
        heir.slots[below] = lower.pool.join(lower.pool.take(tail), heir.slots[below])
        lower.evictable_pages += tail
        lower.inserted_pages += tail
        self.counts.written_pages += tail
        self.tree.shift(node, heir, tail)

    def _free_tail(self, node: Node, tier: Tier, pages: int) -> bool:
        """Free the last pages' copies in one tier; with those in others they pass to a child that has the same ones."""
        index, children = tier.index, node.children
        if len(children) != 1 or self._hears_cuts or self.is_offering:
            return False
        (child,) = children.values()
        state = node.state.copy()
        state[index] = ABSENT
        if child.state != state or LEAVING in state or INCOMING in state or not is_same_history(node, child):
            return False
        if any(node.pins) or any(child.pins):
            return False
        for other in self.tiers:
            at = other.index
            if node.state[at]:
                node.slots[at], tail = other.pool.split(node.slots[at], node.pages - pages)
                if at == index:
                    other.pool.give(tail)
                else:
                    child.slots[at] = other.pool.join(tail, child.slots[at])
        tier.evictable_pages -= pages
        tier.evicted_pages += pages
        self.tree.shift(node, child, pages)
        return True

    # --- copies to the tier below ------------------------------------------------------------------------------------

    @staticmethod
    def _path_without_copy(node: Node, index: int) -> list[Node]:
        """The nodes from the root down to ``node`` that a tier lacks."""
        path = []
        while node.parent is not None:
            if not node.state[index]:
                path.append(node)
            node = node.parent
        path.reverse()
        return path

    def _decide_offers(self, nodes: list[Node], tier: Tier, lower: Tier, now: float) -> list[Node]:
        """Give slots below to nodes that the policy wants there, that overtake no parent and that there is room for."""
        written: list[Node] = []
        for node in nodes:
            assert lower.after_use is not None
            if not self.may_follow(node, tier, lower) or not lower.after_use(node, now):
                continue
            if not self.make_room(lower, node.pages, now, written):
                self.counts.no_room_pages += node.pages
            elif node.state[tier.index] == READY:
                self._take_slots(node, lower)
                written.append(node)
        return written

    def _decide_prompt(self, node: Node, tier: Tier, lower: Tier, now: float) -> list[Node]:
        """Give slots below to all that the policy wants there of the prompt at hand, which ends with ``node``, or to nothing."""
        if self._prompt is None:
            return []
        nodes = self.wanted_nodes(node, self._prompt, tier, lower, now)
        pages = sum([node.pages for node in nodes])
        if not self.make_room(lower, pages, now, nodes):
            self.counts.no_room_pages += pages
            return []
        for node in nodes:
            self._take_slots(node, lower)
        return nodes

    @staticmethod
    def _take_slots(node: Node, tier: Tier) -> None:
        """There is room for a copy that is about to arrive."""
        assert node.parent is not None
        node.state[tier.index] = INCOMING
        node.slots[tier.index] = tier.pool.take(node.pages)
        node.parent.kids[tier.index] += 1

    def write_early(self, now: float) -> None:
        held = self._hold()
        for tier in self.early:
            lower = tier.lower
            assert lower is not None
            self.is_offering = True
            for node in self.early_victims(tier, now):
                if node.state[tier.index] != READY:
                    continue
                if not self.make_room(lower, node.pages, now, [node]):
                    self.counts.no_room_pages += node.pages
                    break
                self._take_slots(node, lower)
                self.pin(node, lower.index)
                held[lower.index].append(node)
            self.is_offering = False
        self._land(now)

    # --- reads from below --------------------------------------------------------------------------------------------

    def load(self, lease: Lease, now: float) -> list[Transfer]:
        last, lease.loading = lease.loading, None
        if last is None:
            return NO_TRANSFERS
        nodes = self._path_between(lease.node, last)
        read = self._read_disk_now(nodes, now)
        gpu = self.gpu
        lease.loaded_disk_pages = sum([node.pages for node in read])
        lease.loaded_pages = 0
        for node in nodes:
            mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
            self.add_copy(node, gpu, READY, mine)
            node.pins[GPU] += 1
            lease.loaded_pages += node.pages
            if gpu.on_insert:
                gpu.on_insert(node, now)
            lease.node = node
        gpu.inserted_pages += lease.loaded_pages
        self.counts.loaded_pages += lease.loaded_pages
        lease.rest = split_runs(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]
        for tier in self.tiers[CPU:]:
            self.unpin(last, tier.index)
        self._keep_one(read, DISK)
        self._keep_one(nodes, CPU)
        for node in nodes:
            self.merge(node)
        return NO_TRANSFERS

    def _read_disk_now(self, nodes: list[Node], now: float) -> list[Node]:
        """Bring to the CPU what only the disk has; ``nodes`` is cut short where there is no room. Returns what was read."""
        cpu = self.tiers[CPU]
        room = cpu.pool.free + cpu.evictable_pages
        read: list[Node] = []
        pages = 0
        for at, node in enumerate(nodes):
            if node.state[CPU] != READY:
                if pages + node.pages > room:
                    del nodes[at:]
                    break
                pages += node.pages
                read.append(node)
        if not read:
            return read
        self.make_room(cpu, pages, now)
        for node in read:
            self.add_copy(node, cpu, READY, cpu.pool.take(node.pages))
            if not node.pins[CPU]:
                cpu.evictable_pages += node.pages
            if cpu.on_insert:
                cpu.on_insert(node, now)
        cpu.inserted_pages += pages
        self.counts.fetched_pages += pages
        return read

    def _keep_one(self, nodes: list[Node], index: int) -> None:
        """Pages that moved up leave the tier, if its policy keeps one copy only."""
        if not nodes or self.tiers[index].placement.keeps_loaded:  # type: ignore[union-attr]
            return
        tier = self.tiers[index]
        for node in reversed(nodes):
            if node.state[index] == READY and not node.pins[index]:
                self.free(node, tier)

    def fetch(self, lease: Lease, pages: int, now: float) -> list[Transfer]:
        nodes = self._first_on_disk(lease, pages)
        if not nodes:
            return NO_TRANSFERS
        last = nodes[-1]
        for tier in self.tiers:
            self.pin(last, tier.index)
        self.expect(last, now)
        fits = self.make_room(self.tiers[CPU], sum([node.pages for node in nodes]), now)
        read = self._read_disk_now(nodes, now) if fits else []
        for tier in self.tiers:
            self.unpin(last, tier.index)
        self._keep_one(read, DISK)
        for node in read:
            self.merge(node)
        if not fits:
            return NO_TRANSFERS
        return [Transfer(self.tiers[DISK], self.tiers[CPU], read, done=True, arrived_pages=sum([node.pages for node in read]))]
