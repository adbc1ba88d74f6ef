"""The score: which events of an engine kvsim predicts."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from kvsim.emulation.served import Extras
from kvsim.errors import UsageError
from kvsim.kv_events.codec import decode
from kvsim.kv_events.dialects import dialect_named, encode
from kvsim.kv_events.messages import BlockStored, EventBatch
from kvsim.kv_events.recorded import Message, read_recorded, write_recorded
from kvsim.report.servers.seen import as_observed, moments_of
from kvsim.results.observed_file import read_observed, write_observed
from kvsim.run import play
from kvsim.shadow.answers import StoredPaths, with_answers
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.recorded_score import _told, requests_of, score_recorded, score_simulated
from kvsim.shadow.score import REMOVED, STORED, Happened, scored
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.shadow import Shadow
from kvsim.shadow.snapshot import ScoreView, Share
from kvsim.trace.mooncake import Mooncake
from tests import composing
from tests.shadow.emulated import emulated
from tests.shadow.live import KEYS, from_tokens
from tests.shadow.test_ghosts import plan
from tests.shadow.written import CLEARED, PAGE_TOKENS, batch, removed, stored
from tests.workloads import pages_of


def happened(*events: tuple[float, str, str]) -> list[Happened]:
    """Events of the GPU: time, + or - for stored and removed, and the block."""
    return [Happened(at_s, {"+": STORED, "-": REMOVED}[sign], "gpu", key.encode()) for at_s, sign, key in events]


def test_the_same_events_match_whatever_their_order_within_the_time() -> None:
    score = scored(
        happened((0, "+", "a"), (0, "+", "b"), (3, "-", "a")), happened((0, "+", "b"), (1, "+", "a"), (2, "-", "a")), 1.0
    )
    assert score.stored == {"gpu": Share(2, 0, 0)}
    assert score.removed == {"gpu": Share(1, 0, 0)}
    assert score.removed["gpu"].share == 1.0


def test_an_event_too_late_is_missed_and_extra() -> None:
    score = scored(happened((0, "+", "a"), (10, "-", "a")), happened((0, "+", "a"), (5, "-", "a")), 4.0)
    assert (score.stored["gpu"], score.removed["gpu"]) == (Share(1, 0, 0), Share(0, 1, 1))
    assert scored(happened((0, "+", "a"), (10, "-", "a")), happened((0, "+", "a"), (5, "-", "a")), 5.0).removed["gpu"] == Share(
        1, 0, 0
    )


def test_a_block_that_leaves_twice_must_be_predicted_twice() -> None:
    engine = happened((0, "+", "a"), (1, "-", "a"), (2, "+", "a"), (3, "-", "a"))
    score = scored(engine, happened((0, "+", "a"), (1, "-", "a")), 60.0)
    assert (score.stored["gpu"], score.removed["gpu"]) == (Share(1, 1, 0), Share(1, 1, 0))


def test_tiers_and_kinds_are_scored_apart_and_unknown_blocks_are_missed() -> None:
    engine = [Happened(0, STORED, "gpu", b"a"), Happened(0, STORED, "cpu", b"a"), Happened(1, REMOVED, "cpu", None)]
    score = scored(engine, [Happened(0, STORED, "cpu", b"a"), Happened(0, STORED, "cpu", b"b")], 9.0)
    assert score.stored == {"cpu": Share(1, 0, 1), "gpu": Share(0, 1, 0)}
    assert (score.removed, score.removed["cpu"].share) == ({"cpu": Share(0, 1, 0)}, 0.0)


EMULATED = [
    ("vllm", "vllm", ("tiers.gpu.capacity=1500pages",), ["gpu"]),
    ("vllm", "vllm", ("tiers.gpu.capacity=500pages", "engine.max_batch_tokens=512"), ["gpu"]),
    ("vllm_offload", "vllm", ("tiers.gpu.capacity=900pages", "tiers.cpu.capacity=4000pages"), ["cpu", "gpu"]),
    ("sglang", "sglang", ("tiers.gpu.capacity=1500pages",), ["gpu"]),
]


@pytest.mark.parametrize(("preset", "teller", "overrides", "tiers"), EMULATED)
def test_an_engine_is_predicted_from_what_its_client_has_recorded(
    preset: str, teller: str, overrides: tuple[str, ...], tiers: list[str], tmp_path: Path
) -> None:
    """All that the engine stores and removes is predicted, with the stream of events and the client's record read from files."""
    settings = (f"preset={preset}", "page_tokens=16", *overrides)
    run_plan = composing.plan(*settings, command="simulate")
    seen = emulated(run_plan, teller, 120)
    messages = [
        Message(each.ts_s, number, each.rank or 0, b"", encode(each, dialect_named(teller)))
        for number, each in enumerate(seen.batches)
    ]
    write_recorded(tmp_path / "events.kvev.gz", messages)
    write_observed(tmp_path / "observed.jsonl.gz", seen.run)
    batches = [decode(message.payload) for message in read_recorded(tmp_path / "events.kvev.gz")]
    run = read_observed(tmp_path / "observed.jsonl.gz")
    requests = requests_of(run, seen.prompts, 16, KEYS)
    score = score_recorded(batches, requests, run_plan, keys=KEYS, moments=moments_of(run))
    assert {*score.stored} == {*tiers}
    for share in (*score.stored.values(), *score.removed.values()):
        assert share.missed == 0, score
        assert share.extra <= 3, "last pages of answers, which an emulated engine names late"
    assert score.stored["gpu"].matched > 1500
    assert score.removed["gpu"].matched > 100


@pytest.mark.parametrize(
    ("engine", "stored", "removed", "requests"), [("vllm", 0.9971, 0.9824, 113), ("sglang", 0.9919, 1.0, 113)]
)
def test_without_a_client_the_requests_are_those_that_events_tell_of(
    engine: str, stored: float, removed: float, requests: int
) -> None:
    """Not all are seen, and they are served one after another, so some events are not predicted: docs/reference/shadow.md."""
    run_plan = composing.plan(f"preset={engine}", "page_tokens=16", "tiers.gpu.capacity=1500pages", command="simulate")
    seen = emulated(run_plan, engine, 120)
    score = score_recorded(seen.batches, None, run_plan, keys=KEYS)
    assert score.stored["gpu"].share == pytest.approx(stored, abs=1e-4)
    assert score.removed["gpu"].share == pytest.approx(removed, abs=1e-4)
    assert len(_told(seen.batches, 16, KEYS)[1]) == requests


@pytest.mark.parametrize(
    ("preset", "capacity", "page_tokens", "rush", "requests", "as_they_were", "hit_rate", "of_all"),
    [
        ("vllm", 1500, 16, 1.0, 113, 111, 0.5830, 0.5960),
        ("vllm", 130, 16, 10.0, 115, 110, 0.3995, 0.4082),
        ("sglang", 24_000, 1, 1.0, 117, 110, 0.6046, 0.6028),
        ("sglang", 1500, 16, 1.0, 113, 100, 0.6162, 0.5914),
    ],
)
def test_events_tell_of_most_requests_as_they_were(
    preset: str, capacity: int, page_tokens: int, rush: float, requests: int, as_they_were: int, hit_rate: float, of_all: float
) -> None:
    """Of 120 requests: docs/reference/shadow.md. The small GPU preempts seven times."""
    run_plan = composing.plan(
        f"preset={preset}", f"page_tokens={page_tokens}", f"tiers.gpu.capacity={capacity}pages", command="simulate"
    )
    seen = emulated(run_plan, preset, 120, rush=rush)
    made = _told(seen.batches, page_tokens, KEYS)[1]
    prompts = Counter(KEYS.of_prompt(prompt, page_tokens) for prompt in seen.prompts)
    assert (len(made), (prompts & Counter(one.keys for one in made)).total()) == (requests, as_they_were)
    found = sum(one.cached_tokens or 0 for one in made) / sum(one.prompt_tokens for one in made)
    assert found == pytest.approx(hit_rate, abs=1e-4)
    assert seen.run.cached_tokens.sum() / seen.run.prompt_tokens.sum() == pytest.approx(of_all, abs=1e-4)


def test_full_reports_tell_of_every_request_and_what_it_has_cached() -> None:
    """With the report mode full, an emulated vLLM tells of all requests; the shadow makes nearly the same requests of them."""
    settings = ("preset=vllm", "page_tokens=16", "tiers.gpu.capacity=1500pages")
    seen = emulated(composing.plan(*settings, command="simulate"), "vllm", 120, Extras(reports_hits=True))
    shadow = Shadow({"engine": plan(*settings)}, 16, ShadowSettings(salt="", window_requests=10))
    for each in seen.batches:
        shadow.event("e", each)
    shadow.flush()
    (engine,), (ghost,) = shadow.snapshot().engines, shadow.snapshot().ghosts
    assert engine.requests == 119
    assert engine.hit_rate == pytest.approx(0.5998, abs=1e-4)
    assert seen.run.cached_tokens.sum() / seen.run.prompt_tokens.sum() == pytest.approx(0.5960, abs=1e-4)
    assert abs(ghost.engine_points) < 3
    assert engine.score is not None and engine.score.stored["gpu"].share > 0.97


def test_a_stream_of_several_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="events of several ranks"):
        score_recorded([batch(0, rank=0), batch(0, rank=1)], None, plan("page_tokens=4"), keys=KEYS)


def test_a_shadow_scores_live_and_begins_anew_after_a_gap_and_a_reset() -> None:
    """A GPU of 4 pages: the third prompt pushes out the first one, from its end on, as vLLM does."""
    base = (f"page_tokens={PAGE_TOKENS}", "rules=vllm", "tiers.gpu.capacity=4pages", "replay.hold_output=false")
    shadow = Shadow({"engine": plan(*base)}, PAGE_TOKENS, ShadowSettings(salt=""))
    shadow.event("e", batch(0.0, stored("ab")))
    shadow.event("e", batch(1.0, stored("xy")))
    shadow.event("e", batch(2.0, removed("ab"), removed("a"), stored("pq")))
    shadow.flush()
    (engine,) = shadow.snapshot().engines
    assert (engine.score.stored, engine.score.removed) == ({"gpu": Share(6, 0, 0)}, {"gpu": Share(2, 0, 0)})
    shadow.lost("e", 1)
    shadow.event("e", batch(3.0, removed("xy")))
    shadow.event("e", batch(4.0, CLEARED))
    shadow.event("e", batch(5.0, stored("ab")))
    shadow.flush()
    (engine,) = shadow.snapshot().engines
    assert (engine.score.stored, engine.score.removed) == ({"gpu": Share(8, 0, 0)}, {"gpu": Share(2, 0, 0)})


def test_what_was_never_matched_counts_when_the_stream_ends() -> None:
    """The engine removes a block at once, for which a ghost with room has no reason; until the end, it might still."""
    shadow = Shadow({"engine": plan(f"page_tokens={PAGE_TOKENS}", "rules=vllm")}, PAGE_TOKENS, ShadowSettings(salt=""))
    shadow.event("e", batch(0.0, stored("ab")))
    shadow.event("e", batch(1.0, removed("ab")))
    assert shadow.snapshot().engines[0].score.removed == {}
    shadow.flush()
    assert shadow.snapshot().engines[0].score == ScoreView({"gpu": Share(2, 0, 0)}, {"gpu": Share(0, 1, 0)})


def prompt_of(word: str) -> list[int]:
    """The tokens of a word's pages, and one more, which fills none."""
    return [ord(letter) for letter in word for _ in range(PAGE_TOKENS)] + [7]


def test_requests_without_answers_take_them_from_the_events() -> None:
    """A client knows how long an answer was, not what the engine said: two pages, so the third one is not its own."""
    events = [batch(0.0, stored("ab"))] + [
        batch(at_s, stored(word, len(word) - 1)) for at_s, word in ((0.2, "abc"), (0.4, "abcd"))
    ]
    events += [batch(0.6, stored("abcde", 4)), batch(20.0, stored("x"))]
    requests = [from_tokens(prompt_of("ab"), page_tokens=PAGE_TOKENS)._replace(output_tokens=2 * PAGE_TOKENS)]
    score = score_recorded(events, requests, plan(f"page_tokens={PAGE_TOKENS}", "rules=vllm"), keys=KEYS)
    assert score.stored["gpu"] == Share(4, 2, 0)


def answered(events: list[EventBatch], *asked: tuple[str, float, int]) -> list[int]:
    """Of requests, each with its prompt, arrival and pages of answer: the place among the events of the answer's first page."""
    told, made = _told(events, PAGE_TOKENS, KEYS)
    requests = [
        from_tokens(prompt_of(word), page_tokens=PAGE_TOKENS, at_s=at_s)._replace(output_tokens=pages * PAGE_TOKENS)
        for word, at_s, pages in asked
    ]
    found = with_answers(requests, StoredPaths(told, made), PAGE_TOKENS, [at_s for _, at_s, _ in asked])
    order = [event.key for event in told]
    return [order.index(one.output_keys[0]) if one.output_keys else -1 for one in found]


def test_an_answer_is_not_what_another_prompt_has_after_the_same_pages() -> None:
    """The page c is in the second prompt, and was stored closer to the first request than its answer z."""
    events = [batch(0.0, stored("ab")), batch(0.1, stored("abc", 2)), batch(0.5, stored("abz", 2)), batch(0.6, stored("abcy", 3))]
    assert answered(events, ("ab", 0.0, 1), ("abc", 0.1, 1)) == [3, 4]


def test_an_answer_that_the_next_prompt_brings_back_is_found() -> None:
    events = [batch(0.0, stored("ab")), batch(0.5, stored("abc", 2)), batch(1.0, stored("abcde", 3))]
    assert answered(events, ("ab", 0.0, 1), ("abcd", 1.0, 0)) == [2, -1]


def test_different_answers_to_one_prompt_are_each_taken_once_and_by_their_length() -> None:
    """Both are of the prompt ab. The closest to both is c, of one page; the request that comes first has answered two."""
    events = [batch(0.0, stored("ab")), batch(0.1, stored("abc", 2)), batch(0.2, stored("abz", 2)), batch(0.3, stored("abzy", 3))]
    assert answered(events, ("ab", 0.0, 2), ("ab", 0.0, 1)) == [3, 2]
    assert answered(events, ("ab", 0.0, 1), ("ab", 0.0, 1)) == [2, 3]


@pytest.mark.parametrize("settings", [("rules=vllm",), ("preset=fastdeploy", "tiers.cpu.capacity=0")])
def test_what_a_reset_drops_is_no_event_and_the_cache_is_empty_after_it(settings: tuple[str, ...]) -> None:
    """The events begin with a reset, as those of an engine whose cache is emptied before a run, and have another one later."""
    events = [batch(0.0, CLEARED, stored("ab")), batch(10.0, CLEARED), batch(11.0, stored("ab"))]
    score = score_recorded(events, None, plan(f"page_tokens={PAGE_TOKENS}", *settings), keys=KEYS)
    assert (score.stored, score.removed) == ({"gpu": Share(4, 0, 0)}, {})


@pytest.mark.parametrize(
    ("name", "rate", "capacity", "when_replayed"),
    [
        pytest.param("stress2_r4_c60000", 4, 60_000, 0.9996, marks=pytest.mark.long),
        ("stress2_r2.2_c20000", 2.2, 20_000, 0.9981),
    ],
)
def test_all_that_a_recorded_vllm_has_stored_of_prompts_is_predicted(
    shared: Path, name: str, rate: float, capacity: int, when_replayed: float
) -> None:
    """A recorded schedule tells what each request has hit, so which blocks of its prompt vLLM has stored, not what it removed.

    kvsim's engine in simulated time, which preempts as vLLM does, stores each of them within half a second. A replay of its
    moments does not preempt, so that a few requests hit more or less.
    """
    folder = shared / "golden" / "schedule"
    if not folder.is_dir():
        pytest.skip("compares with recorded schedules that are not part of the repository: ../shared/golden/schedule")
    run_plan = composing.plan(
        "preset=vllm", "hardware=linear", "page_tokens=16", "rules.cache_output=true", f"tiers.gpu.capacity={capacity}tokens",
        command="simulate",
    )  # fmt: skip
    trace = Mooncake(path=str(folder / "stress2.jsonl"), answers="unique", rate=rate).load(16)
    lines = gzip.decompress((folder / f"{name}.requests.gz").read_bytes()).decode().splitlines()
    rows = [line.split() for line in lines if line[0].isdigit()]
    lives, told = list[LiveRequest](), list[tuple[float, BlockStored]]()
    for request, (_, first_s, _, hits, _) in zip(trace.requests, rows, strict=True):
        path = pages_of(request.own_path or ())
        keys = KEYS.of_prompt([page for page in path for _ in range(16)], 16)
        pages = request.prompt_tokens // 16
        lives.append(LiveRequest(request.arrival_s, keys[:pages], request.prompt_tokens, keys[pages:], request.output_tokens))
        new, hit = path[int(hits) // 16 : pages], int(hits) // 16
        if new:
            parent = path[hit - 1] if hit else None
            told.append((float(first_s), BlockStored(tuple(new), parent, tuple(p for p in new for _ in range(16)), 16)))
    batches = [batch(at_s, event) for at_s, event in sorted(told, key=lambda one: one[0])]
    simulated = score_simulated(batches, lives, run_plan, keys=KEYS, within_s=0.5).stored["gpu"]
    assert simulated.matched == sum(len(event.block_hashes) for _, event in told) > 10_000 and not simulated.missed
    outcome = play.simulate(run_plan.with_own_policies(), trace.requests)
    moments = moments_of(as_observed(outcome, "simulated"))
    replayed = score_recorded(batches, lives, run_plan, keys=KEYS, moments=moments, within_s=600.0).stored["gpu"]
    assert replayed.share == pytest.approx(when_replayed, abs=1e-4)


@pytest.mark.parametrize(("preset", "preempted"), [("vllm", 5), ("sglang", 0)])
def test_a_simulation_predicts_what_is_stored_and_removed_and_stored_again(preset: str, preempted: int) -> None:
    """On a GPU of a few blocks, requests are preempted and compute again what they had: a simulation does the same."""
    run_plan = composing.plan(f"preset={preset}", "page_tokens=16", "tiers.gpu.capacity=130pages", command="simulate")
    seen = emulated(run_plan, preset, 60, rush=10.0)
    assert sum(one.retractions for one in seen.served) == preempted
    requests = [
        from_tokens(prompt, one.answer, page_tokens=16, at_s=float(at_s))
        for prompt, at_s, one in zip(seen.prompts, seen.run.sent_s, seen.served, strict=True)
    ]
    score = score_simulated(seen.batches, requests, run_plan, keys=KEYS, within_s=0.5)
    assert score == ScoreView({"gpu": Share(score.stored["gpu"].matched)}, {"gpu": Share(score.removed["gpu"].matched)})
    assert score.stored["gpu"].matched > 1200 and score.removed["gpu"].matched > 1100
