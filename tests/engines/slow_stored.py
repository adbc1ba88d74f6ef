"""A slow model of SGLang with host memory and storage in time: prompts only, and the loop without overlap.

A step computes what a pass has admitted, and ends with all of it. Nothing is counted; slots that are in no node are a number.
"""

from itertools import count
from typing import Any

from kvsim.core.request import Request
from tests.engines.slow_storage import NEVER, Asked, Kept, SlowStorage, Waiting
from tests.engines.slow_unified import Part, SlowNode


class SlowStored(SlowStorage):
    def __init__(self, gpu: int, cpu: int, disk: int, **settings: Any) -> None:
        super().__init__(gpu, cpu, disk, **settings)
        self.copy_steps = 10**9
        self.landing: list[tuple[float, list[Part]]] = []
        self.rising: list[tuple[float, Part]] = []
        self.answers: list[Asked] = []
        self.released: list[int] = []
        self.passes = 0
        self.queue: list[Waiting] = []
        self.written_back: list[int] = []

    # --- questions ---------------------------------------------------------------------------------------------------------

    def ask(self, one: Waiting) -> None:
        path = self.find(one.sought)
        one.found = path[-1].end if path else 0
        if one.found == len(one.sought) or path and not path[-1].on_host:
            return
        one.due = None
        if one.expired or one.asked is not None:
            return
        span = len(one.sought) - one.found
        if span * self.page_tokens < self.min_tokens:
            return
        if self.in_flight >= self.limit:
            one.due = 0
            return
        asked = Asked(one, one.found, span, (path[-1].path, path[-1].start) if path else None)
        self.kept += [asked.part] if asked.part else []
        if self.unmatched:
            asked.span = self.room(asked, span)
            if not asked.span:
                self.kept = [part for part in self.kept if part is not asked.part]
                return
        one.asked = asked
        self.in_flight += asked.span
        self.answers.append(asked)
        if self.unmatched:
            self.begin(asked, asked.span, span)

    def room(self, asked: Asked, pages: int) -> int:
        """Make room for so many pages, or for as many as the host can give up."""
        could = self.host_free()
        if could < pages:
            for node in self.nodes:
                above = asked.part is not None and asked.part[0][: node.end] == node.path
                if node.on_host and not node.on_gpu and not above and not self.is_kept(node):
                    could += node.size
            doubles = [node for node in self.both if node.on_gpu and node.on_host and not self.is_kept(node)]
            could += sum(node.size for node in doubles if self.writes_back)
        wanted = min(pages, could)
        if wanted * self.page_tokens < self.min_tokens:
            return 0
        if self.host_free() < wanted:
            self.make_host_room(wanted)
        return min(wanted, self.host_free())

    def begin(self, asked: Asked, room: int, counted: int) -> None:
        here = self.pages(asked.owner.sought, asked.first, len(asked.owner.sought))
        pages = min(room, self.leading(here))
        if pages < counted and pages * self.page_tokens < self.min_tokens:
            pages = 0
        self.slots += room
        self.released += [room - pages] if room > pages else []
        asked.pages = asked.slots = pages
        if pages:
            asked.reading = True
            self.reads.append(asked)
            if len(self.reads) == 1:
                self.start_read()

    def answer(self, asked: Asked) -> None:
        if asked.reading:
            return
        one = asked.owner
        if one.asked is asked:
            stored = self.leading(self.pages(one.sought, asked.first, len(one.sought)))
            room = self.room(asked, stored) if stored and not self.unmatched else 0
            if room:
                self.begin(asked, room, stored)
            if not asked.reading:
                self.retire(one)
                one.due = 0

    def retire(self, one: Waiting) -> None:
        assert one.asked is not None
        self.kept = [part for part in self.kept if part is not one.asked.part]
        self.in_flight -= one.asked.span
        one.asked = None

    def enter(self, asked: Asked) -> None:
        one, at = asked.owner, asked.first
        pages = one.sought[: at + asked.arrived]
        for node in self.nodes:
            if asked.part and node.path == asked.part[0]:
                self.touch(node)
        had = 0
        while (node := self.child_touched(pages, at)) is not None:  # type: ignore[assignment]
            had += node.size if node.on_host or self.writes_back else 0
            node.on_host, at = node.on_host or not self.writes_back, node.end
        if at < len(pages):
            new = SlowNode(pages, at, next(self.clock))
            new.on_host = True
            self.nodes.append(new)
        if asked.arrived > had:
            one.first, one.brought = asked.first + had, asked.arrived - had
        self.slots -= asked.arrived
        asked.slots -= asked.arrived
        self.retire(one)

    def retry(self) -> None:
        self.passes += 1
        pending = [one for one in self.queue if one.due is not None]
        if self.queue and self.queue[0].due is not None:
            self.queue[0].due = None
            pending = pending[1:]
        if not any(one.due is not None and one.due <= self.passes for one in pending):
            return
        ready = []
        for one in pending:
            one.due = one.due or self.passes + 8
            if one.retries >= 8:
                one.due = None
            elif one.due <= self.passes:
                one.due = None
                ready.append(one)
        for one in ready:
            one.retries += 1
            self.ask(one)

    # --- a pass ------------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        if self.unsent:
            pages = sum(len(path) - start for path, start in self.unsent)
            self.down_free = max(self.now, self.down_free) + self.host_s * pages
            self.landing.append((self.down_free, self.unsent))
            self.unsent = []

    def acknowledge(self) -> None:
        while self.landing and self.landing[0][0] <= self.now:
            for part in self.landing.pop(0)[1]:
                self.locks.remove(part[0])
                self.to_store += self.parts_of(part)
        while self.rising and self.rising[0][0] <= self.now:
            part = self.rising.pop(0)[1]
            self.locks.remove(part[0])
            self.loads = [load for load in self.loads if load[1] is not part]
            for node in sorted(self.nodes, key=lambda node: -node.end):
                if node.is_in(part) and self.writes_back:
                    self.register(node)

    def parts_of(self, part: Part) -> list[Part]:
        """A part, node by node from the top."""
        return [(node.path, node.start) for node in sorted(self.nodes, key=lambda node: node.end) if node.is_in(part)]

    def store_all(self) -> None:
        for part in self.to_store:
            kept = (part[0], part[1])
            self.kept.append(kept)
            self.writes.append(Kept(kept))
            if len(self.writes) == 1:
                self.start_write()
        self.to_store = []

    def host_copy(self, node: SlowNode) -> bool:
        copied = super().host_copy(node)
        if copied and self.writes_back:
            self.written_back.append(node.size)
        return copied

    def begin_pass(self, new: list[Waiting]) -> None:
        answers, self.answers = self.answers, []
        released, self.released = self.released, []
        read, self.read_done = self.read_done, []
        written, self.write_done = self.write_done, []
        for one in new:
            self.queue.append(one)
        for one in new:
            self.ask(one)
        self.send()
        self.acknowledge()
        self.store_all()
        for asked in answers:
            self.answer(asked)
        for asked in read:
            if asked.owner.asked is asked:
                self.enter(asked)
            self.released += [asked.slots] if asked.slots else []
        for write in written:
            self.kept = [part for part in self.kept if part is not write.part]
        self.slots -= sum(released)
        self.retry()

    def is_ready(self, one: Waiting) -> bool:
        asked = one.asked
        if asked is None:
            return True
        if self.stop != "best_effort":
            if not one.polled:
                wait_s = self.base_s + 0.25 * asked.span * self.page_tokens / 1024
                one.polled, one.deadline = True, self.now + wait_s if self.stop == "timeout" else NEVER
            if self.now < one.deadline:
                return False
            one.expired = True
        asked.stopped = True
        if asked.reading:
            self.enter(asked)
        else:
            self.retire(one)
            one.due = None if one.expired else 0
        return True

    def admit(self) -> list[Waiting]:
        admitted: list[Waiting] = []
        promised, size, self.has_asked_again = 0, self.page_tokens, False
        for one in list(self.queue):
            if not self.is_ready(one):
                continue
            path = self.find(one.sought)
            on_gpu = [node for node in path if node.on_gpu]
            l1, found = sum(node.size for node in on_gpu), path[-1].end if path else 0
            if found < one.found:
                if one.retries < 8:
                    one.retries += 1
                    self.has_asked_again = True
                    self.ask(one)
                    continue
                one.found = found
            loose = sum(node.size for node in on_gpu if not self.is_locked(node))
            if one.tokens - l1 * size + 1 + size >= (self.available() - loose) * size - promised:
                break
            self.queue.remove(one)
            one.due = None
            self.locks.append(one.prompt[:l1])
            loaded = self.load(one.sought, l1, found) if found > l1 else 0
            self.locks.remove(one.prompt[:l1])
            self.locks.append(one.prompt[: l1 + loaded])
            one.kept = l1 + loaded
            used = max(0, min(one.kept, one.first + one.brought) - max(l1, one.first)) if loaded else 0
            one.hits = (l1, loaded - used, used)
            promised += -(-(one.tokens - one.kept * size) // size) * size + size + 1
            admitted.append(one)
            if self.available() * size - promised <= 0:
                break
        return admitted

    def available(self) -> int:
        return self.gpu_free() + sum(node.size for node in self.nodes if node.on_gpu and not self.is_locked(node))

    def compute(self, admitted: list[Waiting]) -> None:
        """Make the step of what has been admitted, up to its end."""
        size = self.page_tokens
        new_tokens = sum(one.tokens - one.kept * size for one in admitted)
        loading = [load for load in self.loads if all(load[1] is not part for _, part in self.rising)]
        before = sum(self.written_back)
        self.make_room(-(-new_tokens // size) + len(admitted))
        self.own_pages += sum(-(-one.tokens // size) - one.kept for one in admitted)
        if self.gpu_free() < 0:
            raise OverflowError
        began = max(self.now, self.down_free) if self.written_back else self.now
        load_begins = max(self.up_free, began + self.host_s * before if before else self.now)
        if self.written_back:
            self.down_free = began = began + self.host_s * sum(self.written_back)
            self.written_back = []
        end = began + new_tokens
        if loading:
            pages = sum(len(path) - start for _, (path, start) in loading)
            self.up_free = load_begins + self.host_s * pages
            self.rising += [(self.up_free, part) for _, part in loading]
            first = load_begins + self.host_s * pages / self.layers
            end = max(end, first + new_tokens, self.up_free + new_tokens / self.layers)
        self.advance(began)
        self.store_all()
        self.advance(end)
        for one in admitted:
            one.token_s = end
            self.insert(one.prompt, one.kept, 0)
            self.own_pages -= -(-one.tokens // size) - len(one.prompt)
            self.locks.remove(one.prompt[: one.kept])
        self.send()

    def play(self, requests: list[Request]) -> list[Waiting]:
        """Serve requests, whose answers have one token. Returns what became of each."""
        made = [Waiting(request, self.page_tokens) for request in requests]
        coming = sorted(made, key=lambda one: one.arrival_s)
        for _ in count():
            new = [one for one in coming if one.arrival_s <= self.now]
            coming = coming[len(new) :]
            self.begin_pass(new)
            if admitted := self.admit():
                self.compute(admitted)
                continue
            if self.written_back:
                self.down_free = max(self.now, self.down_free) + self.host_s * sum(self.written_back)
                self.written_back = []
                self.advance(self.down_free)
            self.store_all()
            if not (coming or self.queue):
                return made
            if self.answers or self.released or self.read_done or self.write_done or self.has_asked_again:
                continue
            if any(one.due is not None for one in self.queue):
                continue
            times = [one.arrival_s for one in coming[:1]] + [end for end, _ in [*self.landing, *self.rising]]
            times += [one.deadline for one in self.queue if one.asked is not None and one.deadline > self.now]
            self.advance(min([*times, self.read_end, self.write_end]))
        return made
