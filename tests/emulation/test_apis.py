"""The interfaces of emulated servers, as a client without kvsim meets them."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from kvsim.emulation.apis.base import ApiSettings
from kvsim.emulation.apis.merged import merged
from kvsim.emulation.lengths import AnswerLengths
from kvsim.emulation.served import Served
from tests.reused_compositions import compositions_are_reused
from tests.servers.emulated import Emulated, emulated
from tests.waiting import LONG_S, wait_until
from tests.workloads import make_request

PROMPT = list(range(2000, 2040))
CLIENT = httpx.Client(verify=False, trust_env=False, timeout=LONG_S)


@pytest.fixture(scope="session", autouse=True)
def _client_is_closed() -> Iterator[None]:
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Emulated]:
    with compositions_are_reused(), emulated(("preset=vllm", "tiers.gpu.capacity=100pages"), speed=300.0) as server:
        yield server


@pytest.fixture(scope="module")
def sglang() -> Iterator[Emulated]:
    overrides = ("preset=sglang", "tiers.gpu.capacity=1600pages")
    with compositions_are_reused(), emulated(overrides, dialect="sglang", speed=20.0) as server:
        yield server


def test_a_whole_completion_has_text_and_usage(vllm: Emulated) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 5, "model": "emulated"}
    first, again = [CLIENT.post(f"{vllm.url}/v1/completions", json=asked).json() for _ in range(2)]
    assert len(first["choices"][0]["text"].split()) == 5 and first["choices"][0]["finish_reason"] == "length"
    assert first["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 40,
        "completion_tokens": 5,
        "total_tokens": 45,
        "prompt_tokens_details": None,
    }
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


def test_the_next_turn_finds_the_answer_before_it(vllm: Emulated) -> None:
    """Answers have tokens, which their text names: 40 and 24 of them are four pages."""
    asked = {"prompt": PROMPT[::-1], "max_tokens": 25}
    text = CLIENT.post(f"{vllm.url}/v1/completions", json=asked).json()["choices"][0]["text"]
    turn = [*PROMPT[::-1], *[int(word.removeprefix("t")) for word in text.split()], 7]
    usage = CLIENT.post(f"{vllm.url}/v1/completions", json={"prompt": turn, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 64


def test_a_whole_generation_has_tokens_and_tiers(sglang: Emulated) -> None:
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}}
    first, again = [CLIENT.post(f"{sglang.url}/generate", json=asked).json() for _ in range(2)]
    assert len(first["output_ids"]) == 5 and first["meta_info"]["cached_tokens_details"] is None
    assert again["meta_info"]["cached_tokens_details"] == {"device": 39, "host": 0}
    assert again["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_a_cache_is_not_flushed_while_requests_run() -> None:
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20_000}, "stream": True}
    with (
        emulated(("preset=sglang", "tiers.gpu.capacity=30000pages"), dialect="sglang") as server,
        CLIENT.stream("POST", f"{server.url}/generate", json=asked) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert CLIENT.post(f"{server.url}/flush_cache").status_code == 400


def test_a_cache_is_flushed_when_all_requests_have_ended(sglang: Emulated) -> None:
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
    with CLIENT.stream("POST", f"{sglang.url}/generate", json=asked) as response:
        assert "data: [DONE]" in list(response.iter_lines())
    assert CLIENT.post(f"{sglang.url}/flush_cache").status_code == 200


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": []}, "a text, a list of token ids, or a list of such prompts is expected"),
        ({"prompt": [1, [2]]}, "a text, a list of token ids, or a list of such prompts is expected"),
        ({"prompt": [1], "max_tokens": 0}, "needs a prompt, and an answer of 1 to"),
        ({"prompt": [1], "max_tokens": 2, "min_tokens": 3}, "needs a prompt, and an answer of 1 to"),
        ({"prompt": [1], "n": 2000}, "may ask for 1 to 1024 answers"),
        ({"prompt": [1], "n": 0}, "may ask for 1 to 1024 answers"),
        ({"prompt": [1], "echo": True}, "prompts are not repeated here"),
        ({"prompt": [-1]}, "token ids must lie in"),
        ({"prompt": "text"}, "no tokenizer: send token ids, or start it with serve.tokenizer=DIR"),
        ({"prompt": 5}, "Expected `str | array`"),
        ({"prompt": [1] * 1590, "max_tokens": 11}, "maximum context length is 1600 tokens, not 1590 + 11"),
    ],
)
def test_bad_requests_are_refused(vllm: Emulated, body: dict[str, object], problem: str) -> None:
    reply = CLIENT.post(f"{vllm.url}/v1/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == error["code"] == 400 and problem in error["message"]
    assert error["type"] == "BadRequestError" and vllm.emulator.unfinished == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_refused_request_gets_status_429(is_streamed: bool) -> None:
    """Nothing has its first token within a nanosecond."""
    overrides = ("preset=vllm", "tiers.gpu.capacity=100pages", "admission=predicted_ttft", "admission.ttft_s=1e-9")
    with emulated(overrides, speed=300.0) as server:
        asked = {"prompt": PROMPT, "max_tokens": 5, "stream": is_streamed}
        reply = CLIENT.post(f"{server.url}/v1/completions", json=asked)
        error = reply.json()["error"]
        assert reply.status_code == error["code"] == 429 and error["type"] == "TooManyRequestsError"
        assert "refused; try again later" in error["message"] and server.emulator.unfinished == 0


@pytest.mark.parametrize(("least", "status"), [(5, 200), (16, 200), (17, 400)])
def test_the_least_tokens_may_be_as_many_as_there_are_by_default(vllm: Emulated, least: int, status: int) -> None:
    reply = CLIENT.post(f"{vllm.url}/v1/completions", json={"prompt": [1, 2], "min_tokens": least})
    assert reply.status_code == status
    assert status != 200 or reply.json()["usage"]["completion_tokens"] == 16


def test_a_stream_of_several_answers_that_is_left_leaves_no_task() -> None:
    async def left() -> int:
        served = [Served(make_request([]), [1, 2, 3], 3) for _ in range(2)]
        before = len(asyncio.all_tasks())
        stream = merged(served)
        asking = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        for _ in range(3):
            await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - before

    assert asyncio.run(left()) == 0


def test_errors_have_sglangs_form(sglang: Emulated) -> None:
    reply = CLIENT.post(f"{sglang.url}/generate", json={"input_ids": []})
    assert reply.status_code == 400 and reply.json()["object"] == "error"
    assert reply.json()["message"] == "input_ids or text: a prompt, or a list of them, is expected"


def test_several_prompts_and_answers_are_one_reply(vllm: Emulated) -> None:
    asked = {"prompt": [[1, 2, 3], [4, 5, 6, 7]], "n": 2, "max_tokens": 3}
    reply = CLIENT.post(f"{vllm.url}/v1/completions", json=asked).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (7, 12)


def test_several_answers_are_one_stream(vllm: Emulated) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": PROMPT, "n": 3, "max_tokens": 20, "stream": True, "stream_options": options}
    events = streamed(f"{vllm.url}/v1/completions", asked)
    texts = ["", "", ""]
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert [len(text.split()) for text in texts] == [20] * 3
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 60
    assert events[-2]["usage"]["completion_tokens"] == 60


def test_a_batch_of_sglang_is_a_list(sglang: Emulated) -> None:
    asked = {"input_ids": [[1, 2, 3], [4, 5, 6]], "sampling_params": {"max_new_tokens": 4}}
    replies = CLIENT.post(f"{sglang.url}/generate", json=asked).json()
    assert [len(reply["output_ids"]) for reply in replies] == [4, 4]
    events = streamed(f"{sglang.url}/generate", asked | {"stream": True})
    assert {event["index"] for event in events} == {0, 1} and events[-1]["meta_info"]["completion_tokens"] == 4


def streamed(url: str, asked: dict[str, object]) -> list[Any]:
    """The events of a stream, without the last one."""
    with CLIENT.stream("POST", url, json=asked) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("dialect", "path", "asked"),
    [
        ("vllm", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1000}),
        ("sglang", "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000}}),
    ],
)
def test_a_client_that_goes_away_ends_its_request(dialect: str, path: str, asked: dict[str, object], stream: bool) -> None:
    """Its pages are free for others then, and its prompt stays in the cache, as in the engines."""
    overrides = (f"preset={dialect}", "page_tokens=16", "tiers.gpu.capacity=100pages")
    with emulated(overrides, dialect=dialect) as server:
        body = json.dumps(asked | {"stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
            client.sendall(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
            if stream:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
            else:
                wait_until(lambda: server.served)
        served = server.next_ended()
        assert served.is_aborted and served.generated < 1000
        again = CLIENT.post(f"{server.url}{path}", json={**asked, "max_tokens": 1, "sampling_params": {"max_new_tokens": 1}})
        assert again.status_code == 200
        if stream:
            assert sum(server.served[1].cached_tokens) >= 32


def test_head_is_answered_as_get_is_without_a_body(vllm: Emulated) -> None:
    reply = CLIENT.head(f"{vllm.url}/metrics")
    assert reply.status_code == 200 and reply.content == b"" and int(reply.headers["content-length"]) > 1000
    assert CLIENT.head(f"{vllm.url}/health").status_code == 200


def test_answers_are_as_long_as_they_are_drawn_unless_the_client_insists() -> None:
    settings = ApiSettings(lengths=AnswerLengths(10, 0.5, seed=3))
    with emulated(("preset=vllm", "tiers.gpu.capacity=100pages"), speed=300.0, settings=settings) as server:

        def ask(**more: object) -> tuple[int, str]:
            reply = CLIENT.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 40, **more}).json()
            return reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]

        drawn = [ask() for _ in range(20)]
        assert 7 < sum(tokens for tokens, _ in drawn) / 20 < 13
        assert all(reason == ("length" if tokens == 40 else "stop") for tokens, reason in drawn)
        assert ask(ignore_eos=True) == (40, "length") and ask(min_tokens=30)[0] >= 30 and ask(max_tokens=1) == (1, "length")


def test_a_salt_keeps_prompts_apart(vllm: Emulated) -> None:
    """vLLM's cache_salt: only requests with the same one find each other's pages."""

    def cached(salt: str | None) -> int:
        asked = {"prompt": PROMPT[5:], "max_tokens": 1, "cache_salt": salt}
        usage = CLIENT.post(f"{vllm.url}/v1/completions", json=asked).json()["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [cached("a"), cached("b"), cached("a"), cached(None)] == [0, 0, 32, 0]


def test_servers_of_each_engine_tell_of_themselves(vllm: Emulated, sglang: Emulated) -> None:
    assert CLIENT.get(f"{vllm.url}/load").json() == {"server_load": 0}
    assert CLIENT.get(f"{vllm.url}/version").json() == {"version": "0.33.0"}
    assert CLIENT.get(f"{vllm.url}/v1/models").json()["data"][0]["max_model_len"] == 1600
    for path in ("/get_server_info", "/server_info"):
        assert CLIENT.get(f"{sglang.url}{path}").json()["max_total_num_tokens"] == 1600
    assert CLIENT.get(f"{sglang.url}/model_info").json()["model_path"] == "emulated"
    assert CLIENT.get(f"{sglang.url}/health_generate").status_code == 200
    usage = CLIENT.post(f"{sglang.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}).json()["usage"]
    assert usage["total_tokens"] == 4


def test_wrong_paths_methods_and_models_are_told(vllm: Emulated) -> None:
    assert CLIENT.get(f"{vllm.url}/nowhere").status_code == 404
    assert CLIENT.get(f"{vllm.url}/v1/completions").status_code == 405
    assert CLIENT.post(f"{vllm.url}/v1/completions", json={"prompt": [1], "model": "other"}).status_code == 404
