"""Lines of logs become the requests that a replay of the same file has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.errors import TraceError, UsageError
from kvsim.pages.extents import Extent
from kvsim.plans.build import build_trace
from kvsim.settings.configuration import compose
from kvsim.shadow.live import LiveRequest, problem_of
from kvsim.shadow.sources.lines import Line, Lines
from kvsim.shadow.sources.prompts import Prompts
from kvsim.shadow.sources.salt import Salt
from tests.trace.models import make_model
from tests.workloads import pages_of

SALT = Salt(b"s" * 32)
TOKENS = {"token_ids": list(range(40)), "output_length": 10, "output_token_ids": list(range(100, 110))}


def read(lines: Sequence[Any], page_tokens: int = 16, tokenizer: str | None = None) -> list[LiveRequest]:
    """The requests of the lines of a log."""
    reader = Lines(page_tokens, SALT, Prompts(page_tokens, SALT, tokenizer))
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return [request for number, text in enumerate(texts, 1) for request in reader.read(Line("log", number, text), 7.0)]


def shared(paths: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Pages by the order in which they first appear: equal for paths that share the same pages."""
    numbers: dict[Any, int] = {}
    return [[numbers.setdefault(page, len(numbers)) for page in path] for path in paths]


def as_replayed(path: Path, *overrides: str) -> list[tuple[float, int, int, list[int]]]:
    """What a replay has of a log: arrival, lengths, and the pages of prompt and answer."""
    source, page_tokens = build_trace(compose([f"trace.path={path}", *overrides]))
    requests = source.load(page_tokens).requests

    def pages(*runs: tuple[Extent, ...] | None) -> list[int]:
        return [page for run in runs for page in pages_of(run or ())]

    paths = shared([pages(request.runs, request.output_runs) for request in requests])
    return [(one.arrival_s, one.prompt_tokens, one.output_tokens, path) for one, path in zip(requests, paths, strict=True)]


def as_read(requests: Sequence[LiveRequest]) -> list[tuple[float, int, int, list[int]]]:
    paths = shared([[*one.keys, *one.output_keys] for one in requests])
    first_s = requests[0].arrival_s
    return [
        (one.arrival_s - first_s, one.prompt_tokens, one.output_tokens, path) for one, path in zip(requests, paths, strict=True)
    ]


def mooncake(at_ms: int, length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": length, "output_length": 1, "hash_ids": ids, **more}


LOGS: dict[str, list[dict[str, Any]]] = {
    "tokens": [
        {"timestamp": 500, **TOKENS},
        {"timestamp": 1500, "token_ids": [*range(40), *range(100, 110), 7, 8], "output_length": 3},
        {"timestamp": 1500, "token_ids": list(range(40)), "output_length": 3, "tenant": "other"},
    ],
    "mooncake": [
        mooncake(1000, 70, [9, 4, 5], block_size=32, output_length=60, output_hash_ids=[6, 7]),
        mooncake(1250, 64, [9, 4], block_size=32),
        mooncake(3000, 64, [4, 9], block_size=32),
    ],
    "bailian": [
        {
            "chat_id": number, "parent_chat_id": -1, "timestamp": 10 + number, "type": "text", "turn": 1,
            "input_length": 40, "output_length": 5, "hash_ids": ids,
        }
        for number, ids in enumerate([[1, 2, 3], [1, 2, 4], [2, 1, 3]])
    ],
    "lmcache": [
        {"timestamp": 5, "request_id": f"r{number}", "model_name": model, "chunk_size": 32, "seq_len": 64, "chunk_hashes": ids}
        for number, (model, ids) in enumerate([("m", ["0x1", "0xff"]), ("m", ["0x1", "0x2"]), ("n", ["0x1", "0xff"])])
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_line_is_the_request_that_a_replay_has(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LOGS[name]))
    requests = read(LOGS[name])
    assert as_read(requests) == as_replayed(path)
    assert [problem_of(request, 16) for request in requests] == [""] * 3


def test_an_answer_of_unknown_tokens_has_pages_of_its_own() -> None:
    first, second = read([{"token_ids": list(range(20)), "output_length": 30}] * 2)
    assert first.keys == second.keys and len(first.output_keys) == len(second.output_keys) == 2
    assert not set(first.output_keys) & set(second.output_keys) and len({*first.keys, *first.output_keys}) == 3


def test_pages_larger_than_blocks_are_known_by_their_last_block() -> None:
    first, second = read([mooncake(0, 70, [1, 2, 3, 4, 5], block_size=16), mooncake(0, 64, [1, 2, 3, 9], block_size=16)], 32)
    assert len(first.keys) == 2 and first.keys[0] == second.keys[0] and first.keys[1] != second.keys[1]


def test_a_page_size_that_does_not_fit_the_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="page_tokens=24 does not fit the log's blocks of 16 tokens"):
        read([mooncake(0, 16, [1], block_size=16)], 24)


def test_a_reset_belongs_to_the_request_after_it() -> None:
    found = read([TOKENS, {"reset": "drain"}, TOKENS, TOKENS])
    assert [request.after_reset for request in found] == [False, True, False]


CHAT = [{"role": "user", "content": "Hello, who are you?"}]
ANSWER = {"role": "assistant", "content": "I am a cache."}
NEXT = {"role": "user", "content": "Of what?"}


def test_text_is_tokenized_by_the_models_tokenizer(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model"))
    lines = [
        {"timestamp": 0, "messages": [*CHAT, ANSWER]},
        {"timestamp": 9, "messages": [*CHAT, ANSWER, NEXT], "output_length": 2},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read(lines, 4, folder)
    wanted = as_replayed(path, f"trace.tokenizer={folder}", "page_tokens=4", "trace=openai", "trace.requests=last_answer")
    assert [one[1:] for one in as_read(found)] == [one[1:] for one in wanted]
    assert set(found[0].keys + found[0].output_keys) < set(found[1].keys)


def test_text_without_a_tokenizer_is_cut_by_its_bytes() -> None:
    first, second, third = read(
        [{"messages": [*CHAT, ANSWER]}, {"messages": [*CHAT, ANSWER, NEXT]}, {"prompt": "x" * 64, "output": "y" * 64}], 2
    )
    assert set(first.keys + first.output_keys) < set(second.keys) and first.output_keys
    assert (third.prompt_tokens, third.output_tokens, len(third.keys), len(third.output_keys)) == (16, 16, 8, 7)
    assert third.arrival_s == 7.0


def export(parameters: object, **meta: Any) -> dict[str, Any]:
    return {"request_parameters": json.dumps(parameters), "id": "x", "prompt_tokens": 40, "completion_tokens": 3, **meta}


def test_sglangs_export_tells_prompt_and_hits() -> None:
    session = {"session_params": {"id": "alice"}}
    first, second, third = read(
        [
            export({"input_ids": list(range(40)), "rid": "a", **session}, cached_tokens=32, request_received_ts=50.5),
            export({"input_ids": list(range(40)), "lora_path": "mine"}, cached_tokens=0, request_received_ts=40.0),
            export({"text": "word " * 40}, cached_tokens=20, prompt_tokens=40),
        ]
    )
    assert (first.arrival_s, first.session, first.cached_tokens, first.output_tokens) == (50.5, "alice", 32, 3)
    assert second.arrival_s == 50.5 and not set(first.keys) & set(second.keys) and len(first.keys) == 2
    assert third.cached_tokens == third.prompt_tokens / 2 == 25


def test_a_request_that_sglang_gave_up_is_none() -> None:
    aborted = {"finish_reason": {"type": "abort", "message": "no"}, "completion_tokens": 0}
    assert read([export({"input_ids": [1] * 20}, **aborted)]) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1", "expected a JSON object"),
        ({"what": 1}, "unknown format"),
        ({"token_ids": [], "output_length": 1}, "token_ids is empty"),
        ({"token_ids": [-1] * 20, "output_length": 1}, "must be a list of non-negative integers"),
        ({"timestamp": -1, **TOKENS}, "timestamp must be"),
        (mooncake(0, 100, [1], block_size=16), "hash_ids has 1 ids"),
        ({"messages": [{"content": "no role"}]}, "every message must have a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is not text"),
        ({"request_parameters": "{"}, "request_parameters is not JSON"),
        ({"request_parameters": "{}"}, "request_parameters has neither text nor input_ids: start SGLang without"),
        ({"request_parameters": json.dumps({"input_ids": "secret"})}, "input_ids must be a list"),
    ],
)
def test_a_line_that_cannot_be_read_is_said_where_it_is(line: Any, problem: str) -> None:
    with pytest.raises(TraceError, match=rf"log:1: .*{problem}"):
        read([line])


def test_a_log_of_sessions_is_refused() -> None:
    with pytest.raises(UsageError, match="log: log is a trace=weka, whose lines are no single requests: replay it"):
        read([{"requests": [], "block_size": 64}])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = """token_ids output_length output_token_ids timestamp hash_ids input_length messages prompt request_parameters text
    input_ids session_id output_hash_ids block_size role content n reset multimodal"""
NAMES = st.sampled_from(FIELDS.split())


@given(st.dictionaries(NAMES, VALUES, max_size=8))
@settings(max_examples=200)
def test_no_line_makes_a_reader_fail_in_another_way(fields: dict[str, Any]) -> None:
    lines = [{"token_ids": [1] * 20, "output_length": 1} | fields, {"prompt": "a"} | fields, export(fields), fields]
    for line in lines:
        try:
            found = read([json.dumps(line).encode()])
        except UsageError:
            continue
        assert [problem_of(request, 16) for request in found] == [""] * len(found)
