"""Which batches a server is measured with, and what is read of them."""

import warnings
from math import inf, isnan, lcm

import numpy as np
import pytest

from kvsim.calibration.server.batches import (
    BURST,
    DECODE,
    MIXED,
    PROMPT,
    Batch,
    Limits,
    between,
    contexts,
    design,
)
from kvsim.calibration.server.measure import is_disturbed, limits_of, seen_of, step_tokens_of
from kvsim.calibration.server.measurements import Measurements, Played, Seen, reading, relative_error, samples
from kvsim.calibration.server.rounds import BETWEEN_S, PAUSE_S, TOUCHED_PAUSE_S, Pace, RoundMaker
from kvsim.calibration.server.step_times import Point, burst, chunks, expected_s, works
from kvsim.errors import UsageError
from kvsim.hardware.spec import LinearHardware
from kvsim.results.observed import ObservedRun, ServerFacts
from tests.engine.small import HARDWARE, MODEL

LARGE = Limits(step_tokens=8192, longest_tokens=32768, requests=256, context_tokens=200_000)
SMALL = Limits(step_tokens=512, longest_tokens=600, requests=9, context_tokens=2000)


@pytest.mark.parametrize("limits", [LARGE, SMALL])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_all_batches_fit_the_server_in_whole_pages(limits: Limits, page_tokens: int) -> None:
    batches = design(limits, page_tokens, seed=3)
    assert sum(contexts(batches, lcm(16, page_tokens))) <= limits.context_tokens
    assert {batch.kind for batch in batches} == {PROMPT, BURST, DECODE, MIXED} if limits is LARGE else {PROMPT, DECODE, MIXED}
    for batch in batches:
        assert batch.tokens % 16 == batch.context % 16 == batch.tokens % page_tokens == batch.context % page_tokens == 0
        assert batch.longest_tokens(lcm(16, page_tokens)) <= limits.longest_tokens and batch.requests <= limits.requests
        assert batch.kind != MIXED or batch.tokens + batch.requests <= limits.step_tokens


def test_held_out_batches_lie_between_others_and_are_none_of_them() -> None:
    batches = design(LARGE, 16, seed=0)
    held_out = [batch for batch in batches if batch.is_held_out]
    assert len(held_out) == 16 and len(set(batches)) == len(batches)
    for batch in held_out:
        same = [other for other in batches if other.kind == batch.kind and not other.is_held_out]
        for name in ("tokens", "requests", "context", "slots"):
            sizes = [getattr(other, name) for other in same]
            assert min(sizes) <= getattr(batch, name) <= max(sizes)
    assert [batch for batch in design(LARGE, 16, seed=1) if batch.is_held_out] != held_out
    assert (between(4, 64, 0.5), between(0, 64, 0.5)) == (16, 0)


def test_a_context_is_as_long_as_the_longest_batch_that_uses_it() -> None:
    batches = [
        Batch(kind=PROMPT, tokens=16, context=64),
        Batch(kind=DECODE, requests=2, context=32),
        Batch(kind=BURST, tokens=16, requests=5),
    ]
    assert contexts(batches, 16) == [64, 16]


def test_contexts_of_requests_that_decode_together_differ_and_have_the_average() -> None:
    assert Batch(kind=DECODE, requests=3, context=64).contexts(16) == [96, 64, 32]
    assert Batch(kind=MIXED, tokens=16, requests=1, context=64).contexts(16) == [64]
    assert Batch(kind=DECODE, requests=2).contexts(16) == Batch(kind=PROMPT, tokens=16).contexts(16) == []
    assert Batch(kind=DECODE, requests=2, context=16).contexts(16) == [32, 16]  # no context is empty
    for batch in design(LARGE, 16, seed=0):
        if batch.decoding and batch.context:
            own = batch.contexts(16)
            assert len(own) == batch.requests and sum(own) / len(own) == pytest.approx(batch.context, rel=0.06)


def test_the_seventeenth_request_shares_the_context_of_the_first() -> None:
    batch = Batch(kind=DECODE, requests=17, context=512)
    lengths = batch.contexts(16)
    assert contexts([batch], 16) == lengths[:16] and len(lengths) == 17
    made = RoundMaker(contexts([batch], 16), 16, first_page=1).make([batch], lambda _: Pace(0.0, 0.0, 0.0, 0.0))
    first, last = made.requests[16].runs, made.requests[-1].runs
    assert first[0] == (1, 48) and last[0] == (1, 16), "of 768 and 256 tokens, from the same page on"
    assert first[1] != last[1]


def test_rounds_share_their_contexts_and_nothing_else() -> None:
    batches = [Batch(kind=PROMPT, tokens=32, context=64), Batch(kind=DECODE, requests=2, context=32)]
    maker = RoundMaker(contexts(batches, 16), 16, first_page=1000)
    one, other = [maker.make(order, lambda _: Pace(0.0, 0.0, 0.0, 0.0)) for order in (batches, batches[::-1])]
    assert one.members == [range(2, 3), range(3, 5)] and other.members == [range(2, 4), range(4, 5)]
    assert [request.runs for request in one.requests[:2]] == [((1000, 4),), ((1004, 1),)]
    assert [request.runs for request in other.requests[:2]] == [((1000, 4),), ((1004, 1),)]
    assert [request.prompt_tokens for request in one.requests] == [64, 16, 96, 64, 32]
    assert [request.runs[0] for request in one.requests[2:]] == [(1000, 4), (1000, 3), (1004, 1)]
    assert [(request.after, request.delay_s) for request in one.requests[2:]] == [
        (1, TOUCHED_PAUSE_S), (2, PAUSE_S), (2, PAUSE_S + BETWEEN_S),
    ]  # fmt: skip
    own = [request.runs[-1] for made in (one, other) for request in made.requests[2:]]
    pages = [page for start, count in own for page in range(start, start + count)]
    assert len(set(pages)) == len(pages) and min(pages) > 1004


def test_prompts_of_a_mixed_batch_arrive_one_by_one_while_the_others_decode() -> None:
    batch = Batch(kind=MIXED, tokens=64, requests=2, context=16)
    made = RoundMaker(contexts([batch], 16), 16, first_page=1).make([batch], lambda _: Pace(1.0, 0.1, 0.5, 0.0))
    prompts = made.requests[2:5]
    assert [request.delay_s for request in prompts] == pytest.approx(
        [TOUCHED_PAUSE_S + BETWEEN_S + after for after in (2.0, 3.1, 4.2)]
    )
    assert {request.after for request in made.requests[2:]} == {1}
    assert [request.output_tokens for request in made.requests[2:]] == [1, 1, 1, batch.answer_tokens, batch.answer_tokens]


def test_a_batch_waits_for_all_requests_of_the_one_before() -> None:
    batches = [
        Batch(kind=BURST, tokens=16, requests=3),
        Batch(kind=PROMPT, tokens=16),
        Batch(kind=DECODE, requests=2),
        Batch(kind=PROMPT, tokens=16),
    ]
    made = RoundMaker(contexts(batches, 16), 16, first_page=1).make(
        batches, lambda batch: Pace(0.0, 0.0, 0.0, batch.requests / 2)
    )
    firsts = [made.requests[members.start] for members in made.members]
    assert [(one.after, one.delay_s) for one in firsts] == [
        (-1, TOUCHED_PAUSE_S), (2, PAUSE_S + 1.5), (3, PAUSE_S), (5, PAUSE_S + 1.0),
    ]  # fmt: skip


def seen(sent_s: float, *times_s: float, output_tokens: int | None = None, cached: int | None = 0) -> Seen:
    gaps = [float(gap) for gap in np.diff(times_s)]
    count = len(times_s) if output_tokens is None else output_tokens
    return Seen(
        sent_s=sent_s, prompt_tokens=16, first_token_s=times_s[0], end_s=times_s[-1], output_tokens=count, gaps_s=gaps,
        cached_tokens=cached,
    )  # fmt: skip


def test_a_prompt_takes_until_its_first_token_and_a_burst_from_the_first_one_to_the_last() -> None:
    assert samples(Batch(kind=PROMPT, tokens=16), [seen(1.0, 1.5)]) == [0.5]
    batch = Batch(kind=BURST, tokens=16, requests=3)
    assert samples(batch, [seen(1.0, 2.0), seen(1.02, 5.0), seen(1.02, 4.0)]) == [3.0]
    assert samples(batch, [seen(1.02, 2.5), seen(1.0, 2.0), seen(1.02, 4.0)]) == [2.0]
    assert samples(batch, [seen(1.0, 2.0), seen(1.002, 5.0), seen(1.02, 4.0)]) == [], "it was not sent ahead"
    assert samples(batch, [seen(1.0, 2.0), seen(1.02, 2.004), seen(1.02, 4.0)]) == [], "it was not computed alone"
    assert samples(Batch(kind=BURST, tokens=16, requests=1), [seen(1.0, 2.0)]) == []


def test_a_burst_is_expected_to_take_the_steps_after_those_of_its_first_prompt() -> None:
    """Steps of 8 tokens: prompts of 12 take 8, 4, and then 8 and 4 and 8, and 4 again."""
    requests = [seen(1.0, 2.0), seen(1.02, 5.0), seen(1.02, 4.0)]
    found = reading(Batch(kind=BURST, tokens=12, requests=3), [Played(batch=0, round=0, requests=requests)])
    assert found is not None
    one = Point(reading=found, works=works(found, measurements(joins=True, step_tokens=8)))
    assert ([work.chunks for work in one.works], one.untimed) == ([[(8, 0)], [(4, 8)], [(8, 0)], [(4, 8), (4, 0)], [(8, 4)]], 2)
    none = {"decode_request_s": 0.0, "chunk_context_s": 0.0, "decode_context_s": 0.0}
    hardware = LinearHardware(**HARDWARE, fixed_s=1.0, prefill_token_s=0.5, **none)
    assert expected_s([one], MODEL, hardware) == pytest.approx([3 * 1.0 + 24 * 0.5])


def test_decoding_requests_have_contexts_in_common() -> None:
    """Four requests with 96, 80, 48 and 32 tokens begin with two contexts in turn: the third has all of its 48 in common with the
    first one, and the fourth all of its 32 with the second one."""
    batch = Batch(kind=DECODE, requests=4, context=64, slots=2)
    assert (batch.contexts(16), contexts([batch], 16), batch.repeated_tokens(16)) == ([96, 80, 48, 32], [96, 80], 80)
    assert (
        Batch(kind=DECODE, requests=4, context=64).repeated_tokens(16) == Batch(kind=PROMPT, tokens=16).repeated_tokens(16) == 0
    )
    assert batch.label() == "4 decoding after 64 in 2 contexts"
    made = RoundMaker(contexts([batch], 16), 16, first_page=1).make([batch], lambda _: Pace(0.0, 0.0, 0.0, 0.0))
    starts = [request.runs[0][0] for request in made.requests[made.members[0].start :]]
    assert starts[:2] == starts[2:] and starts[0] != starts[1]
    found = reading(batch, [Played(batch=0, round=0, requests=[seen(0.0, *np.arange(1.0, 12.0))] * 4)])
    assert found is not None and [work.repeated_context_tokens for work in works(found, measurements(joins=True))] == [80]


def test_a_decode_step_is_timed_while_all_requests_decode() -> None:
    batch = Batch(kind=DECODE, requests=2, context=16)
    slow_begin = seen(0.0, 1.0, 5.0, *np.arange(6.0, 16.0))
    joins = seen(0.0, *np.arange(6.0, 17.0))
    assert samples(batch, [slow_begin, joins]) == [1.0]
    assert samples(batch, [slow_begin, seen(0.0, 14.0, 15.0, 16.0)]) == []  # they are together for too short a time
    pairs = seen(0.0, *np.arange(0.0, 20.0, 2.0), output_tokens=20)
    assert samples(Batch(kind=DECODE, requests=1, context=16), [pairs]) == [1.0]  # each part has two tokens


def test_a_mixed_step_is_what_plain_steps_around_it_leave() -> None:
    batch = Batch(kind=MIXED, tokens=64, requests=1, context=16)
    steps = [1, 1, 1, 4, 1, 1, 1, 1, 1, 3, 3, 0.5, 1, 1, 1, 1]  # the second mixed step, of 4.5 s, is told of in three parts
    decoding = seen(0.0, *np.cumsum(steps))
    first, second = seen(3.5, 7.0), seen(11.5, 15.0)
    assert samples(batch, [first, second, seen(90.0, 91.0), decoding]) == pytest.approx([4.0, 4.5])
    assert samples(batch, [first, seen(6.0, 15.0), seen(90.0, 91.0), decoding]) == []  # they were there at the same time


def test_a_batch_with_a_failure_or_another_batch_shows_nothing() -> None:
    batch = Batch(kind=PROMPT, tokens=16, context=32)
    good = Played(batch=0, round=0, requests=[seen(0.0, 2.0, cached=16)])
    failed = Played(batch=0, round=1, requests=[Seen(sent_s=0.0, prompt_tokens=16, error="HTTP 500")])
    disturbed = Played(batch=0, round=2, requests=[seen(0.0, 9.0)], is_disturbed=True)
    found = reading(batch, [good, failed, disturbed])
    assert found is not None and (found.seconds, found.samples, found.error, found.cached_tokens) == (2.0, 1, inf, 16)
    assert reading(batch, [failed, disturbed]) is None
    untold = reading(batch, [Played(batch=0, round=0, requests=[seen(0.0, 2.0, cached=None)])])
    assert untold is not None and untold.cached_tokens == 32


def test_the_error_of_a_median_shrinks_with_the_root_of_the_samples() -> None:
    assert relative_error([1.0]) == inf and relative_error([2.0, 2.0]) == 0.0
    values = list(np.random.default_rng(0).normal(10.0, 1.0, 400))
    assert relative_error(values) == pytest.approx(1.253 / 10 / 20, rel=0.15)


def test_prompts_are_computed_in_steps_of_whole_batches() -> None:
    assert [work.chunks for work in chunks(10, 30, 8)] == [[(8, 10)], [(8, 18)], [(4, 26)]]
    assert [work.sampled_tokens for work in chunks(10, 30, 8)] == [0, 0, 1]
    assert [work.chunks for work in chunks(30, 30, 8)] == [[(1, 29)]]
    packed = burst(5, 4, 8)
    assert [work.chunks for work in packed] == [[(5, 0)], [(5, 0), (3, 0)], [(2, 3), (5, 0)]]
    assert [work.sampled_tokens for work in packed] == [1, 1, 2]


def test_an_engine_that_computes_prompts_apart_decodes_in_a_step_of_its_own() -> None:
    batch = Batch(kind=MIXED, tokens=64, requests=1, context=16)
    found = reading(batch, [MIXED_PLAYED])
    assert found is not None
    joined, apart = works(found, measurements(joins=True)), works(found, measurements(joins=False))
    context = 16 + 4  # 2 and 5 tokens are generated when the first two prompts arrive; the third comes too late
    assert [(work.chunks, work.decode_requests, work.decode_context_tokens) for work in joined] == [([(64, 0)], 1, context)]
    assert [(work.chunks, work.decode_requests) for work in apart] == [([(64, 0)], 0), ([], 1)]


MIXED_PLAYED = Played(
    batch=0, round=0, requests=[seen(2.5, 6.0), seen(7.5, 11.0), seen(20.0, 21.0), seen(0.0, 1, 2, 5, 6, 7, 11, 12, 13)]
)


def measurements(*, joins: bool, step_tokens: int = 512) -> Measurements:
    return Measurements(
        source="", engine="vllm", version=None, served_model=None, step_tokens=step_tokens, joins_prompts=joins, page_tokens=16,
        seconds=0.0, batches=[], played=[],
    )  # fmt: skip


def observed(sent_s: list[float], end_s: list[float]) -> ObservedRun:
    sent, ends = np.array(sent_s), np.array(end_s)
    whole = np.full(len(sent), 16)
    return ObservedRun(
        source="", client="", due_s=sent, sent_s=sent, first_token_s=ends, end_s=ends, token_gaps_s=[np.array([])] * len(sent),
        prompt_tokens=whole, output_tokens=whole, cached_tokens=whole, tier_tokens={}, queued_s=ends, prefill_s=ends,
        errors=[None if not isnan(end) else "HTTP 500" for end in end_s],
    )  # fmt: skip


def test_batches_disturb_each_other_where_they_overlap() -> None:
    run = observed([0.0, 1.0, 2.0, 4.0], [0.5, 3.0, 3.5, 5.0])
    assert [is_disturbed(run, range(at, at + 1), len(run.sent_s)) for at in range(4)] == [False, True, True, False]
    assert not is_disturbed(run, range(1, 3), len(run.sent_s))


def test_a_batch_of_which_nothing_was_sent_is_kept_with_its_errors() -> None:
    run = observed([np.nan, 0.0], [np.nan, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [one.error for one in seen_of(run, range(1))] == ["HTTP 500"]
        assert not is_disturbed(run, range(1), 2)


def test_limits_are_what_the_server_says_unless_they_are_set() -> None:
    said = {
        "scheduler_config.max_num_batched_tokens": 2048,
        "model_config.max_model_len": 4096,
        "scheduler_config.max_num_seqs": 8,
    }
    facts = ServerFacts(engine="vllm", capacity_tokens=100_000, settings=said)
    assert step_tokens_of(facts) == 2048
    assert limits_of(facts, 2048, None) == Limits(step_tokens=2048, longest_tokens=4096, requests=8, context_tokens=50_000)
    assert limits_of(facts, 2048, 1000).longest_tokens == 1000
    with pytest.raises(UsageError, match=r"step_tokens: the server does not say .* --max-num-batched-tokens"):
        step_tokens_of(ServerFacts(engine="openai"))
