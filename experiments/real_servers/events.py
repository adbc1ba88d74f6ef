"""Does kvsim's cache do what a running vLLM does, block by block? Its KV events, recorded, beside those of ``preset=vllm``.

``serve.py`` played the study's two workloads once more against vLLM 0.25.1, with 12,000 blocks of 16 tokens and
``--kv-events-config``, while every message of its events was recorded: ``events/WORKLOAD.gz``, from the reset of its cache on
(``kvsim.kv_events.recorded``). ``events/WORKLOAD.jsonl.gz`` is what the client saw, in
whole microseconds. Token ids are random numbers of the client's.

A block that the server stores or removes is matched if kvsim's cache does the same with it at most so many seconds earlier or
later (``kvsim.shadow.recorded_score``), given

    client    the client's record: requests are admitted, and overlap, as they did in the server
    events    nothing else: requests are those that the events tell of, one after another, as in ``kvsim shadow events=``

Claims:

1. every message of the server is read;
2. given the client's record, kvsim predicts every block that the server has stored and removed, and no other: in sessions, and
   in conversations, where the server preempts.

Exits with 1 if a claim fails.
"""

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec import msgpack
from workloads import conversations, read_rows, workloads

from kvsim.kv_events.codec import decode
from kvsim.kv_events.messages import EventBatch, EventError
from kvsim.kv_events.recorded import Message, read_recorded
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.report.servers.seen import moments_of
from kvsim.report.study import CONVERSATION, Claim, claim_table, option_parser, section, write_page
from kvsim.results.observed import ObservedRun
from kvsim.results.observed_file import read_observed
from kvsim.run.execute import load_trace
from kvsim.run.validating_server import shape_of
from kvsim.servers.prompts import PromptTokens
from kvsim.servers.settings import ServerSettings
from kvsim.servers.simulated import overrides_of
from kvsim.settings.configuration import compose_with_choices
from kvsim.shadow.live import ChainKeys
from kvsim.shadow.recorded_score import requests_of, score_recorded
from kvsim.shadow.snapshot import ScoreView, Share

HERE = Path(__file__).resolve().parent
KEYS = ChainKeys(b"")
CLIENT_WITHIN_S, EVENTS_WITHIN_S = (1.0, 5.0), (5.0, 120.0)
GHOSTS = '{gpu_2x: "tiers.gpu.capacity=2x", gpu_half: "tiers.gpu.capacity=0.5x"}'


class Read(NamedTuple):
    """A stream of messages, read."""

    batches: list[EventBatch]
    refused: int
    """Messages that could not be read."""
    lost: int
    """Sequence numbers that are missing."""
    fields: Counter[tuple[str, str, str]]
    """How often each kind of event has which field with what in it."""


class Found(NamedTuple):
    """What was found in a workload."""

    read: Read
    scores: dict[tuple[str, float], ScoreView]
    """By where requests are known from, and within how many seconds."""
    run: ObservedRun


def read_messages(messages: Iterable[Message]) -> Read:
    batches, refused, numbers, fields = list[EventBatch](), 0, list[int](), Counter[tuple[str, str, str]]()
    for message in messages:
        numbers.append(message.sequence)
        try:
            batches.append(decode(message.payload))
        except EventError:
            refused += 1
            continue
        for event in msgpack.decode(message.payload)[1]:
            fields[event["type"], "", ""] += 1
            fields.update((event["type"], name, what(value)) for name, value in event.items() if name != "type")
    lost = numbers[-1] - numbers[0] + 1 - len(numbers) if numbers else 0
    return Read(batches, refused, lost, fields)


def what(value: Any) -> str:
    """Return what is in a field: words, None and small numbers themselves."""
    if isinstance(value, list):
        return "list of " + " or ".join(sorted({type(one).__name__ for one in value}))
    return "number" if isinstance(value, int) and value > 1 << 31 else f"`{value}`"


def plan_of(words: Sequence[str]) -> Plan:
    config, choices = compose_with_choices(words)
    return build_run(config, command="simulate", overrides=words, choices=choices)


@cache
def sent(words: tuple[str, ...]) -> list[list[int]]:
    """Return the tokens of the prompts that the client has made of a trace."""
    plan = plan_of(["preset=vllm", *words])
    trace, _ = load_trace(plan)
    settings = ServerSettings(url="http://127.0.0.1:8000")
    prompts = PromptTokens(trace.requests, plan.page_tokens, settings.first_token_id, settings.token_ids)
    return [prompts.prompt(request, number).tolist() for number, request in enumerate(trace.requests)]


def find(name: str, words: Sequence[str], folder: Path = HERE / "events") -> Found:
    """Compare a workload's events with what kvsim's cache does."""
    read, run = read_messages(read_recorded(folder / f"{name}.gz")), read_observed(folder / f"{name}.jsonl.gz")
    if run.facts is None:
        raise SystemExit(f"{name}: the record does not say what the server was")
    plan, moments = plan_of(overrides_of(run.facts, (), shape_of)[0]), moments_of(run)
    asked, scores = requests_of(run, sent(tuple(words)), plan.page_tokens, KEYS), dict[tuple[str, float], ScoreView]()
    for within_s in CLIENT_WITHIN_S:
        scores["client", within_s] = score_recorded(read.batches, asked, plan, keys=KEYS, within_s=within_s, moments=moments)
    for within_s in EVENTS_WITHIN_S:
        scores["events", within_s] = score_recorded(read.batches, None, plan, keys=KEYS, within_s=within_s)
    return Found(read, scores, run)


def shadow(folder: Path, record: Path, words: Sequence[str]) -> tuple[str, list[str]]:
    """Run ``kvsim shadow`` on a recorded stream. Returns its command line, with the stream's name alone, and its table."""
    asked = [*words, f"shadow.ghosts={GHOSTS}"]
    command = [sys.executable, "-m", "kvsim", "shadow", f"events={record}", *asked, f"output={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "120"})
    if done.returncode:
        raise SystemExit(done.stderr)
    table = [line.rstrip() for line in done.stdout.partition("Ghost caches\n")[2].strip().splitlines()]
    return shlex.join(["kvsim", "shadow", f"events={record.relative_to(HERE.parents[1])}", *asked]), table


def claims(found: dict[str, Found]) -> list[Claim]:
    refused = sum(one.read.refused + one.read.lost for one in found.values())
    return [
        Claim("every message is read, and none is missing", f"{refused} are not", not refused),
        *[block_claim(name, one) for name, one in sorted(found.items(), reverse=True)],
    ]


def block_claim(name: str, one: Found) -> Claim:
    shares = all_shares(one.scores["client", CLIENT_WITHIN_S[-1]])
    matched, missed, extra = (sum(values) for values in zip(*shares, strict=True))
    return Claim(
        f"in {name}, every block stored and removed is predicted, and no other",
        f"{matched / (matched + missed):.2%} of {matched + missed:,}, {extra} others",
        not missed and not extra,
    )


def all_shares(score: ScoreView) -> list[Share]:
    return [*score.stored.values(), *score.removed.values()]


def page(found: dict[str, Found], shown: dict[str, tuple[str, list[str]]]) -> list[str]:
    return [
        "# KV events of a running vLLM",
        "",
        "vLLM 0.25.1 with shapes of Llama 3 8B and random weights on an H100, 12,000 blocks of 16 tokens, asynchronous",
        "scheduling, played by kvsim's client with KV events on. Made by `python experiments/real_servers/events.py` from the",
        "recorded streams and the client's records in `events/`.",
        "",
        *claim_table(claims(found)),
        *section(
            "Predicted blocks",
            ("workload", "requests from", "within", "tier", "", "the server's", "predicted", "missed", "extra"),
            [row for name, one in found.items() for row in score_rows(name, one)],
            "A block that the server stores or removes is predicted if kvsim's cache (`preset=vllm`, the server's own capacity)",
            "does the same with the same block, at most so much earlier or later. *Extra*: kvsim does it alone.",
        ),
        "",
        *MEANING,
        *section(
            "What the messages have in them",
            ("event", "field", "values", "times"),
            [
                (kind, name, value, f"{times:,}")
                for (kind, name, value), times in sorted(sum((one.read.fields for one in found.values()), Counter()).items())
            ],
            f"{sum(len(one.read.batches) for one in found.values()):,} messages. Fields at their defaults are left out by vLLM.",
        ),
        "",
        "## As a user sees it",
        "",
        *AS_SEEN,
        *[line for name, (command, table) in shown.items() for line in console(found[name].run, command, table)],
    ]


MEANING = (
    "Given the order and the overlaps of requests, the preset does with every block what vLLM does, also where vLLM preempts (in",
    "conversations 26 times, by its counter): a preempted request loses its blocks, looks them up again, and stores again what",
    "it has lost. The client's record tells when that was: the tokens of all requests show the server's steps, and an answer",
    "pauses. Who is preempted before the first token is not seen, and vLLM's rule decides: without room, the last one admitted.",
    "",
    "From events alone, a hit makes no event, so requests that store nothing are not seen, and requests are served one after",
    "another: blocks leave at other times, and what the server has stored twice for requests that overlap, or evicted and stored",
    "again, may be stored once.",
)


AS_SEEN = (
    "The first ghost has the server's settings. In sessions its hit rate is the server's to 0.1 points, although 197 requests",
    "are seen, not 202. In conversations it is so to 0.4 points, and all 150 are seen: what 16 of them store again after 26",
    "preemptions is taken as theirs.",
    "",
)


def score_rows(name: str, one: Found) -> Iterator[tuple[str, ...]]:
    for (source, within_s), score in one.scores.items():
        for kind, shares in (("stored", score.stored), ("removed", score.removed)):
            for tier, share in shares.items():
                counts = share.matched + share.missed, share.missed, share.extra
                sent_, missed_, extra = (f"{count:,}" for count in counts)
                yield name, source, f"{within_s:g} s", tier, kind, sent_, f"{share.share or 0:.2%}", missed_, extra


def console(run: ObservedRun, command: str, table: Sequence[str]) -> list[str]:
    rate = run.cached_tokens.sum() / run.prompt_tokens.sum()
    told = f"The client was told {rate:.2%} of {len(run.errors)} requests. From the server's events alone, `kvsim shadow` says:"
    return [told, "", "```console", f"$ {command}", *table, "```", ""]


def main() -> int:
    options = option_parser(__file__, __doc__, {"conversation": CONVERSATION}).parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        chosen = folder / "conversations.jsonl"
        chosen.write_text("".join(json.dumps(row) + "\n" for row in conversations(read_rows(Path(options.conversation)))))
        found = {one.name: find(one.name, one.settings) for one in workloads(chosen)}
        server = ("preset=vllm", "model=llama3_8b", "tiers.gpu.capacity=191984tokens")
        shown = {each: shadow(folder / each, HERE / "events" / f"{each}.gz", server) for each in found}
    print(write_page(options.output, page(found, shown), "events.md"))
    return int(not all(claim.holds for claim in claims(found)))


if __name__ == "__main__":
    sys.exit(main())
