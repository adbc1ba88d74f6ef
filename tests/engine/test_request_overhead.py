"""A server around the engine adds to the time of each request: to none of its steps, and not to its time in the queue."""

from tests.engine.small import ask, seconds, small_engine


def test_a_request_enters_the_queue_later_than_it_arrives() -> None:
    # the first is computed from 5 to 10 and decodes until 12; the second arrives at 7 and enters the queue at 12
    engine = small_engine(gpu=9, hardware={"request_overhead_s": 5.0})
    outcome = engine.serve(ask("a", output=3), ask("b", at=7.0))
    assert outcome.arrival_s.tolist() == seconds([0.0, 7.0])
    assert outcome.columns["ttft_s"].tolist() == seconds([10.0, 10.0])
    assert outcome.columns["e2e_s"].tolist() == seconds([12.0, 10.0])
    assert outcome.columns["queue_s"].tolist() == seconds([0.0, 0.0])


def test_a_session_goes_on_after_the_answer_has_come() -> None:
    engine = small_engine(gpu=9, hardware={"request_overhead_s": 5.0})
    outcome = engine.serve(ask("a"), ask("ab", after=0, delay_s=3.0))
    assert outcome.arrival_s.tolist() == seconds([0.0, 13.0])
    assert outcome.columns["ttft_s"].tolist() == seconds([10.0, 10.0])  # both compute five tokens, the second after a page found
