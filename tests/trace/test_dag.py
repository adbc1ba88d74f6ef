"""AIPerf's dag_jsonl."""

import json

import pytest

from kvsim.api import load_trace, simulate
from kvsim.errors import TraceError
from kvsim.trace import dag
from kvsim.trace.dag import NOTE, Dag
from kvsim.trace.formats import recognise
from tests.trace.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def turn(text="What is the weather like today?", **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 9, **more}


def talk(name, *turns, **more):
    return {"session_id": name, "turns": list(turns) or [turn()], **more}


@pytest.fixture
def load(tmp_path, model):
    def load(*lines, page_tokens=1, **settings):
        path = tmp_path / "dag.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        assert recognise(str(path))[0].name == "dag"
        return Dag(path=str(path), **{"tokenizer": model, **settings}).load(page_tokens)

    return load


def graph(trace):
    """(session, requests waited for, delay in ms) of each request."""
    return [(one.session, one.predecessors, round(one.delay_s * 1000, 6)) for one in trace.requests]


def shared_tokens(one, other):
    """Tokens that two prompts have in common, in pages of one token."""
    pages = [[start + at for start, length in request.runs for at in range(length)] for request in (one, other)]
    return next((at for at, pair in enumerate(zip(*pages, strict=False)) if pair[0] != pair[1]), min(map(len, pages)))


def test_a_turn_waits_for_the_one_before_and_continues_its_prompt_and_answer(load):
    trace = load(talk("a", turn(), turn("And tomorrow?", delay=250, max_tokens=20)), talk("b"))
    assert graph(trace) == [(0, (), 0), (1, (), 0), (0, (0,), 250)]
    first, other, second = trace.requests
    assert [one.output_tokens for one in trace.requests] == [9, 9, 20] and trace.note == NOTE
    assert shared_tokens(first, second) == first.prompt_tokens == shared_tokens(first, other)
    answer_pages = sum(length for _, length in first.output_runs)
    assert answer_pages == 8, "the last token of an answer has no KV"
    path = [start + at for start, length in (*first.runs, *first.output_runs) for at in range(length)]
    prompt = [start + at for start, length in second.runs for at in range(length)]
    assert prompt[: len(path)] == path, "the answer is in the next prompt"


def test_subagents_begin_after_a_turn_and_the_next_one_waits_for_all_of_them(load):
    """A diamond: a's first turn, b of two turns and c beside it, a's second turn."""
    trace = load(talk("a", turn(spawns=["b", "c"]), turn(delay=30)), talk("b", turn("It rains."), turn(delay=10)), talk("c"))
    assert graph(trace) == [(0, (), 0), (0, (0,), 0), (0, (0,), 0), (0, (1,), 10), (0, (0, 3, 2), 30)]
    assert [one.turn for one in trace.requests] == [0, 1, 3, 2, 4]
    alone = load(talk("b", turn("It rains."))).requests[0]
    assert trace.requests[1].prompt_tokens == alone.prompt_tokens, "without the history of its parent"


def test_a_later_turn_may_wait_for_subagents(load):
    lines = talk("a", turn(spawns=[{"children": ["b"], "join_at": 2}]), turn(), turn()), talk("b")
    assert graph(load(*lines)) == [(0, (), 0), (0, (0,), 0), (0, (0,), 0), (0, (2, 1), 0)]


def test_nobody_waits_for_subagents_of_the_last_turn_or_what_begins_with_a_conversation(load):
    trace = load(talk("a", turn(), turn(spawns=["c"]), pre_session_spawns=["b"]), talk("b"), talk("c"))
    assert graph(trace) == [(0, (), 0), (0, (), 0), (0, (1,), 0), (0, (2,), 0)]


def test_forks_continue_a_conversation_with_its_answer(load):
    trace = load(talk("a", turn(forks=["b", "c"])), talk("b", turn("It rains.")), talk("c", turn("And tomorrow?")))
    root, one, other = trace.requests
    assert graph(trace) == [(0, (), 0), (0, (0,), 0), (0, (0,), 0)]
    assert shared_tokens(one, other) > root.prompt_tokens + 8, "prompt and answer of the root, and what the template adds"


def test_forks_in_the_background_leave_the_conversation_going(load):
    lines = talk("a", turn(forks=[{"child": "b", "background": True}]), turn()), talk("b")
    assert graph(load(*lines)) == [(0, (), 0), (0, (0,), 0), (0, (0,), 0)]


def test_a_spawned_conversation_may_begin_several_times_with_answers_of_its_own(load):
    trace = load(talk("a", turn(spawns=["c"]), turn(spawns=["c"]), turn()), talk("c", turn("It rains.")))
    assert graph(trace) == [(0, (), 0), (0, (0,), 0), (0, (0, 1), 0), (0, (2,), 0), (0, (2, 3), 0)]
    first, second = trace.requests[1], trace.requests[3]
    assert first.runs == second.runs and first.output_runs != second.output_runs


def test_an_orchestrator_plays_rounds_one_after_another(load):
    rounds = [{"spawns": ["a", "b"], "think_time_ms": 5}, {"spawns": ["c"]}]
    line = {"session_id": "o", "orchestrator": True, "rounds": rounds, "think_time_ms": 7}
    trace = load(line, talk("a"), talk("b"), talk("c", turn(delay=2)))
    assert graph(trace) == [(0, (), 0), (0, (), 0), (0, (0, 1), 9)]
    again = load({**line, "rounds": 2, "spawns": ["a", "b"]}, talk("a"), talk("b"))
    assert graph(again) == [(0, (), 0), (0, (), 0), (0, (0, 1), 7), (0, (0, 1), 7)]
    once = load({"session_id": "o", "orchestrator": True, "spawns": ["a", "b"]}, talk("a"), talk("b"))
    assert graph(once) == [(0, (), 0), (0, (), 0)]


def test_context_modes_say_what_is_before_a_turn(load):
    turns = turn("It rains."), turn("And tomorrow?")
    ends = {}
    for mode in ("deltas_without_responses", "deltas_with_responses", "message_array_with_responses"):
        ends[mode] = load(talk("a", *turns, context_mode=mode)).requests[1].prompt_tokens
    alone = load(talk("a", turns[1])).requests[0].prompt_tokens
    assert ends["message_array_with_responses"] == alone < ends["deltas_with_responses"]
    assert ends["deltas_without_responses"] >= ends["deltas_with_responses"] + 8


def test_limit_counts_roots_and_bytes_do_without_a_tokenizer(load):
    lines = talk("a", turn(spawns=["b"]), turn()), talk("b"), talk("c")
    assert len(load(*lines, limit=1).requests) == 3
    trace = load(*lines, tokenizer="bytes")
    assert len(trace.requests) == 4 and trace.note.endswith(NOTE) and trace.note != NOTE


def test_it_is_simulated_as_its_graph_says(load, model, tmp_path):
    load(talk("a", turn(spawns=["b", "c"]), turn(delay=30)), talk("b"), talk("c", turn("It rains.")))
    trace = load_trace(path=str(tmp_path / "dag.jsonl"), tokenizer=model, page_tokens=4)
    result = simulate(trace)
    ends = result.outcome.arrival_s + result.outcome.e2e_s
    assert result.outcome.arrival_s[3] == pytest.approx(ends[1:3].max() + 0.03)
    assert (result.sessions, result.session_mean) == (1, pytest.approx(ends[3]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([talk("a"), talk("a")], '2: session_id "a" is there twice'),
        ([talk("a", turn(spawns=["b"]))], '1: "b" branches off, but no line has that session_id'),
        ([talk("a", turn(spawns=["b", "b"]))], '1: "b" branches off'),
        ([talk("a", turn(spawns=[{"children": ["b", "b"]}])), talk("b")], "1: children names a conversation twice"),
        ([talk("a", turn(spawns=["a"]))], " all conversations branch off others: there is none to begin with"),
        ([talk("r", turn(spawns=["a"])), talk("a", turn(forks=["a"]))], '2: session_id "a" branches off itself'),
        ([talk("a", turn(forks=["b"]), turn()), talk("b")], "1: forks ends a conversation, but turns follow: set background"),
        ([talk("a", turn(spawns=[{"children": ["b"], "join_at": 0}]), turn()), talk("b")], "1: join_at must be at least 1"),
        ([talk("a", turn(spawns=[{"children": ["b"], "join_at": 1}])), talk("b")], "1: join_at is 1, but the conversation has 1"),
        ([talk("a", turn("\ue0a1"))], "1: messages have the character U+E0A1"),
        ([{"session_id": "a", "turns": []}], "1: turns is empty"),
        ([{"session_id": "a", "orchestrator": True}], "1: spawns is empty"),
        ([talk("a", context_mode="x")], "1: context_mode must be deltas_without_responses, deltas_with_responses or"),
        ([{"session_id": "o", "orchestrator": True, "spawns": ["a"], "think_time_sigma": 1}, talk("a")], "1: think_time_sigma"),
        ([talk("a", {"text": "It rains."})], "1: messages is missing"),
        ([talk("a", turn(delay=-1))], "1: delay must be 0 or more"),
    ],
)
def test_what_cannot_be_is_named(load, lines, message):
    with pytest.raises(TraceError) as caught:
        load(*lines)
    assert f"dag.jsonl:{message}" in str(caught.value)


def test_a_session_without_end_is_refused(load, monkeypatch):
    """Each line begins the next one twice: 2 ** 12 requests."""
    lines = [talk(f"{at}", turn(spawns=[f"{at + 1}"]), turn(spawns=[f"{at + 1}"])) for at in range(12)]
    monkeypatch.setattr(dag, "MOST_CALLS", 500)
    with pytest.raises(TraceError, match='the session "0" has more than 500 requests'):
        load(*lines, talk("12"))
    chain = [talk(f"{at}", turn(forks=[f"{at + 1}"])) for at in range(100)]
    with pytest.raises(TraceError, match='session_id "100" is more than 100 conversations below its root'):
        load(*chain, talk("100"))
