"""SGLang's scheduler on one GPU, token by token and pass by pass: obvious and slow.

Rules are numbered as in the README of the recorded schedules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CLIP = 4096
Tokens = Any
"""An array of token ids."""


@dataclass(eq=False)
class Piece:
    """A node of the tree: its tokens, and the numbers of locks and of its last use."""

    key: Tokens
    parent: "Piece | None" = None
    children: dict[tuple[int, ...], "Piece"] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


@dataclass(eq=False)
class Prompt:
    """A request. ``ids`` are its prompt and its whole answer; ``known`` counts the tokens of the answer that have appeared."""

    index: int
    arrival_s: float
    prompt: int
    output: int
    declared: int
    ids: Tokens
    known: int = 0
    flying: int = 0
    kept: int = 0
    """Tokens that the tree holds for it."""
    memory: int = 0
    """Tokens that have memory, the tree's included."""
    filled: int = 0
    """End of the prompt tokens that the last batch with it computes."""
    node: Piece | None = None
    has_row: bool = False
    is_finished: bool = False
    cached: int = -1
    retractions: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    found: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.known


@dataclass(eq=False)
class Step:
    kind: str
    prefill: list[tuple[Prompt, int, int]]
    """(request, first token, token after the last)."""
    decode: list[tuple[Prompt, int]]
    """(request, entries before)."""
    lasts: list[bool]
    """Whether each prefill chunk is the last of its prompt."""
    generation: dict[Prompt, int]
    row: list[Any]


class SlowSGLang:
    def __init__(
        self,
        formula: Any,
        *,
        capacity: int,
        page: int = 1,
        chunk: int = 8192,
        max_running: int = 256,
        policy: str = "fcfs",
        overlap: bool = True,
        mixed: bool = False,
        conservativeness: float = 1.0,
        ignore_eos: bool = False,
        max_prefill: int = 16384,
        caches_answers: bool = True,
        is_old: bool = False,
    ) -> None:
        """``is_old``: as in SGLang 0.5.15, otherwise as in 0.5.23."""
        self.is_old = is_old
        self.formula, self.page, self.chunk, self.max_running = formula, page, chunk, max_running
        self.policy, self.overlap, self.mixed, self.ignore_eos = policy, overlap, mixed, ignore_eos
        self.max_prefill, self.caches_answers = max_prefill, caches_answers
        self.free = capacity // page * page
        self.clock = 0
        self.root = Piece(np.zeros(0, np.int64), locks=1)
        self.init_ratio = min(1.0, 0.7 * conservativeness)
        self.least_ratio = self.init_ratio * 0.14
        self.ratio = self.init_ratio
        self.queue: list[Prompt] = []
        self.running: list[Prompt] = []
        self.is_full = False
        self.chunked: Prompt | None = None
        self.last: Step | None = None
        """The last batch formed, None after a pass without one."""
        self.rows = 0
        self.ordered = 0
        self.steps: list[list[Any]] = []

    # --- the tree -----------------------------------------------------------------------------------------------------

    def whole(self, tokens: int) -> int:
        return tokens // self.page * self.page

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def head(self, ids: Tokens) -> tuple[int, ...]:
        return tuple(ids[: self.page].tolist())

    def split(self, node: Piece, at: int) -> Piece:
        upper = Piece(node.key[:at], node.parent, locks=node.locks, used=self.tick())
        assert node.parent is not None
        node.parent.children[self.head(node.key)] = upper
        node.key, node.parent = node.key[at:], upper
        upper.children[self.head(node.key)] = node
        return upper

    def walk(self, ids: Tokens) -> tuple[Piece, int]:
        now, node, done = self.tick(), self.root, 0
        ids = ids[: self.whole(len(ids))]
        while done < len(ids) and (child := node.children.get(self.head(ids[done:]))) is not None:
            child.used = now
            length = min(len(child.key), len(ids) - done)
            same = child.key[:length] == ids[done : done + length]
            agreed = length if same.all() else self.whole(int(same.argmin()))
            if agreed < len(child.key):
                child = self.split(child, agreed)
            node, done = child, done + agreed
            if agreed < length:
                break
        return node, done

    def insert(self, ids: Tokens) -> int:
        """Returns how many of these tokens the tree had."""
        ids = ids[: self.whole(len(ids))]
        node, done = self.walk(ids)
        if done < len(ids):
            node.children[self.head(ids[done:])] = Piece(ids[done:], node, used=self.tick())
        return done

    def lock(self, node: Piece | None, by: int) -> None:
        while node is not None:
            node.locks += by
            node = node.parent

    def pieces(self) -> list[Piece]:
        found, stack = [], list(self.root.children.values())
        while stack:
            found.append(stack.pop())
            stack += found[-1].children.values()
        return found

    def evictable(self) -> int:
        return sum(len(piece.key) for piece in self.pieces() if not piece.locks)

    def make_room(self, tokens: int) -> None:
        if self.free >= tokens:
            return
        goal = self.free + tokens if self.is_old else tokens
        leaves = [piece for piece in self.pieces() if not piece.locks and not piece.children]
        while self.free < goal and leaves:
            leaf = min(leaves, key=lambda piece: piece.used)
            leaves.remove(leaf)
            self.free += len(leaf.key)
            parent = leaf.parent
            assert parent is not None
            del parent.children[self.head(leaf.key)]
            if not parent.children and not parent.locks:
                leaves.append(parent)

    # --- what requests hold -------------------------------------------------------------------------------------------

    def own(self, one: Prompt) -> int:
        return self.rounded(one.memory) - one.kept

    def extend(self, one: Prompt, tokens: int) -> None:
        self.free -= self.rounded(tokens) - self.rounded(one.memory)
        one.memory = tokens

    def cache(self, one: Prompt, tokens: int) -> None:
        """Rules 11 and 12."""
        end = self.whole(tokens)
        self.keep(one, end)
        node, done = self.walk(one.ids[:end])
        assert done == end
        if tokens > one.prompt and not self.is_old:
            self.walk(one.ids[: one.prompt])
        self.lock(node, 1)
        self.lock(one.node, -1)
        one.node = node

    def keep(self, one: Prompt, end: int) -> None:
        had = self.insert(one.ids[:end])
        self.free += max(0, had - one.kept)
        one.kept = max(one.kept, end)

    def let_go(self, one: Prompt) -> None:
        self.free += self.own(one)
        self.lock(one.node, -1)
        one.node, one.kept, one.memory, one.has_row = None, 0, 0, False
        self.rows -= 1

    def finish(self, one: Prompt, now: float) -> None:
        """Rule 14."""
        one.is_finished, one.last_s = True, now
        known = min(one.memory, one.prompt + one.known) if self.is_old else one.prompt + one.known - 1
        end = self.whole(known if self.caches_answers else one.prompt)
        if end > one.kept:
            self.keep(one, end)
        elif self.is_old:
            self.walk(one.ids[:end])
        if not self.is_old:
            self.walk(one.ids[: one.prompt])
        self.let_go(one)

    # --- a pass -------------------------------------------------------------------------------------------------------

    def form(self) -> Step | None:
        if self.chunked is not None:
            self.cache(self.chunked, self.chunked.filled)
        if self.last is not None and self.last.kind != "decode":
            before = [one for one, *_ in self.last.prefill]
            joining = [one for one, is_last in zip(before, self.last.lasts, strict=True) if is_last]
            if self.last.kind == "mixed":
                before += [one for one, _ in self.last.decode]
                joining += [one for one, _ in self.last.decode]
            joining = [one for one in joining if not one.is_finished and one.node is not None]
            if len(joining) < len(before):
                self.is_full = False
            if joining:
                if not self.running:
                    self.is_full = False
                self.running += joining
        if not self.is_old:
            self.leave_finished()
        return self.form_prefill() or self.form_decode()

    def leave_finished(self) -> None:
        self.leave([one for one in self.running if one.is_finished])

    def leave(self, leaving: Sequence[Prompt]) -> None:
        if leaving:
            self.running = [one for one in self.running if one not in leaving]
            self.is_full = False
        if not self.running:
            self.is_full = False

    def declares(self, one: Prompt) -> int:
        return min(max(one.declared - one.known, 0), CLIP)

    def form_prefill(self) -> Step | None:
        if (self.is_full or not self.queue) and self.chunked is None:
            return None
        if self.chunked is None and self.is_crowded(0):
            self.is_full = True
            return None
        self.order()
        plan: list[tuple[Prompt, int, int]] = []
        lasts: list[bool] = []
        ratio = 1.0 if self.ignore_eos else self.ratio
        decodes = len(self.running) * self.mixed
        promised: float = decodes
        promised += sum([min(one.declared - one.known, CLIP) * ratio for one in self.running])
        rest = self.chunk - decodes if self.chunk > 0 else None
        budget = self.max_prefill - decodes

        def charge(one: Prompt, begin: int, end: int, is_last: bool) -> None:
            nonlocal promised, rest, budget
            tokens = self.rounded(end - begin)
            promised += tokens + self.page + min(one.declared, CLIP) * is_last
            budget -= tokens
            if rest is not None:
                rest -= tokens
            plan.append((one, begin, end))
            lasts.append(is_last)
            one.filled = end

        if (one := self.chunked) is not None:
            assert rest is not None
            room = int(self.free + self.evictable() - promised)
            most = rest if room <= 0 else min(rest, room)
            if most > 0:
                begin = one.filled
                end = min(one.tokens, begin + most)
                if end == one.tokens:
                    self.chunked = None
                charge(one, begin, end, end == one.tokens)
        checks = not self.is_old
        for one in list(self.queue):
            has_memory = self.free + self.evictable() - promised > 0
            if checks and has_memory and (budget <= 0 or rest is not None and rest <= 0):
                break
            checks = True
            if self.is_crowded(len(plan)):
                self.is_full = True
            if self.is_full:
                break
            node, found = self.walk(one.ids[: one.tokens - 1])
            missing = one.tokens - found
            need = missing + self.declares(one) + self.page
            self.lock(node, 1)
            if need >= self.free + self.evictable() - promised:
                self.is_full = bool(plan or self.running)
                self.lock(node, -1)
                break
            rounded, end = self.rounded(missing), one.tokens
            if rest is None:
                if plan and rounded >= budget:
                    self.lock(node, -1)
                    break
            elif rounded > rest:
                end = self.whole(found + self.whole(rest))
                if end <= found:
                    self.lock(node, -1)
                    break
                self.chunked = one
            one.node, one.kept, one.memory, one.has_row = node, found, found, True
            one.filled = found
            self.rows += 1
            if one.cached < 0:
                one.cached = found
            charge(one, found, end, end == one.tokens)
            if self.free + self.evictable() - promised <= 0:
                self.is_full = bool(plan or self.running)
                break
        if not plan:
            return None
        taken = [one for one, *_ in plan]
        self.queue = [one for one in self.queue if one not in taken]
        new = sum(end - begin for _, begin, end in plan)
        self.make_room(new + (len(plan) * self.page if self.page > 1 else 0))
        for one, _, end in plan:
            self.extend(one, end)
        assert self.free >= 0
        decode: list[tuple[Prompt, int]] = []
        if self.mixed and self.running:
            if self.is_old:
                self.leave_finished()
            self.leave_before_last()
            if self.running and self.has_decode_room(self.running):
                decode = self.take_decode(self.running)
                self.running, self.is_full = [], False
        return self.launch("mixed" if decode else "prefill", plan, decode, lasts)

    def is_crowded(self, admitted: int) -> bool:
        return len(self.running) + admitted >= self.max_running or self.rows >= self.max_running

    def launch(
        self, kind: str, prefill: list[tuple[Prompt, int, int]], decode: list[tuple[Prompt, int]], lasts: list[bool]
    ) -> Step:
        generation = {}
        for one, is_last in zip([one for one, *_ in prefill], lasts, strict=True):
            one.flying += is_last
            generation[one] = one.retractions
        for one, _ in decode:
            one.flying += 1
            generation[one] = one.retractions
        new = sum(end - begin for _, begin, end in prefill) + len(decode)
        requests = len(prefill) + len(decode)
        row = [kind, requests, new, len(decode), len(self.queue), len(self.running), self.free, self.evictable()]
        return Step(kind, prefill, decode, lasts, generation, [*row, self.ratio])

    # --- decode -------------------------------------------------------------------------------------------------------

    def leave_before_last(self) -> bool:
        """Rule 20."""
        if self.is_old:
            return False
        leaving = [one for one in self.running if one.flying and one.known + one.flying >= one.declared]
        self.leave(leaving)
        return bool(leaving)

    def has_decode_room(self, batch: Sequence[Prompt]) -> bool:
        need = sum(self.page for one in batch if one.memory % self.page == 0)
        self.make_room(need)
        return self.free >= need

    def take_decode(self, batch: Sequence[Prompt]) -> list[tuple[Prompt, int]]:
        self.make_room(len(batch) * self.page)
        taken = [(one, one.memory) for one in batch]
        for one in batch:
            self.extend(one, one.memory + 1)
        assert self.free >= 0
        return taken

    def form_decode(self) -> Step | None:
        if self.is_old:
            self.leave_finished()
        if not self.running:
            return None
        left = self.leave_before_last()
        if not self.running:
            return None
        if self.has_decode_room(self.running):
            self.ratio = max(self.ratio - (self.init_ratio - self.least_ratio) / 600, self.least_ratio)
        elif left:
            return None
        else:
            self.retract()
        return self.launch("decode", [], self.take_decode(self.running), [])

    def retract(self) -> None:
        """Rule 13."""
        order = sorted(self.running, key=lambda one: (one.known, -one.prompt), reverse=True)
        is_first = True
        while len(order) > 1 and (is_first or not self.has_decode_room(order)):
            is_first = False
            one = order.pop()
            self.let_go(one)
            self.make_room(len(order) * 20)
            one.retractions += 1
            one.flying = 0
            self.queue.append(one)
        assert self.has_decode_room(order), "a request does not fit alone"
        self.running, self.is_full = order, False
        known, declared = sum(one.known for one in order), sum(one.declared for one in order)
        self.ratio = min(1.0, (known + 20 * len(order)) / (declared + 1))

    # --- order --------------------------------------------------------------------------------------------------------

    def order(self) -> None:
        if not self.queue:
            return
        if self.policy == "fcfs" or self.policy == "lpm" and len(self.queue) > 128:
            if self.ordered % 32 == 0 and not self.is_old:
                for one in reversed(self.queue[:128]):
                    self.walk(one.ids[: one.tokens])
            self.ordered += 1
            return
        ends = {}
        heads: set[tuple[int, ...]] = set()
        behind = set()
        for one in self.queue:
            ends[one], one.found = self.walk(one.ids[: one.tokens])
            if one.found <= 32 and one.tokens >= 32:
                head = tuple(one.ids[:32].tolist())
                if head in heads:
                    behind.add(one)
                heads.add(head)
        if self.policy == "lpm":
            self.queue.sort(key=lambda one: (one in behind, 0 if one in behind else -min(one.found, one.tokens - 1)))
            return
        waiting = self.queue
        self.queue = []
        self.walk_down(self.root, [(one, ends[one]) for one in waiting])

    def walk_down(self, node: Piece, waiting: list[tuple[Prompt, Piece]]) -> None:
        def weight(piece: Piece) -> int:
            return sum(end is piece for _, end in waiting) + sum(weight(child) for child in piece.children.values())

        for child in sorted(node.children.values(), key=weight, reverse=True):
            self.walk_down(child, waiting)
        self.queue += [one for one, end in waiting if end is node]

    # --- time ---------------------------------------------------------------------------------------------------------

    def seconds(self, step: Step) -> float:
        formula = self.formula
        seconds = formula.fixed_s + formula.decode_request_s * len(step.decode)
        seconds += formula.prefill_token_s * sum(end - begin for _, begin, end in step.prefill)
        seconds += formula.chunk_context_s * sum((end - begin) * begin for _, begin, end in step.prefill)
        return float(seconds + formula.decode_context_s * sum(entries for _, entries in step.decode))

    def process(self, step: Step, now: float) -> None:
        done = [one for (one, *_), is_last in zip(step.prefill, step.lasts, strict=True) if is_last]
        for one in [*done, *[one for one, _ in step.decode]]:
            if step.generation[one] != one.retractions or one.is_finished:
                continue
            one.flying -= 1
            one.known += 1
            if one.known == 1:
                one.first_s = now
            if one.known >= one.output:
                self.finish(one, now)
            elif one in done:
                self.cache(one, one.tokens - 1)

    def run(self, prompts: Sequence[Prompt]) -> list[tuple[int, float, float, int]]:
        arriving, now = list(prompts), 0.0
        under_way: tuple[Step, float] | None = None
        while arriving or self.queue or self.running or self.last or under_way:
            while arriving and arriving[0].arrival_s <= now:
                self.queue.append(arriving.pop(0))
            self.last = step = self.form()
            if step is None and under_way is None and self.is_old and self.queue and not self.running:
                self.last = step = self.form()  # the first time, those that had ended still counted as running
            launched = None
            if step is not None:
                start = under_way[1] if under_way else now
                launched = step, start + self.seconds(step)
                self.steps.append([start, *step.row])
            elif under_way is None and not self.queue and not self.running:
                self.ratio = self.init_ratio
                if not arriving:
                    break
                now = max(now, arriving[0].arrival_s)
            else:
                assert under_way, "nothing fits"
            if not self.overlap:
                under_way, launched = launched, None
            if under_way is not None:
                now = under_way[1]
                self.process(under_way[0], now)
            under_way = launched
        return [(one.cached, one.first_s, one.last_s, one.retractions) for one in prompts]
