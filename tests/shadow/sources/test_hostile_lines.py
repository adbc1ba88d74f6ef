"""Whatever a log contains: requests that can be served, or one line that names the log and the line of it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import UsageError
from kvsim.shadow.live import problem_of
from kvsim.shadow.sources.following import Tail
from kvsim.shadow.sources.lines import Lines
from kvsim.shadow.sources.prompts import Prompts
from kvsim.shadow.sources.salt import Salt
from tests.mutations import changed, changed_bytes, few, memory_budget, work_budget
from tests.trace.hostile import RECORDS

SALT = Salt(b"s" * 32)
ASKED = {"input_ids": list(range(40)), "session_params": {"id": "a"}, "lora_path": "l", "extra_key": "k", "sampling_params": {}}
EXPORT = {
    "request_parameters": json.dumps(ASKED), "prompt_tokens": 40, "completion_tokens": 3, "cached_tokens": 16,
    "request_received_ts": 5.5, "finish_reason": {"type": "length", "length": 3},
}  # fmt: skip
LOGS: dict[str, list[Any]] = {name: RECORDS[name] for name in ("tokens", "mooncake", "bailian", "lmcache", "openai")}
LOGS["export"] = [EXPORT, EXPORT | {"request_parameters": json.dumps({"text": "hello", "session_id": "b"})}]
BLOCKS = {"bailian": 16}


@cache
def parameters() -> st.SearchStrategy[str]:
    """What SGLang's lines have as JSON in a text."""
    return changed(ASKED).map(json.dumps) | changed_bytes(json.dumps(ASKED).encode()).map(lambda text: text.decode("latin-1"))


def follow(path: Path, page_tokens: int) -> int:
    """Read a log as a shadow does, line by line, and return the number of requests. A line that is refused is told and left."""
    reader = Lines(page_tokens, SALT, Prompts(page_tokens, SALT, None))
    told: list[tuple[str, str]] = []
    tail, found = Tail(path, lambda kind, line: told.append((kind, line))), 0
    for line in tail.lines():
        try:
            with work_budget(), memory_budget():
                requests = reader.read(line, 7.0)
        except UsageError as error:
            said = str(error)
            assert said.startswith((f"{path}:{line.number}: ", "log: ", "page_tokens=")), said
            assert said.isprintable() and len(said) < 1_000
            continue
        assert [problem_of(request, page_tokens) for request in requests] == [""] * len(requests)
        found += len(requests)
    tail.close()
    assert all(f"{path}" in line for _, line in told)
    return found


@pytest.mark.parametrize("name", LOGS)
def test_changed_lines_are_requests_or_told(name: str, tmp_path: Path) -> None:
    path, page_tokens = tmp_path / "log.jsonl", BLOCKS.get(name, 4)
    lines = changed(LOGS[name]).map(lambda values: [json.dumps(value).encode() for value in values])
    if name == "export":
        lines |= parameters().map(lambda text: [json.dumps(EXPORT | {"request_parameters": text}).encode()])
    whole = b"\n".join(json.dumps(value).encode() for value in LOGS[name])

    @few()
    @given(lines.map(b"\n".join) | changed_bytes(whole))
    def run(content: bytes) -> None:
        path.write_bytes(content + b"\n")
        follow(path, page_tokens)

    run()
    path.write_bytes(whole + b"\n")
    assert follow(path, page_tokens) >= 1
