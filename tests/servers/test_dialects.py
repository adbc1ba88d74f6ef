"""What the engines send, as they send it, and what is read of it."""

from contextlib import suppress
from math import isnan

import msgspec
import pytest

from kvsim.results.observed import NOT_TOLD
from kvsim.servers.answer import Answer, Failed
from kvsim.servers.dialects.openai import OpenAI
from kvsim.servers.dialects.sglang import Sglang
from kvsim.servers.dialects.table import DIALECTS
from kvsim.servers.dialects.vllm import Vllm, flat

HEAD = {"id": "cmpl-8", "object": "text_completion", "created": 1, "model": "m"}


def chunk(text: str, reason: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    return msgspec.json.encode(HEAD | {"choices": [choice]} | more)


def closing(**more: object) -> bytes:
    return msgspec.json.encode(HEAD | {"choices": []} | more)


def meta(**more: object) -> bytes:
    return msgspec.json.encode({"text": "so far", "output_ids": [5, 6], "meta_info": {"id": "a", "prompt_tokens": 40} | more})


def test_vllm_tells_cached_tokens_and_the_queue_at_the_end() -> None:
    answer = Answer(30)
    assert Vllm().read(chunk(" the"), answer) and Vllm().read(chunk(""), answer), "a token may have no text yet"
    assert answer.output_tokens == 2 and answer.cached_tokens == NOT_TOLD
    usage = {"prompt_tokens": 31, "total_tokens": 35, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}}
    times = {"time_to_first_token_ms": 9.0, "queue_time_ms": 2.5, "mean_itl_ms": 1.0, "tokens_per_second": 99.0}
    assert not Vllm().read(closing(usage=usage, metrics=times), answer)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (31, 4, 16)
    assert (answer.queued_s, answer.prefill_s) == (0.0025, 0.009)


def test_a_last_token_of_vllm_may_have_no_text() -> None:
    """Each of its events brings a token, the one that ends the answer, too; usage is what counts them."""
    answer = Answer(30)
    assert Vllm().read(chunk("a"), answer) and Vllm().read(chunk("", "length"), answer) and answer.output_tokens == 2
    assert not Vllm().read(chunk("", "stop"), answer), "an answer that was stopped may end without a token"
    assert not Vllm().read(closing(usage={"prompt_tokens": 30, "completion_tokens": 3}), answer) and answer.output_tokens == 3


def test_a_server_that_says_little_is_read_as_far_as_it_does() -> None:
    answer = Answer(30)
    assert OpenAI().read(chunk("a"), answer) and OpenAI().read(chunk("b", usage=None), answer)
    assert not OpenAI().read(chunk("", "length"), answer), "the end alone is no token"
    assert not OpenAI().read(closing(usage={"prompt_tokens": 30, "completion_tokens": 2, "prompt_tokens_details": None}), answer)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (30, 2, NOT_TOLD) and isnan(answer.queued_s)


def test_sglang_tells_tiers_from_the_first_token_on() -> None:
    answer = Answer(40)
    tiers = {"device": 8, "host": 16, "storage": 4, "storage_backend": "HiCacheFile"}
    first = meta(completion_tokens=1, cached_tokens=28, cached_tokens_details=tiers, finish_reason=None, queue_time=0.25)
    assert Sglang().read(first, answer)
    assert answer.cached_tokens == 28 and answer.tier_tokens == {"device": 8, "host": 16, "storage": 4}
    assert answer.queued_s == 0.25 and answer.output_tokens == 1
    assert not Sglang().read(first, answer), "no token more"
    last = meta(completion_tokens=3, cached_tokens=28, cached_tokens_details=tiers, finish_reason={"type": "length", "length": 3})
    assert Sglang().read(last, answer) and answer.output_tokens == 3


def test_sglang_tells_no_tiers_where_nothing_was_cached() -> None:
    answer = Answer(40)
    assert Sglang().read(meta(completion_tokens=1, cached_tokens=0, cached_tokens_details=None), answer)
    assert answer.cached_tokens == 0 and answer.tier_tokens == {}


@pytest.mark.parametrize(
    ("engine", "event", "problem"),
    [
        (
            "vllm",
            {"error": {"message": "EngineCore died", "type": "Internal", "code": 500}},
            "failed: EngineCore died",
        ),
        ("openai", {"error": "overloaded"}, "the server failed: overloaded"),
        ("sglang", {"error": {"message": "Input length 9 exceeds", "code": 400}}, "failed: Input length 9 exceeds"),
        (
            "sglang",
            {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "out of\n memory", "status_code": 500}}},
            "the server gave the request up: out of memory",
        ),
    ],
)
def test_failures_within_a_stream_are_told(engine: str, event: object, problem: str) -> None:
    with pytest.raises(Failed, match=problem):
        DIALECTS[engine].read(msgspec.json.encode(event), Answer(1))


@pytest.mark.parametrize("event", [b"", b"[]", b'{"choices": 1}', b'{"meta_info": []}', b"\xff"])
@pytest.mark.parametrize("engine", list(DIALECTS))
def test_what_is_no_event_is_a_value_error_or_nothing(engine: str, event: bytes) -> None:
    answer = Answer(1)
    with suppress(ValueError):
        assert not DIALECTS[engine].read(event, answer)
    assert answer.output_tokens == 0


def test_requests_ask_for_answers_of_their_length() -> None:
    vllm = Vllm().body("m", [1, 2], 7)
    assert vllm["prompt"] == [1, 2] and vllm["max_tokens"] == 7 and vllm["ignore_eos"] and vllm["stream_options"]["include_usage"]
    assert "ignore_eos" not in OpenAI().body("m", [1], 7), "others may refuse it"
    sglang = Sglang().body("m", [1, 2], 7)
    assert sglang["input_ids"] == [1, 2]
    assert sglang["sampling_params"] == {"max_new_tokens": 7, "ignore_eos": True, "temperature": 0.0}


def test_nested_settings_get_their_full_names() -> None:
    nested = {"scheduler_config": {"max_num_seqs": 256, "policy": "fcfs"}, "instance_id": "a"}
    assert flat(nested) == {"scheduler_config.max_num_seqs": 256, "scheduler_config.policy": "fcfs", "instance_id": "a"}
    assert flat(None) == {}
