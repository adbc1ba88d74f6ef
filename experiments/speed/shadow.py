"""How many KV events a shadow takes in a second on one core: an engine's tree and three ghosts, on a made-up vLLM's stream.

The stream is that of chats on a GPU of 20,000 blocks, which is soon full: blocks are removed one by one, as vLLM tells it,
prompts are stored at once and answers block by block. Prints events, and those that store blocks, per CPU second.

    python experiments/speed/shadow.py [REQUESTS]
"""

import sys
from collections import OrderedDict
from random import Random
from time import process_time

from kvsim.kv_events.messages import BlockRemoved, BlockStored, Event, EventBatch
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import compose_with_choices
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.shadow import Shadow

PAGE_TOKENS = 16
CAPACITY_BLOCKS = 20_000
SESSIONS = 200
GHOSTS = {
    "engine": ("preset=vllm", f"tiers.gpu.capacity={CAPACITY_BLOCKS}pages"),
    "gpu_2x": ("preset=vllm", f"tiers.gpu.capacity={2 * CAPACITY_BLOCKS}pages"),
    "cpu": (
        "preset=vllm_offload",
        f"tiers.gpu.capacity={CAPACITY_BLOCKS}pages",
        f"tiers.cpu.capacity={3 * CAPACITY_BLOCKS}pages",
    ),
}


class Engine:
    """Stores blocks and evicts the one used longest ago, telling of both."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.at_s = 0.0
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, path: list[int], answer: list[int]) -> None:
        """Serve a prompt of these blocks, and the blocks of its answer one after another."""
        hit = next((at for at, block in enumerate(path) if block not in self._held), len(path))
        for block in path[:hit]:
            self._held.move_to_end(block)
        self.at_s += 0.2
        self._store(path[hit:], path[hit - 1] if hit else None)
        for before, block in zip([path[-1], *answer], answer, strict=False):
            self.at_s += 0.01
            self._store([block], before)

    def _store(self, blocks: list[int], parent: int | None) -> None:
        events: list[Event] = []
        while len(self._held) + len(blocks) > CAPACITY_BLOCKS:
            events.append(BlockRemoved((self._held.popitem(last=False)[0],), "GPU"))
        self._held.update(dict.fromkeys(blocks))
        if blocks:
            tokens = tuple(block * 31 + at & 0xFFFF for block in blocks for at in range(PAGE_TOKENS))
            events.append(BlockStored(tuple(blocks), parent, tokens, PAGE_TOKENS, medium="GPU"))
        self.batches.append(EventBatch(self.at_s, tuple(events), 0))


def stream(requests: int) -> list[EventBatch]:
    """Return the events of so many requests, 60% of them turns of earlier conversations."""
    random, engine, sessions = Random(0), Engine(), list[list[int]]()

    def fresh(blocks: int) -> list[int]:
        return [random.getrandbits(40) for _ in range(blocks)]

    systems = [fresh(60) for _ in range(20)]
    for _ in range(requests):
        is_turn = bool(sessions) and random.random() < 0.6
        path = (sessions.pop(random.randrange(len(sessions))) if is_turn else random.choice(systems)) + fresh(
            random.randint(5, 120)
        )
        answer = fresh(random.randint(2, 30))
        engine.serve(path, answer)
        sessions = [*sessions, path + answer][-SESSIONS:]
    return engine.batches


def ghost(*overrides: str) -> Plan:
    """Return the plan of a ghost."""
    given = [f"page_tokens={PAGE_TOKENS}", *overrides]
    config, choices = compose_with_choices(given)
    return build_run(config, command="replay", overrides=given, choices=choices)


def main(requests: int = 3000) -> None:
    batches = stream(requests)
    shadow = Shadow({name: ghost(*overrides) for name, overrides in GHOSTS.items()}, PAGE_TOKENS, ShadowSettings())
    began_s = process_time()
    for batch in batches:
        shadow.event("engine", batch)
    shadow.flush()
    took_s = process_time() - began_s
    events = [event for batch in batches for event in batch.events]
    storing = sum(isinstance(event, BlockStored) for event in events)
    seen = shadow.snapshot()
    print(f"{len(events):,} events, {storing:,} of them storing blocks, {seen.requests:,} requests, {len(GHOSTS)} ghosts")
    rates = len(events) / took_s, storing / took_s, seen.requests / took_s
    print("{:,.0f} events, {:,.0f} of them storing, {:,.0f} requests per CPU second".format(*rates))
    print(f"{seen.memory_bytes / 2**20:,.0f} MiB by its own count")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
