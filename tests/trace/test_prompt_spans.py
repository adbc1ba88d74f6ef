"""OpenTelemetry's spans that have prompts."""

import json

import pytest

from kvsim.errors import TraceError, UsageError
from kvsim.trace.auto import Auto
from kvsim.trace.formats import recognise
from kvsim.trace.lengths import Lengths
from kvsim.trace.prompt_spans import PromptSpans
from kvsim.trace.tokenizer import Tokenizer
from tests.trace.models import make_model
from tests.workloads import pages_of

T0 = 1727784000000000000
ASK = [{"role": "user", "content": "What is the weather like today?"}]
REST = [{"role": "assistant", "content": "It rains."}, {"role": "user", "content": "And tomorrow?"}]
PARTS = "gen_ai.input.messages"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def parts(messages):
    return [{"role": one["role"], "parts": [{"type": "text", "content": one["content"]}]} for one in messages]


def usage(output=9, **more):
    return {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": output, **more}


def structured(value):
    """A value as OTLP has it."""
    if isinstance(value, list):
        return {"arrayValue": {"values": [structured(one) for one in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": structured(one)} for key, one in value.items()]}}
    return {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}


def otlp(*spans):
    """A line of OTLP's file exporter: seconds, attributes and events of each span."""
    found = [
        {
            "startTimeUnixNano": str(T0 + int(at_s * 1e9)),
            "attributes": [{"key": key, "value": structured(value)} for key, value in attributes.items()],
            "events": [
                {"name": name, "attributes": [{"key": key, "value": structured(value)} for key, value in own.items()]}
                for name, own in events.items()
            ],
        }
        for at_s, attributes, events in spans
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": found}]}]}


def flat(at_s, attributes, events=()):
    """A line of an SDK's exporter to the console."""
    return {"start_time": f"2024-10-01T12:00:0{at_s:.6f}Z", "attributes": attributes, "events": list(events)}


def load(write, model, *lines, **settings):
    return PromptSpans(path=write(*lines), tokenizer=model, **settings).load(4).requests


OUT = "gen_ai.output.messages"
WAYS = {
    "attributes, as text of JSON": lambda ask, answer: (
        usage(**{PARTS: json.dumps(parts(ask)), OUT: json.dumps(parts([{"role": "assistant", "content": answer}]))}), {}
    ),
    "attributes, structured": lambda ask, answer: (
        usage(**{PARTS: parts(ask), OUT: parts([{"role": "assistant", "content": answer}])}), {}
    ),
    "an event": lambda ask, answer: (
        usage(),
        {"gen_ai.client.inference.operation.details": {
            PARTS: parts(ask), OUT: parts([{"role": "assistant", "content": answer}])}},
    ),
    "earlier events": lambda ask, answer: (
        usage(),
        {"gen_ai.content.prompt": {"gen_ai.prompt": json.dumps(ask)},
         "gen_ai.content.completion": {"gen_ai.completion": json.dumps([{"role": "assistant", "content": answer}])}},
    ),
    "numbered attributes": lambda ask, answer: (
        usage(**{f"gen_ai.prompt.{at}.{key}": one[key] for at, one in enumerate(ask) for key in one})
        | {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": answer}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_span_is_a_request_with_the_tokens_of_its_answer(write, model, way):
    later, first = WAYS[way]([*ASK, *REST], "As always."), WAYS[way](ASK, "It rains.")
    path = write(otlp((0.0, {"http.request.method": "GET"}, {})), otlp((2.5, *later), (0.0, *first)))
    assert recognise(path)[0].name == "spans"
    first, second = PromptSpans(path=path, tokenizer=model).load(4).requests
    tokenizer = Tokenizer(model)
    prompt = tokenizer.render(ASK)
    tokenizer.encode_all([prompt, "It rains."])
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.5)
    assert first.prompt_tokens == len(tokenizer.encode(prompt))
    assert first.output_tokens == len(tokenizer.encode("It rains.")) + 1
    shared = (first.prompt_tokens + first.output_tokens - 1) // 4
    assert pages_of(second.runs)[:shared] == pages_of((*first.runs, *first.output_runs))


def test_the_console_s_spans_are_read_too(write, model):
    event = {"name": "gen_ai.content.prompt", "attributes": {"gen_ai.prompt": json.dumps(ASK)}}
    spans = [flat(1, usage(**{PARTS: json.dumps(parts(ASK))})), flat(0, usage(), [event])]
    path = write(*spans)
    assert recognise(path)[0].name == "spans"
    first, second = PromptSpans(path=path, tokenizer=model).load(4).requests
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.0) and first.runs == second.runs


def test_system_instructions_come_first(write, model):
    system = [{"type": "text", "content": "Be brief."}]
    spans = [
        otlp((0, usage(**{PARTS: parts(ASK), "gen_ai.system_instructions": system}), {})),
        otlp((1, usage(**{PARTS: parts([{"role": "system", "content": "Be brief."}, *ASK])}), {})),
    ]
    one, other = load(write, model, *spans)
    assert one.runs == other.runs


def test_calls_of_tools_and_their_responses_are_part_of_the_prompt(write, model):
    called = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "weather", "arguments": {"at": "Paris"}}]}
    told = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "rain"}]}
    asked = parts(ASK)
    spans = [(at, usage(**{PARTS: json.dumps(asked + more)}), {}) for at, more in enumerate(([], [called], [called, told]))]
    lengths = [request.prompt_tokens for request in PromptSpans(path=write(otlp(*spans)), tokenizer="bytes").load(4).requests]
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize(
    ("output", "length", "samples"),
    [
        ([{"role": "assistant", "parts": [{"type": "tool_call", "name": "f"}]}], 9, 1),
        ([{"role": "assistant", "parts": [{"type": "reasoning", "content": "x"}, {"type": "text", "content": "a"}]}], 9, 1),
        (parts([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]), 5, 2),
    ],
)
def test_without_the_text_of_all_that_was_generated_usage_tells_the_length(write, model, output, length, samples):
    (request,) = load(write, model, otlp((0, usage(**{PARTS: parts(ASK), OUT: output}), {})))
    assert (request.output_tokens, request.samples, request.output_runs) == (length, samples, None)


def test_agents_failures_and_spans_without_prompts_are_left_out(write, model):
    prompt = {PARTS: parts(ASK)}
    spans = [
        (0, usage(**prompt, **{"gen_ai.operation.name": "invoke_agent"}), {}),
        (1, usage(**prompt, **{"error.type": "timeout"}), {}),
        (2, usage(), {}),
        (3, usage(**prompt), {}),
    ]
    trace = PromptSpans(path=write(otlp(*spans)), tokenizer=model).load(4)
    assert [request.arrival_s for request in trace.requests] == [0.0]
    assert trace.note == "spans of requests without a prompt, left out: 1"


def test_sessions_take_turns_in_time_and_the_limit_counts_requests(write, model):
    spans = [(at, usage(**{PARTS: parts(ASK), "gen_ai.conversation.id": "a"}), {}) for at in (5, 1, 3, 4)]
    requests = load(write, model, otlp(*spans), limit=3)
    assert [(request.arrival_s, request.session, request.turn) for request in requests] == [
        (0.0, 0, 0), (2.0, 0, 1), (4.0, 0, 2),
    ]  # fmt: skip


def test_a_prompt_that_is_text_has_no_template(write, model):
    (request,) = load(write, model, otlp((0, {"gen_ai.prompt": "It rains.", "gen_ai.completion": "As always."}, {})))
    tokenizer = Tokenizer(model)
    tokenizer.encode_all(["It rains.", "As always."])
    assert request.prompt_tokens == len(tokenizer.begin) + len(tokenizer.encode("It rains."))
    assert request.output_tokens == len(tokenizer.encode("As always.")) + 1


def test_a_tokenizer_is_asked_for_and_lengths_are_still_there(write, model):
    path = write(otlp((0, usage(**{PARTS: parts(ASK)}), {})))
    with pytest.raises(UsageError, match=r"trace\.tokenizer is missing: .*trace\.tokenizer=bytes"):
        Auto(path=path).load(4)
    assert "estimates" in Auto(path=path, tokenizer="bytes").load(4).note
    (request,) = Lengths(path=path, prefixes=0.0).load(4).requests
    assert (request.prompt_tokens, request.output_tokens) == (20, 9)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {PARTS: [{"role": "user", "parts": [{"type": "blob", "content": "x"}]}]},
            'gen_ai.input.messages: content of type "blob" is not text',
        ),
        ({PARTS: [{"role": "user", "parts": "x"}]}, "gen_ai.input.messages: parts must be a list of objects, not"),
        ({PARTS: [{"parts": [{"type": "text", "content": "x"}]}]}, "every message must have a role"),
        ({PARTS: [3]}, "gen_ai.input.messages must be a list of messages, not"),
        ({PARTS: parts(ASK), "gen_ai.usage.output_tokens": "many"}, "gen_ai.usage.output_tokens must be"),
    ],
)
def test_a_bad_span_is_named(write, model, attributes, message):
    with pytest.raises(TraceError, match=f":1: {message}"):
        load(write, model, flat(0, attributes))
