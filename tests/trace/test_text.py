"""Logs that contain prompts as text."""

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Encoder

from kvsim.api import load_trace, replay
from kvsim.cli import main
from kvsim.errors import TraceError, UsageError
from kvsim.trace.openai import OpenAI
from kvsim.trace.sharegpt import ShareGPT
from kvsim.trace.tokenizer import Tokenizer
from tests.trace.models import TEXT, make_model

SYSTEM = {"role": "system", "content": TEXT}
ASK, ANSWER, AGAIN, LAST = (
    {"role": role, "content": content}
    for role, content in (
        ("user", "What is the weather like? " * 3),
        ("assistant", "It rains, as it always does. " * 3),
        ("user", "And tomorrow? " * 3),
        ("assistant", "It rains."),
    )
)
TALK = [SYSTEM, ASK, ANSWER, AGAIN, LAST]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a tokenizer."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def ids(model):
    """Encodes text with the library's tokenizer, as a whole."""
    encoder = Encoder.from_file(str(Path(model) / "tokenizer.json"))
    return lambda text: encoder.encode(text, add_special_tokens=False).ids


def rendered(messages, *, with_prompt=True):
    """The text that the template makes of messages, written out."""
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return f"<|begin|>{turns}" + "<|im_start|>assistant\n" * with_prompt


def keys_of(source):
    """The tokens of each request's prompt, and its output length."""
    return [(record.fields["token_ids"], record.fields["output_length"]) for record in source.records()]


def test_the_template_is_rendered_as_written(model):
    assert Tokenizer(model).render(TALK[:2]) == rendered(TALK[:2])
    assert Tokenizer(model).render(TALK, with_prompt=False) == rendered(TALK, with_prompt=False)


def test_pieces_are_encoded_as_the_whole_text_is(model, ids):
    texts = [rendered(TALK[:end]) for end in range(1, 6)] + ["<|im_end|>", "a<|im_end|><|im_end|>  b ", " x"]
    tokenizer = Tokenizer(model)
    tokenizer.encode_all(texts)
    assert [tokenizer.encode(text) for text in texts] == [ids(text) for text in texts]


@pytest.mark.parametrize("change", [{"pre_tokenizer": "Metaspace"}, {"normalizer": "Prepend"}, {"lstrip": True}])
def test_a_tokenizer_that_looks_at_the_beginning_gets_whole_texts(model, tmp_path, change):
    description = json.loads((Path(model) / "tokenizer.json").read_text())
    if change.get("pre_tokenizer"):
        description["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False}
    elif change.get("normalizer"):
        description["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]}
    else:
        description["added_tokens"][0]["lstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    text = rendered(TALK)
    tokenizer = Tokenizer(str(tmp_path))
    tokenizer.encode_all([text])
    encoder = Encoder.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text) == encoder.encode(text, add_special_tokens=False).ids


def test_each_human_turn_of_sharegpt_is_a_request(write, model, ids):
    turns = [
        {"from": name, "value": m["content"]} for name, m in zip(("system", "human", "gpt", "user", "bard"), TALK, strict=True)
    ]
    path = write(json.dumps([{"id": "a", "conversations": turns}, {"id": "b", "conversations": []}]), name="talk.json")
    source = ShareGPT(path=path, tokenizer=model)
    assert keys_of(source) == [
        (ids(rendered(TALK[:2])), len(ids(ANSWER["content"])) + 1),
        (ids(rendered(TALK[:4])), len(ids(LAST["content"])) + 1),
    ]
    first, second = source.load(4).requests
    assert (first.session, first.turn, second.session, second.turn, second.after) == (0, 0, 0, 1, 0)


def test_a_prompt_continues_the_answer_before_it(write, model, ids):
    """All full pages of the first prompt and its answer are hit if answers are cached."""
    path = write({"messages": TALK})
    trace = load_trace(path=path, tokenizer=model, page_tokens=4)
    answered = ids(rendered(TALK[:2]) + ANSWER["content"])
    alone = len(ids(rendered(TALK[:2])))
    for cache_output, pages in ((True, len(answered) // 4), (False, alone // 4)):
        found = replay(trace, f"rules.cache_output={cache_output}", "tiers.gpu.capacity=unlimited")
        assert found.hit_pages[:, 0].tolist() == [0, pages]


def test_a_batch_line_is_one_request(write, model, ids):
    def line(**body):
        return {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}

    parts = [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]
    path = write(
        line(messages=TALK[:4], max_tokens=30),
        line(messages=[{"role": "user", "content": parts}]),
        line(prompt=TEXT, max_completion_tokens=5),
        line(prompt=[7, 8, 9]),
    )
    begin = ids("<|begin|>")
    assert keys_of(OpenAI(path=path, tokenizer=model, output_tokens=11)) == [
        (ids(rendered(TALK[:4])), 30),
        (ids(rendered([{"role": "user", "content": "And\nnow?"}])), 11),
        (begin + ids(TEXT), 5),
        ([7, 8, 9], 11),
    ]


def test_messages_that_end_with_a_question_are_one_request(write, model, ids):
    path = write({"messages": TALK[:4], "output_length": 9, "timestamp": 500, "session_id": "s"})
    (request,) = OpenAI(path=path, tokenizer=model).load(4).requests
    assert (request.prompt_tokens, request.output_tokens, request.session) == (len(ids(rendered(TALK[:4]))), 9, 0)


def test_of_messages_with_a_history_only_the_last_answer_may_count(write, model, ids):
    path = write({"messages": TALK[:3], "timestamp": 0, "session_id": 1}, {"messages": TALK, "timestamp": 5000, "session_id": 1})
    source = OpenAI(path=path, tokenizer=model, requests="last_answer")
    requests = source.load(4).requests
    assert [(r.prompt_tokens, r.arrival_s, r.turn) for r in requests] == [
        (len(ids(rendered(TALK[:2]))), 0.0, 0),
        (len(ids(rendered(TALK[:4]))), 5.0, 1),
    ]


def test_a_tool_call_is_an_answer(write, model, ids):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    path = write({"messages": [ASK, call], "tools": [{"name": "look"}]})
    ((_, output),) = keys_of(OpenAI(path=path, tokenizer=model))
    assert output == len(ids(json.dumps(call["tool_calls"]) + "<|im_end|>\n")) + 1


def test_aiperf_and_agent_traces_have_plain_prompts(write, model, ids):
    begin = ids("<|begin|>")
    assert keys_of(OpenAI(path=write({"text_input": TEXT, "output_length": 4}), tokenizer=model)) == [(begin + ids(TEXT), 4)]
    path = write({"timestamp": 0, "input": TEXT, "output": "It rains.", "session_id": 0})
    assert keys_of(OpenAI(path=path, tokenizer=model)) == [(begin + ids(TEXT), len(ids("It rains.")) + 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, "messages is empty; a request must have a prompt"),
        ({"messages": [{"content": "x"}]}, "every message must have a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 'content of type "image_url" is not text'),
        ({"messages": [{"role": "nobody", "content": ""}]}, "the chat template of "),
        ({"messages": [{"role": "divider", "content": ""}]}, "the chat template of "),
        ({"prompt": 5}, "prompt must be text, not 5"),
        ({"body": {}, "custom_id": 1}, "messages is missing; a request must have messages or a prompt"),
    ],
)
def test_a_bad_line_is_named(write, model, line, message):
    path = write({"prompt": "x"}, line)
    with pytest.raises(TraceError) as caught:
        OpenAI(path=path, tokenizer=model).load(4)
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_a_bad_speaker_is_named(write, model):
    path = write({"conversations": [{"from": "cat", "value": "meow"}]})
    with pytest.raises(TraceError, match=r'from must be one of human, user, .*, not "cat"'):
        ShareGPT(path=path, tokenizer=model).load(4)


def test_text_needs_a_tokenizer(write, tmp_path, capsys):
    path = write({"messages": TALK})
    for more, expected in (
        ([], "trace.tokenizer is missing: this file contains text; set trace.tokenizer=DIR"),
        ([f"trace.tokenizer={tmp_path}"], f"trace.tokenizer: {tmp_path}/tokenizer.json does not exist"),
    ):
        assert main(["replay", f"trace.path={path}", *more]) == 2
        assert capsys.readouterr().err.startswith(f"kvsim: {expected}")


def test_without_the_library_it_says_how_to_get_it(write, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install kvsim\[text\]"):
        OpenAI(path=write({"messages": TALK}), tokenizer=model).load(4)


def test_another_template_is_another_run(write, model, tmp_path):
    """The tokenizer's files are part of what a result depends on."""
    path, folder = write({"messages": TALK}), tmp_path / "model"
    make_model(folder)
    hashes = []
    for number in range(3):
        if number == 2:
            (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        output = tmp_path / str(number)
        assert main(["replay", f"trace.path={path}", f"trace.tokenizer={folder}", f"output={output}"]) == 0
        hashes.append(json.loads((output / "result.json").read_text())["config_hash"])
    assert hashes[0] == hashes[1] != hashes[2]
