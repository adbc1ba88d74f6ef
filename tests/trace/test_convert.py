"""A converted trace hits what the original hits, and tells nothing else about it."""

import gzip
import json
import random
from functools import cache

import numpy as np
import pytest
import zstandard

from kvsim.api import load_trace
from kvsim.cli import main
from kvsim.plans.build import build_run, build_trace
from kvsim.run.play import replay
from kvsim.settings.configuration import compose
from kvsim.trace.auto import Auto
from tests.trace.models import make_model

RNG = random.Random(5)
WORDS = ("what", "is", "the", "weather", "like", "today", "and", "tomorrow", "where", "it", "rains", "as", "always")


def prompts(count, size=24):
    """Token prompts that continue each other."""
    made = []
    for _ in range(count):
        begin = RNG.choice(made)[: RNG.randrange(1, 60)] if made and RNG.random() < 0.7 else []
        made.append([*begin, *(RNG.randrange(1000) for _ in range(RNG.randrange(1, size)))])
    return made


def blocks(tokens, size):
    """Ids of blocks: chained, as a server hashes them."""
    return [hash(tuple(tokens[:end])) % 10**12 for end in range(size, len(tokens) + size, size)]


def tokens_file():
    for number, tokens in enumerate(prompts(90)):
        answer = [RNG.randrange(1000) for _ in range(RNG.randrange(1, 9))]
        fields = {"token_ids": tokens, "output_length": len(answer), "output_token_ids": answer, "timestamp": 400 * number}
        if number % 3 == 0:
            fields |= {"session_id": f"user {number % 4}", "priority": number % 5 - 2}
        if number % 3 == 0 and number > 20:
            fields["delay"] = 1500.5
        if number % 7 == 0:
            fields["tenant"] = f"company {number % 2}"
        if number % 11 == 0:
            fields |= {"n": 2, "output_token_ids": [answer, [5] * len(answer)]}
        yield {**fields, "persistent": number == 3}


def mooncake_file():
    for number, tokens in enumerate(prompts(90, 40)):
        if number in (40, 80):
            yield {"reset": "drain", **({"timestamp": 250.5 * number} if number == 80 else {})}
        line = {"input_length": len(tokens), "output_length": number % 7, "hash_ids": blocks(tokens, 4)}
        more = {"images": [[1, 6]]} if len(tokens) > 8 and number % 9 == 0 else {}
        yield {"timestamp": 250.5 * number, **line, **more, **({"block_size": 4} if not number else {})}


def bailian_file():
    for number, tokens in enumerate(prompts(90, 40)):
        parent = number - RNG.randrange(1, 9) if number > 9 and number % 2 else -1
        times = {"chat_id": number, "parent_chat_id": parent, "timestamp": number * 1.7, "type": ["chat", "agent"][number % 2]}
        yield {**times, "turn": 1 + number % 3, "input_length": len(tokens), "output_length": 5, "hash_ids": blocks(tokens, 16)}


def weka_file():
    for number in range(12):
        calls = [
            {"t": 2.0 * at, "in": len(tokens), "out": 3, "api_time": 0.7, "hash_ids": blocks(tokens, 64)[: len(tokens) // 64]}
            for at, tokens in enumerate(p * 9 for p in prompts(8))
        ]
        sub = {"type": "subagent", "t": 3.5, "requests": [{**calls[1], "t": 0.0}]}
        yield {"id": str(number), "block_size": 64, "requests": [*calls[:2], sub, *calls[2:]]}


def lmcache_file():
    for number, tokens in enumerate(prompts(90, 40)):
        hashes = [f"{value:#x}" for value in blocks(tokens, 4)][: len(tokens) // 4]
        fields = {"timestamp": 1711929600 + number, "request_id": str(number), "model_name": "ab"[number % 9 == 0]}
        yield {**fields, "chunk_size": 4, "seq_len": len(tokens), "chunk_hashes": hashes}


def talks():
    for number in range(40):
        turns = [" ".join(RNG.choices(WORDS, k=RNG.randrange(3, 20))) for _ in range(RNG.randrange(1, 7))]
        yield number, turns


def sharegpt_file():
    for number, turns in talks():
        parts = [{"from": ("human", "gpt")[at % 2], "value": turn} for at, turn in enumerate(turns)]
        yield {"id": number, "conversations": parts, "timestamp": 900 * number}


def openai_file():
    for number, turns in talks():
        messages = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
        yield {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}


def lengths_file():
    for number in range(90):
        yield {"timestamp": 300 * number, "input_length": 20 + number % 90, "output_length": 7, "session_id": number % 20}


FORMATS = {
    "tokens": (tokens_file, 8, []),
    "mooncake": (mooncake_file, 4, []),
    "bailian": (bailian_file, 16, []),
    "weka": (weka_file, 64, []),
    "lmcache": (lmcache_file, 4, []),
    "sharegpt": (sharegpt_file, 4, ["trace.tokenizer={model}"]),
    "openai": (openai_file, 4, ["trace.tokenizer={model}"]),
    "lengths": (lengths_file, 4, ["trace.prefixes=0.5"]),
}
"""Lines of a file, the size of blocks to convert it to, and settings."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer."""
    return make_model(tmp_path_factory.mktemp("model"))


@cache
def plan(page_tokens, cache_output):
    """Two small tiers."""
    sizes = ["tiers.gpu.capacity=1000tokens", "tiers.cpu.capacity=2000tokens"]
    overrides = [*sizes, f"page_tokens={page_tokens}", f"rules.cache_output={cache_output}", "trace=words", "trace.prompts=[a]"]
    return build_run(compose(overrides), command="replay")


@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in FORMATS), ("mooncake", True), ("weka", True)])
def test_every_request_hits_the_same(name, packed, write, model, tmp_path):
    lines, size, overrides = FORMATS[name]
    overrides = [override.format(model=model) for override in overrides]
    path, out = write(*lines(), name="log.jsonl.zst"), str(tmp_path / "out.jsonl.gz")
    assert main(["trace", "convert", path, out, f"--block-tokens={size}", *["--runs"] * packed, *overrides]) == 0
    source, copied = build_trace(compose([f"trace.path={path}", *overrides]))[0], Auto(path=out)
    for pages in (size, 4 * size):
        requests, copies = source.load(pages).requests, copied.load(pages).requests
        assert [described(request) for request in copies] == [described(request) for request in requests]
        assert with_answers(copies) == with_answers(requests)
        played = plan(pages, all(request.output_runs is not None for request in requests))
        found, expected = replay(played, copies).hit_pages, replay(played, requests).hit_pages
        assert np.array_equal(found, expected)
        assert pages > size or expected.any()


def with_answers(requests):
    """The pages of prompts and answers, numbered in the order in which they come."""
    numbers = {}
    paths = [(request.runs, request.output_runs or (), *request.sample_output_runs) for request in requests]
    pages = [[start + at for extents in path for start, length in extents for at in range(length)] for path in paths]
    return [[numbers.setdefault(page, len(numbers)) for page in path] for path in pages]


def described(request):
    """Everything about a request except the names of its pages, its session and its tenant."""
    return (
        round(request.arrival_s, 6), request.after, round(request.delay_s, 6), request.prompt_tokens, request.prompt_pages,
        request.output_tokens, request.turn, request.kind, request.priority, request.samples, request.images, request.persistent,
        len(request.resets), bool(request.tenant), request.session >= 0, request.output_runs is None,
    )  # fmt: skip


def test_what_was_made_up_stays_marked(write, tmp_path):
    out = str(tmp_path / "out.jsonl")
    assert main(["trace", "convert", write(*lengths_file()), out, "trace.prefixes=0.5"]) == 0
    assert load_trace(path=out).note.startswith("prefixes are synthetic")


def test_nothing_of_a_prompt_is_written(write, model, tmp_path):
    """Two files with other tokens, tenants and sessions, but equal prefixes, become the same file."""
    written = []
    for shift, who in ((0, "a"), (500, "b")):
        lines = [
            {"token_ids": [token + shift for token in tokens], "output_length": 3, "tenant": who, "session_id": who}
            for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9, 9, 9])
        ]
        out = tmp_path / f"{who}.jsonl"
        assert main(["trace", "convert", write(*lines), str(out), "--block-tokens", "4"]) == 0
        written.append(out.read_text())
    assert written[0] == written[1]
    assert [json.loads(line) for line in written[0].splitlines()][1] == {
        "session_id": 0, "input_length": 8, "output_length": 3, "hash_ids": [0, 1], "tenant": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("ending", "read"), [("", bytes), (".gz", gzip.decompress), (".zst", zstandard.decompress)])
def test_the_name_says_how_it_is_compressed(write, tmp_path, ending, read):
    out = tmp_path / f"out.jsonl{ending}"
    assert main(["trace", "convert", write({"token_ids": [1, 2], "output_length": 1}), str(out)]) == 0
    content = out.read_bytes()
    if ending == ".zst":
        content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
    else:
        content = read(content)
    assert json.loads(content)["input_length"] == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{path}"], "kvsim trace convert needs FILE and OUT"),
        (["{path}", "{path}"], "is the trace itself"),
        (["{path}", "{out}", "--block-tokens=0"], "--block-tokens must be at least 1, not 0"),
        (["{path}", "{out}", "--fast"], "kvsim trace convert has no option --fast"),
        (["{path}", "{out}", "trace.answers=inferred"], "trace.answers=inferred would not be kept"),
        (["{path}", "{out}", "--block-tokens=3"], "page_tokens=3 does not fit the trace's blocks of 4 tokens"),
        (["{bad}", "{out}"], "hash_ids has 1 ids"),
    ],
)
def test_a_mistake_leaves_no_file(write, tmp_path, capsys, arguments, expected):
    names = {"path": write(*mooncake_file()), "out": str(tmp_path / "out.jsonl")}
    names["bad"] = write(*mooncake_file(), {"timestamp": 1e9, "input_length": 9, "hash_ids": [1]}, name="bad.jsonl")
    before = set(tmp_path.iterdir())
    assert main(["trace", "convert", *(argument.format(**names) for argument in arguments)]) == 2
    assert expected in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_a_graph_of_calls_is_kept(write, tmp_path):
    """Sub-agents, requests that join them, and lanes whose next session waits for another session."""
    lines = list(weka_file())
    for line in lines:
        line["requests"].insert(3, {"type": "subagent", "t": 3.6, "requests": [{**line["requests"][0], "t": 0.0}]})
    path, out = write(*lines), str(tmp_path / "out.jsonl")
    settings = ["trace.arrivals=closed_loop", "trace.concurrent_sessions=3"]
    assert main(["trace", "convert", path, out, *settings]) == 0
    one = load_trace(path=path, page_tokens=64, arrivals="closed_loop", concurrent_sessions=3)
    other = load_trace(path=out, page_tokens=64)
    assert sum(len(request.joins) for request in one.requests) >= 12
    for before, after in zip(one.requests, other.requests, strict=True):
        assert before.predecessors == after.predecessors and before.delay_s == pytest.approx(after.delay_s)


def test_turns_that_wait_for_none_are_kept_without_timestamps(write, tmp_path):
    path = write(*({"input_length": 4, "hash_ids": [at], "block_size": 4, "session_id": 1, "after": []} for at in range(3)))
    out = str(tmp_path / "out.jsonl")
    assert main(["trace", "convert", path, out]) == 0
    assert [(one.after, one.arrival_s, one.turn) for one in load_trace(path=out, page_tokens=4).requests] == [
        (-1, 0, 0),
        (-1, 0, 1),
        (-1, 0, 2),
    ]
