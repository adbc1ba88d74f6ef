"""How many KV events a shadow takes in a second on one core: an engine's tree and three ghosts, on made-up streams of a vLLM.

    chats      on a GPU of 20,000 blocks, which is soon full: blocks are removed one by one, as vLLM tells it, prompts are stored
               at once and answers block by block
    questions  short ones about 200 texts, which all fit, with answers that fill no block: each event is a request

Prints events, those that store blocks, and requests per CPU second, of the tree, the ghosts and the score alone, and of the whole
command ``kvsim shadow`` on a recording of the stream, its start included.

    python experiments/speed/shadow.py [REQUESTS]
"""

import resource
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import process_time

from kvsim.engine.collector import seldom_collecting
from kvsim.kv_events.dialects import dialect_named, encode
from kvsim.kv_events.messages import BlockRemoved, BlockStored, Event, EventBatch
from kvsim.kv_events.recorded import Message, write_recorded
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


def chats(requests: int) -> list[EventBatch]:
    """Return the events of so many requests, 60% of them turns of earlier conversations."""
    random, engine, sessions = Random(0), Engine(), list[list[int]]()
    systems = [fresh(random, 60) for _ in range(20)]
    for _ in range(requests):
        is_turn = bool(sessions) and random.random() < 0.6
        before = sessions.pop(random.randrange(len(sessions))) if is_turn else random.choice(systems)
        path = before + fresh(random, random.randint(5, 120))
        answer = fresh(random, random.randint(2, 30))
        engine.serve(path, answer)
        sessions = [*sessions, path + answer][-SESSIONS:]
    return engine.batches


def questions(requests: int) -> list[EventBatch]:
    """Return the events of so many requests, each of which is an event."""
    random, engine = Random(1), Engine()
    texts = [fresh(random, 10) for _ in range(200)]
    for _ in range(requests):
        engine.serve(random.choice(texts) + fresh(random, 1), [])
    return engine.batches


def fresh(random: Random, blocks: int) -> list[int]:
    """Return blocks that nobody has had."""
    return [random.getrandbits(40) for _ in range(blocks)]


def ghost(*overrides: str) -> Plan:
    """Return the plan of a ghost."""
    given = [f"page_tokens={PAGE_TOKENS}", *overrides]
    config, choices = compose_with_choices(given)
    return build_run(config, command="replay", overrides=given, choices=choices)


def of_parts(batches: list[EventBatch]) -> tuple[float, int]:
    """Return the CPU seconds of the tree, the ghosts and the score, and the number of requests."""
    shadow = Shadow({name: ghost(*overrides) for name, overrides in GHOSTS.items()}, PAGE_TOKENS, ShadowSettings())
    began_s = process_time()
    with seldom_collecting():
        for batch in batches:
            shadow.event("engine", batch)
        shadow.flush()
    return process_time() - began_s, shadow.snapshot().requests


def of_command(batches: list[EventBatch]) -> float:
    """Return the CPU seconds of ``kvsim shadow`` with these ghosts on a recording."""
    vllm, (engine, *others) = dialect_named("vllm"), GHOSTS.items()
    ghosts = ", ".join(f'{name}: "{" ".join(overrides)}"' for name, overrides in others)
    with TemporaryDirectory() as folder:
        recording = Path(folder) / "events.gz"
        write_recorded(recording, (Message(one.ts_s, number, 0, b"", encode(one, vllm)) for number, one in enumerate(batches)))
        words = [
            f"events={recording}",
            f"page_tokens={PAGE_TOKENS}",
            *engine[1],
            f"shadow.ghosts={{{ghosts}}}",
            f"output={folder}",
        ]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "kvsim", "shadow", *words, f"output={folder}"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(requests: int = 3000) -> None:
    for name, batches in (("chats", chats(requests)), ("questions", questions(5 * requests))):
        events = [event for batch in batches for event in batch.events]
        storing = sum(isinstance(event, BlockStored) for event in events)
        parts_s, seen = of_parts(batches)
        print(f"{name}: {len(events):,} events, {storing:,} of them storing blocks, {seen:,} requests, {len(GHOSTS)} ghosts")
        for what, took_s in (("parts", parts_s), ("command", of_command(batches))):
            rates = len(events) / took_s, storing / took_s, seen / took_s
            print(f"  {what}: " + "{:,.0f} events, {:,.0f} of them storing, {:,.0f} requests per CPU second".format(*rates))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
