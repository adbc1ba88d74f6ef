"""What the study's servers are sent: conversations of a recorded trace, and generated sessions.

    python experiments/real_servers/workloads.py --trace mooncake_conversation_trace.jsonl.gz --output conversations.jsonl

writes the requests of some conversations of the Mooncake trace (arXiv 2407.00079), whole and in their order, since a stretch of a
few minutes has hardly a turn that continues another: conversations of at least four requests of at most 32,000 prompt tokens are
drawn at random (seed 0) until the next one would bring their different blocks above 450,000 tokens.
"""

import gzip
import json
import random
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_TOKENS = 512
LEAST_REQUESTS, LONGEST_TOKENS, DIFFERENT_TOKENS = 4, 32_000, 450_000

Row = dict[str, Any]


class Workload(NamedTuple):
    """A trace and how fast it is played."""

    name: str
    settings: Sequence[str]
    """The trace, as ``kvsim`` takes it."""
    speed: float


def workloads(conversations: Path) -> list[Workload]:
    """Return what each server is sent."""
    generated = (
        "trace=synthetic",
        "trace.seed=1",
        "trace.sessions=40",
        "trace.arrivals=open_loop",
        "trace.max_prompt_tokens=24000",
        "trace.mix.agent.weight=0.4",
        "trace.mix.agent.turns=6",
        "trace.mix.agent.message_tokens=800",
        "trace.mix.agent.answer_tokens=120",
        "trace.mix.chat.turns=3",
        "trace.mix.chat.answer_tokens=150",
    )
    recorded = ("trace=mooncake", f"trace.path={conversations}")
    return [Workload("conversations", recorded, 100.0), Workload("sessions", generated, 6.0)]


def conversations(rows: Sequence[Row]) -> list[Row]:
    """Return the requests of the conversations that the study plays, in the order of the trace.

    Requests are of one conversation if their first two blocks are the same: the first is mostly a system prompt of many.
    """
    by_start: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if len(row["hash_ids"]) > 1:
            by_start[tuple(row["hash_ids"][:2])].append(row)
    long = [start for start, turns in by_start.items() if len(turns) >= LEAST_REQUESTS and is_short(turns)]
    random.Random(0).shuffle(long)
    blocks: set[int] = set()
    chosen: list[Row] = []
    for start in long:
        more = blocks.union(*(row["hash_ids"] for row in by_start[start]))
        if len(more) * BLOCK_TOKENS > DIFFERENT_TOKENS:
            break
        blocks = more
        chosen += by_start[start]
    return sorted(chosen, key=lambda row: row["timestamp"])


def is_short(turns: Sequence[Row]) -> bool:
    return max(row["input_length"] for row in turns) <= LONGEST_TOKENS


def read_rows(path: Path) -> list[Row]:
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = conversations(read_rows(options.trace))
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.output}: {len(rows)} requests")


if __name__ == "__main__":
    main()
