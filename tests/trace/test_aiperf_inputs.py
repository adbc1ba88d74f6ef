"""AIPerf's inputs.json."""

import json

import pytest

from kvsim.errors import TraceError
from kvsim.trace.aiperf_inputs import NOTE, AIPerfInputs
from kvsim.trace.formats import recognise
from tests.trace.models import make_model

ASK = {"role": "user", "content": "What is the weather like today?"}
ANSWER = {"role": "assistant", "content": "It rains."}
MORE = {"role": "user", "content": "And tomorrow?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def load(tmp_path, model):
    def load(*sessions, **settings):
        path = tmp_path / "inputs.json"
        path.write_text(
            json.dumps({"data": [{"session_id": f"s{at}", "payloads": own} for at, own in enumerate(sessions)]}, indent=2)
        )
        assert recognise(str(path))[0].name == "aiperf_inputs"
        return AIPerfInputs(path=str(path), tokenizer=model, **settings).load(4)

    return load


def test_each_payload_is_a_request(load):
    trace = load(
        [{"messages": [ASK], "max_completion_tokens": 30}], [{"prompt": ["It rains."]}], [{"input_ids": [5, 6, 7, 8, 9]}]
    )
    assert [(r.session, r.output_tokens) for r in trace.requests] == [(0, 30), (1, 1), (2, 1)]
    assert (trace.requests[2].prompt_tokens, trace.note) == (5, "")


def test_payloads_with_their_history_are_prompts_as_they_are(load):
    trace = load([{"messages": [ASK]}, {"messages": [ASK, ANSWER, MORE]}])
    first, second = trace.requests
    assert (second.after, second.turn, trace.note) == (0, 1, "")
    assert load([{"messages": [ASK, ANSWER, MORE]}]).requests[0].prompt_tokens == second.prompt_tokens > first.prompt_tokens


def test_payloads_with_only_their_turn_continue_those_before_and_are_marked(load):
    trace = load([{"messages": [ASK]}, {"messages": [MORE]}])
    assert trace.requests[1].prompt_tokens == load([{"messages": [ASK, MORE]}]).requests[0].prompt_tokens
    assert trace.note == NOTE


def test_limit_counts_sessions(load):
    assert len(load([{"messages": [ASK]}, {"messages": [MORE]}], [{"prompt": "It rains."}], limit=1).requests) == 2


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"model": "m"}, "messages is missing; a request must have messages or a prompt"),
        ({"prompt": ["a", "b"]}, "prompt must be a list of non-negative integers"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 'content of type "image_url" is not text'),
        (3, "expected a JSON object, not 3"),
    ],
)
def test_a_bad_payload_is_named(load, payload, message):
    with pytest.raises(TraceError, match=f":1: {message}"):
        load([payload])
