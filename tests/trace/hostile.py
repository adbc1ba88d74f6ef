"""Draws trace files that nobody would write: real records with fields changed, and bytes put in between."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from tests.mutations import change


def talk(*texts: str, who: tuple[str, str], role: str, content: str) -> list[dict[str, Any]]:
    """A conversation of two."""
    return [{role: who[at % 2], content: text} for at, text in enumerate(texts)]


CHAT = talk(
    "what is the weather", "it rains", "and tomorrow", "as always", who=("user", "assistant"), role="role", content="content"
)
SHARED = talk("where is it", "here", "and now", who=("human", "gpt"), role="from", content="value")
AGENT = {"t": 1.5, "in": 200, "out": 3, "api_time": 0.5, "hash_ids": [1, 2, 3]}
RECORDS: dict[str, list[Any]] = {
    "tokens": [
        {"token_ids": [*range(20)], "output_length": 2, "output_token_ids": [7, 8], "timestamp": 0, "session_id": "a",
         "tenant": "t"},
        {"token_ids": [*range(30)], "output_length": 1, "n": 2, "timestamp": 10, "priority": -2, "images": [[2, 5]],
         "persistent": True},
        {"reset": "drain"},
        {"token_ids": [*range(25)], "output_length": 3, "session_id": "a", "delay": 5, "lora": 1,
         "multimodal": [[2, 5, "x"], [9, 12, 77]]},
    ],
    "mooncake": [
        {"timestamp": 0, "input_length": 10, "output_length": 9, "hash_ids": [5, 6, 7], "block_size": 4, "note": "x",
         "session_id": 1},
        {"timestamp": 5.5, "input_length": 16, "output_length": 9, "hash_ids_rle": [5, 4], "output_hash_ids": [9],
         "images": [[1, 6]]},
        {"reset": "now", "timestamp": 7},
        {"input_length": 12, "output_length": 2, "hash_ids": [5, 6, 9], "session_id": 1, "delay": 3, "turn": 4,
         "type": "chat", "n": 2},
    ],
    "bailian": [
        {"chat_id": number, "parent_chat_id": number - 1, "timestamp": 2.5 * number, "type": "text", "turn": number + 1,
         "input_length": 16 * number + 9, "output_length": 5, "hash_ids": [*range(number), 50 + number]}
        for number in range(3)
    ],
    "weka": [
        {"id": "a", "block_size": 64, "requests": [{**AGENT, "t": 0}, {"type": "subagent", "t": 1, "requests": [AGENT]}, AGENT]},
        {"id": "b", "requests": [{"t": 0, "in": 130, "out": 9, "hash_ids_rle": [4, 2]}, AGENT]},
    ],
    "freeinference": [
        {"week": "w", "session_id": "a", "user_id": "u", "harness": "h", "start_ms": 1000, "end_ms": 9000, "requests": [
            {"step": 0, "start_ms": 1000, "end_ms": 2000, "model": "m", "provider_tokens": {"prompt": 9, "completion": 3},
             "role_tokens": {"system": 20, "user": 15}, "block_ids": [1, 2], "tool_calls": [
                {"call_index": 0, "latency_ms": 2000, "subagent": {
                    "session_id": "b", "user_id": "u", "harness": "h", "requests": [
                        {"step": 0, "start_ms": 2500, "end_ms": 3500, "model": "n", "provider_tokens": {"completion": None},
                         "role_tokens": {"user": 16}, "block_ids": [7], "tool_calls": []}]}}]},
            {"step": 1, "start_ms": 4000, "end_ms": 4500, "model": "m", "provider_tokens": {"completion": 2},
             "role_tokens": {"system": 20, "user": 15, "tool": 13}, "block_ids": [1, 2, 3], "tool_calls": []}]},
        {"week": "w", "session_id": "c", "harness": "h", "requests": [
            {"start_ms": 1500, "end_ms": 1500, "provider_tokens": {"completion": 1}, "role_tokens": {"user": 15}, "block_ids": [],
             "tool_calls": None}]},
    ],
    "tracelab": [
        {"id": number % 2, "input_len": 9 + number, "output_len": 5, "arrival_time": 3.5, "round_idx": number // 2,
         "tool_wait_after_ms": 20, "prefix_len": 7 * number}
        for number in range(5)
    ],
    "dynamo": [
        {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1777312801000 + 40 * number,
         "agent_context": {"session_id": "ab"[number % 2]},
         "request": {"request_id": str(number), "request_received_ms": 1777312800000 + 30 * number, "total_time_ms": 9.5,
                     "output_tokens": 3, "model": "m",
                     "replay": {"trace_block_size": 4, "input_length": 7, "input_sequence_hashes": [2**64 - 1, number]}}}
        for number in range(3)
    ],
    "lmcache": [
        {"timestamp": 1711929600 + number, "request_id": str(number % 2), "model_name": "ab"[number % 2], "chunk_size": 4,
         "seq_len": 9 + number, "chunk_hashes": ["0xa", f"{number:#x}"]}
        for number in range(3)
    ],
    "sharegpt": [{"id": "a", "conversations": SHARED, "timestamp": 0}, {"id": "b", "conversations": SHARED[:2], "timestamp": 9}],
    "openai": [
        {"messages": CHAT, "timestamp": 3, "session_id": "a", "tools": [{"name": "f"}]},
        {"custom_id": "1", "body": {"messages": CHAT[:1], "max_tokens": 9}, "timestamp": 5},
        {"prompt": "what is it", "output": "rain", "timestamp": 6},
        {"custom_id": "2", "body": {"prompt": [1, 2, 3]}, "timestamp": 7, "output_length": 4},
    ],
    "lengths": [
        {"timestamp": 300 * number, "input_length": 20 + number, "output_length": 7, "session_id": number % 2, "type": "chat"}
        for number in range(4)
    ],
    "proxy_log": [
        {"timestamp": 1700000000 + number, "request": {"messages": CHAT[:1], "max_tokens": 5}, "session_id": "a",
         "response": {"created": 1700000000, "choices": [{"message": {"content": "rain"}}], "usage": {"completion_tokens": 3}}}
        for number in range(2)
    ],
    "aiperf_inputs": [
        {"data": [{"session_id": "a", "payloads": [{"messages": CHAT[:1]}, {"messages": CHAT[2:3], "max_tokens": 4}]},
                  {"session_id": "b", "payloads": [{"prompt": "what is it"}, {"input_ids": [1, 2, 3]}]}]},
    ],
    "dag": [
        {"session_id": "a", "pre_session_spawns": ["d"],
         "turns": [{"messages": CHAT[:1], "max_tokens": 4, "spawns": ["b", {"children": ["c"], "join_at": 2}]},
                   {"messages": CHAT[2:3], "delay": 5, "tools": [{"name": "f"}]}, {"messages": CHAT[:1], "forks": ["e"]}]},
        *({"session_id": name, "turns": [{"messages": CHAT[:1]}]} for name in "bcde"),
        {"session_id": "f", "orchestrator": True, "rounds": [{"spawns": ["b"], "think_time_ms": 3}, {"spawns": ["c", "d"]}]},
    ],
    "aiperf_results": [
        {"metadata": {"session_num": number, "x_correlation_id": "ab"[number % 2], "request_start_ns": 1759813207532900363,
                      "benchmark_phase": "profiling", "was_cancelled": False},
         "metrics": {"input_sequence_length": {"value": 55 * number, "unit": "tokens"},
                     "usage_prompt_tokens": {"value": 60, "unit": "tokens"},
                     "output_sequence_length": {"value": 9, "unit": "tokens"}},
         "error": None}
        for number in range(3)
    ],
    "bench_results": [
        {"endpoint_type": "vllm", "completed": 3, "input_lens": [10, 20, 30], "output_lens": [3, 2, 1], "errors": ["", "x", ""],
         "start_times": [10.0, 11.5, 11.75]},
    ],
    "spans": [
        {"resourceSpans": [{"scopeSpans": [{"spans": [
            {"startTimeUnixNano": "1581452772000000321",
             "attributes": [
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "5"}},
                {"key": "gen_ai.input.messages", "value": {"arrayValue": {"values": [{"kvlistValue": {"values": [
                    {"key": "role", "value": {"stringValue": "user"}},
                    {"key": "parts", "value": {"arrayValue": {"values": [{"kvlistValue": {"values": [
                        {"key": "type", "value": {"stringValue": "text"}},
                        {"key": "content", "value": {"stringValue": "it rains"}}]}}]}}}]}}]}}}],
             "events": [{"name": "gen_ai.content.completion", "attributes": [
                {"key": "gen_ai.completion", "value": {"stringValue": "as always"}}]}]}]}]}]},
        {"name": "chat m", "start_time": "2024-10-01T12:00:00.123456Z", "attributes": {
            "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "where is it", "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "here", "gen_ai.conversation.id": "a"}},
        {"name": "chat m", "start_time": "2024-10-01T12:00:01Z", "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.system_instructions": '[{"type": "text", "content": "it rains"}]',
            "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "and now"}]}]',
            "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "here"}]}]'}},
    ],
    "length_spans": [
        {"resourceSpans": [{"scopeSpans": [{"spans": [
            {"startTimeUnixNano": "1581452772000000321", "attributes": [
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "55"}},
                {"key": "gen_ai.request.model", "value": {"stringValue": "m"}}]}]}]}]},
        {"name": "chat m", "start_time": "2024-10-01T12:00:00.123456Z", "attributes": {
            "gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 3,
            "gen_ai.conversation.id": "a"}},
    ],
}  # fmt: skip
"""A few records of each format, with every field that it may have."""
LOGS = {
    "csv": b"Timestamp,Request tokens,Response tokens,Session ID\n0,40,5,a\n1.5,60,7,a\n2,9,,\n",
    "dates": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,37,4\n2023-11-16,39,1\n0001-01-01,5,5\n",
}
"""Logs of lengths as CSV."""
LENGTHS = {"aiperf_results", "bench_results", "length_spans", "csv", "dates"}
"""Those of them that ``trace=lengths`` reads."""
BLOCKS = {"mooncake": 4, "bailian": 16, "weka": 64, "lmcache": 4, "dynamo": 4, "freeinference": 16}
"""Tokens per block, where a format has blocks."""
FIELDS = [
    "timestamp", "created_time", "session_id", "delay", "delay_ms", "priority", "tenant", "lora", "n", "turn", "type",
    "persistent", "images", "multimodal", "note", "reset", "block_size", "chunk_size", "hash_ids", "hash_ids_rle",
    "output_hash_ids", "input_length", "output_length", "input_tokens", "token_ids", "output_token_ids", "context_mode",
    "chat_id", "parent_chat_id", "requests", "in", "out", "t", "api_time", "seq_len", "chunk_hashes", "request_id",
    "model_name", "messages", "prompt", "text_input", "input", "output", "tools", "body", "max_tokens", "conversations",
    "role", "content", "from", "value", "tool_calls", "schema", "event_type", "event_time_unix_ms", "event", "agent_context",
    "metadata", "metrics", "error", "request_start_ns", "input_sequence_length", "unit", "input_lens", "output_lens", "errors",
    "start_times", "resourceSpans", "scopeSpans", "spans", "attributes", "startTimeUnixNano", "key", "intValue", "start_time",
    "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.conversation.id", "gen_ai.input.messages", "parts",
    "gen_ai.prompt.0.role", "gen_ai.prompt.0.content", "gen_ai.prompt", "gen_ai.output.messages", "arrayValue", "kvlistValue",
    "gen_ai.system_instructions", "events", "error.type", "stringValue", "values",
    "data", "payloads", "response", "choices", "usage", "message", "created", "input_ids", "completion_tokens", "status_code",
    "request", "replay", "request_received_ms", "total_time_ms", "output_tokens", "trace_block_size", "input_sequence_hashes",
    "week", "user_id", "harness", "start_ms", "end_ms", "role_tokens", "provider_tokens", "completion", "block_ids", "subagent",
    "input_len", "output_len", "arrival_time", "round_idx", "tool_wait_after_ms", "prefix_len", "id",
]  # fmt: skip


@st.composite
def changed_records(draw: Callable[..., Any], records: list[Any]) -> bytes:
    """A file of these records after a few changes, as lines or as an array."""
    records = deepcopy(records)
    for _ in range(draw(st.integers(1, 4))):
        change(draw, records, FIELDS)
    texts = [json.dumps(record) for record in records]
    return (f"[{','.join(texts)}]" if draw(st.integers(0, 3)) == 0 else "".join(f"{text}\n" for text in texts)).encode()
