"""Whatever a client sends, an emulated server answers it, or refuses it in one line, and goes on."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsim.emulation.apis.base import ApiSettings
from kvsim.emulation.text import Texts
from tests.mutations import changed, changed_bytes, few
from tests.reused_compositions import compositions_are_reused
from tests.servers.emulated import Emulated, emulated
from tests.trace.models import make_model

OPTIONS = {
    "model": "emulated", "max_tokens": 3, "min_tokens": 1, "n": 2, "ignore_eos": True, "stream": False, "cache_salt": "a",
    "stream_options": {"include_usage": True, "continuous_usage_stats": False}, "session_id": "a",
    "vllm_xargs": {"kv_cache_report_mode": "full"},
}  # fmt: skip
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SAMPLING = {"max_new_tokens": 3, "min_new_tokens": 1, "ignore_eos": True, "n": 2}
BODIES: dict[str, list[Any]] = {
    "/v1/completions": [{"prompt": [1, 2, 3], **OPTIONS}, {"prompt": ["a", [1, 2]], "max_tokens": 2, "stream": True}],
    "/v1/chat/completions": [
        {"messages": MESSAGES, "tools": TOOLS, **OPTIONS},
        {"messages": MESSAGES, "max_completion_tokens": 2},
    ],
    "/tokenize": [{"prompt": "hello", "model": "emulated"}, {"messages": MESSAGES}],
    "/generate": [{"input_ids": [[1, 2], [3]], "sampling_params": SAMPLING, "cache_salt": "a"}, {"text": "a", "stream": True}],
}
DEEP = b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}"
"""As deep as can just be read."""
STATUSES = (200, 400, 404, 405, 413)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    texts = Texts(make_model(tmp_path_factory.mktemp("model")))
    overrides = ("preset=sglang", "tiers.gpu.capacity=400pages")
    with (
        compositions_are_reused(),
        emulated(overrides, dialect="sglang", speed=1000.0, settings=ApiSettings(texts=texts)) as server,
    ):
        yield server


def status_of(server: Emulated, data: bytes, *, is_end: bool = False) -> int:
    """Send bytes, perhaps as all that will ever come. Return the status of the answer; 0 if there is none."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port or 80), timeout=60.0) as client:
        client.sendall(data)
        if is_end:
            client.shutdown(socket.SHUT_WR)
        answer = client.recv(65536)
        while part := client.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1]) if answer else 0


def request(path: str, body: bytes) -> bytes:
    """A request whose connection closes after its answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def check_goes_on(server: Emulated) -> None:
    assert status_of(server, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") == 200
    assert server.emulator.unfinished == 0


@pytest.mark.parametrize("path", BODIES)
def test_a_changed_body_is_answered_or_refused(path: str, server: Emulated) -> None:
    whole = json.dumps(BODIES[path][0]).encode()
    bodies = st.sampled_from(BODIES[path]).flatmap(changed).map(lambda body: json.dumps(body).encode())

    @few()
    @given(bodies | changed_bytes(whole))
    @example(b'{"messages": [{}]}')
    @example(b'{"messages": [{"role": "user", "content": ' + b"[" * 5_000)
    @example(b'{"messages": [{"role": "user", "content": "a"}], "tools": [' + DEEP)
    @example(b'{"vllm_xargs": ' + b'{"a":' * 5_000)
    def run(body: bytes) -> None:
        assert status_of(server, request(path, body)) in STATUSES

    run()
    check_goes_on(server)


HEAD = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Session-Id: a\r\nContent-Length: %d\r\n\r\n%b"
BODY = json.dumps(BODIES["/v1/completions"][0]).encode()


@few()
@given(changed_bytes(HEAD % (len(BODY), BODY)))
@example(HEAD.replace(b"%d", b"9" * 5_000).replace(b"%b", b""))
@example(HEAD.replace(b"/v1/completions", b"http://[").replace(b"%d", b"0").replace(b"%b", b""))
@example(HEAD.replace(b"/v1/completions", "//\u2100".encode()).replace(b"%d", b"0").replace(b"%b", b""))
def test_changed_bytes_of_a_request_are_answered_or_refused(server: Emulated, data: bytes) -> None:
    """What ends too early has no answer."""
    assert status_of(server, data, is_end=True) in (0, *STATUSES)
    check_goes_on(server)
