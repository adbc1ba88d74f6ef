"""Prompts of text, and chats, with a model's tokenizer."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvsim.emulation.apis.base import ApiSettings
from kvsim.emulation.text import Texts
from kvsim.errors import UsageError
from tests.servers.emulated import Emulated, emulated
from tests.trace.models import make_model
from tests.waiting import LONG_S

CLIENT = httpx.Client(verify=False, trust_env=False, timeout=LONG_S)
QUESTION = {"role": "user", "content": "What is the weather like today? " * 8}


@pytest.fixture(scope="session", autouse=True)
def _client_is_closed() -> Iterator[None]:
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, model: str) -> Iterator[Emulated]:
    overrides = (f"preset={request.param}", "page_tokens=16", "tiers.gpu.capacity=100pages")
    settings = ApiSettings(texts=Texts(model))
    with emulated(overrides, dialect=request.param, speed=100.0, settings=settings) as server:
        yield server


def asked(server: Emulated, path: str, **body: Any) -> Any:
    reply = CLIENT.post(f"{server.url}{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_text_is_the_tokens_that_the_tokenizer_makes_of_it(server: Emulated) -> None:
    told = asked(server, "/tokenize", prompt="The quick brown fox")
    assert told["count"] == len(told["tokens"])
    usage = asked(server, "/v1/completions", prompt="The quick brown fox", max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == told["count"]


def test_an_answer_that_a_client_sends_back_has_its_tokens_again(server: Emulated) -> None:
    """The next turn of a chat finds the answer in the cache, since its text has the tokens that were generated."""
    first = asked(server, "/v1/chat/completions", messages=[QUESTION], max_tokens=40)
    message = first["choices"][0]["message"]
    assert message["role"] == "assistant" and len(message["content"].split()) == 40
    turn = [QUESTION, message, {"role": "user", "content": "It rains"}]
    second = asked(server, "/v1/chat/completions", messages=turn, max_tokens=1)
    before = first["usage"]["prompt_tokens"] + 39
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before // 16 * 16
    assert asked(server, "/tokenize", messages=turn)["count"] == second["usage"]["prompt_tokens"]


def test_a_chat_streams_deltas(server: Emulated) -> None:
    body = {"messages": [QUESTION], "max_completion_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    with CLIENT.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    first, *events, last = map(json.loads, lines)
    assert first["object"] == "chat.completion.chunk" and first["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert len(text.split()) == 6 and events[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6


def test_parts_of_text_and_tools_are_rendered(server: Emulated) -> None:
    parts = [{"type": "text", "text": "The quick"}, {"type": "text", "text": "brown fox"}]
    apart = asked(server, "/tokenize", messages=[{"role": "user", "content": parts}])
    whole = asked(server, "/tokenize", messages=[{"role": "user", "content": "The quick\nbrown fox"}])
    assert apart["tokens"] == whole["tokens"]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    usage = asked(server, "/v1/chat/completions", messages=[QUESTION], tools=tools, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] > asked(server, "/tokenize", messages=[QUESTION])["count"]


def test_a_conversation_that_the_template_refuses_is_the_clients_mistake(server: Emulated) -> None:
    reply = CLIENT.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "nobody", "content": ""}]})
    assert reply.status_code == 400 and "nobody may not speak" in reply.text


def test_a_chat_ends_by_itself_if_its_client_sets_no_limit(server: Emulated) -> None:
    usage = asked(server, "/v1/chat/completions", messages=[QUESTION])["usage"]
    assert usage["completion_tokens"] == 128


def test_generate_takes_text(model: str) -> None:
    settings = ApiSettings(texts=Texts(model))
    with emulated(("preset=sglang", "tiers.gpu.capacity=1600pages"), dialect="sglang", speed=100.0, settings=settings) as server:
        reply = asked(server, "/generate", text=["The quick", "It rains"], sampling_params={"max_new_tokens": 3})
        assert [len(one["text"].split()) for one in reply] == [3, 3]
        assert (
            asked(server, "/generate", text="The quick", sampling_params={"max_new_tokens": 1})["meta_info"]["prompt_tokens"] > 1
        )


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(UsageError, match=r"^serve\.tokenizer: .*tokenizer\.json does not exist"):
        Texts(str(tmp_path_factory.mktemp("empty")))
