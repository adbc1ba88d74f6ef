"""The interfaces of emulated servers, as a client without kvsim meets them."""

from collections.abc import Iterator

import httpx
import pytest

from tests.reused_compositions import compositions_are_reused
from tests.servers.emulated import Emulated, emulated

PROMPT = list(range(2000, 2040))
CLIENT = httpx.Client(verify=False, trust_env=False, timeout=60.0)


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
        next(response.iter_lines())
        assert CLIENT.post(f"{server.url}/flush_cache").status_code == 400


def test_a_cache_is_flushed_when_all_requests_have_ended(sglang: Emulated) -> None:
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
    with CLIENT.stream("POST", f"{sglang.url}/generate", json=asked) as response:
        assert "data: [DONE]" in list(response.iter_lines())
    assert CLIENT.post(f"{sglang.url}/flush_cache").status_code == 200


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": []}, "needs a prompt of token ids"),
        ({"prompt": [1], "max_tokens": 0}, "needs a prompt of token ids"),
        ({"prompt": [-1]}, "tokens must lie in"),
        ({"prompt": "text"}, "Expected `array`"),
        ({"prompt": [1] * 1590, "max_tokens": 11}, "maximum context length is 1600 tokens, not 1590 + 11"),
    ],
)
def test_bad_requests_are_refused(vllm: Emulated, body: dict[str, object], problem: str) -> None:
    reply = CLIENT.post(f"{vllm.url}/v1/completions", json=body)
    assert reply.status_code == 400 and problem in reply.json()["error"]["message"]


def test_wrong_paths_methods_and_models_are_told(vllm: Emulated) -> None:
    assert CLIENT.get(f"{vllm.url}/nowhere").status_code == 404
    assert CLIENT.get(f"{vllm.url}/v1/completions").status_code == 405
    assert CLIENT.post(f"{vllm.url}/v1/completions", json={"prompt": [1], "model": "other"}).status_code == 404
