"""The parts of the time to first token, reckoned by hand; see small.py for the round numbers. They add up to it in every run."""

from typing import Any

import numpy as np

from kvsim.engine.outcome import Outcome
from kvsim.policies.placement.write_back import WriteBack
from tests.cluster.small_cluster import small_cluster
from tests.engine.small import Ask, ask, eager, seconds, small_engine
from tests.engine.test_failures import failing

A, B, C = "abcd", "efgh", "ijkl"
"""Prompts of four pages and a token: 17 s to compute, 4 s to load, 8 s to read from disk; each needs five pages."""
A_IS_BELOW = ask(A, 0), ask(B, 100), ask(A, 200)
"""In a GPU of five pages, the last request finds its four pages in the CPU tier."""


def phases(outcome: Outcome) -> np.ndarray:
    """Queue, load and prefill of each request, in seconds, after a check that they are all of its time to first token."""
    assert outcome.phases_s.sum(axis=1) == seconds(outcome.ttft_s)
    return outcome.phases_s


def served(*asks: Ask, **settings: Any) -> np.ndarray:
    return phases(small_engine(**settings).serve(*asks))


def rows(*expected: tuple[float, float, float]) -> Any:
    """Compares with the phases of requests."""
    return seconds(np.array(expected))


def test_a_request_alone_only_computes() -> None:
    assert served(ask(A), gpu=5) == rows((0, 0, 17))


def test_slots_that_are_still_written_down_are_queued_for() -> None:
    assert served(*A_IS_BELOW[:2], gpu=5, cpu=20, placement=WriteBack)[1] == seconds([4, 0, 17])


def test_a_request_that_joins_a_running_batch_waits_for_the_step_as_part_of_its_prefill() -> None:
    """Admission is at 17, the first boundary between steps."""
    assert served(ask(A), ask(B, 10), gpu=10)[1] == seconds([7, 0, 17])


def test_layer_by_layer_only_what_computing_does_not_hide_counts() -> None:
    """A token takes 1 s, a quarter of it after the last of four layers has landed at 4 s."""
    assert served(*A_IS_BELOW, gpu=5, cpu=20)[2] == seconds([0, 4 + 1 / 4 - 1, 1])


def test_a_prompt_in_a_step_that_waits_for_the_loads_of_another_waits_for_them_too() -> None:
    """Half of A is left on the GPU. A and X are computed in one step of 1 + 5 s, after a quarter of the load of 2 s."""
    asks = *A_IS_BELOW, ask("x", 200)
    assert served(*asks, gpu=7, cpu=20)[2:] == rows((0, 0.5, 6), (0, 0.5, 6))


def test_reads_from_disk_are_waited_for_before_the_load() -> None:
    disk = {"gpu": 5, "cpu": 4, "disk": 40}
    assert served(*A_IS_BELOW, **disk, overlap="none")[2] == seconds([0, 8 + 4, 1])
    assert served(*A_IS_BELOW, **disk)[2] == seconds([0, 8 + 4 + 1 / 4 - 1, 1])


def test_a_prefetch_comes_before_admission() -> None:
    disk = {"gpu": 5, "cpu": 4, "disk": 40, "overlap": "none"}
    assert served(*A_IS_BELOW, **disk, prefetch=eager(stop="wait_complete"))[2] == seconds([8, 4, 1])


def test_a_request_that_starts_again_elsewhere_has_computed_in_vain() -> None:
    """10 s of computing are lost with the engine; the other one is idle."""
    assert phases(failing((0, 10)).serve(ask(A, output=3))) == rows((0, 0, 10 + 17))


def test_a_request_whose_engine_fails_while_it_waits_goes_on_waiting() -> None:
    """One request at a time: B waits for A on engine 0 until that fails, and begins on engine 1 after A, which is first there."""
    cluster = failing((0, 10), gpu=8, settings={"max_running_requests": 1})
    outcome = cluster.serve(ask(A), ask("x", 50), ask(B, 1))
    assert phases(outcome)[0] == seconds([0, 0, 10 + 17])
    assert phases(outcome)[2] == seconds([9 + 17, 0, 17])


def test_pages_to_decode_on_are_queued_for_and_sending_is_part_of_prefill() -> None:
    """The decode engine has room for one request: B waits until A's answer ends, at 17 + 4.25 + 2."""
    apart = {"gpu": 20, "prefill": 1, "decode_gpu": 5, "settings": {"overlap": "none"}}
    outcome = small_cluster(**apart).serve(ask(A, output=3), ask(B, 1, output=2))
    assert phases(outcome) == rows((0, 0, 17 + 4.25), (23.25 - 1, 0, 17 + 4.25))


def test_a_retraction_before_the_first_token_adds_to_the_queue() -> None:
    """Random runs with retractions and failures (test_configurations_random.py) add up, too."""
    engine = small_engine(gpu=6, max_batch_tokens=4)
    outcome = engine.serve(ask("ab", output=9), ask("cde", 1, output=2))
    times = phases(outcome)
    assert times[0, :2] == seconds([0, 0]) and times[1, 0] > 0


def test_a_rejected_request_has_no_phases() -> None:
    outcome = small_engine(gpu=4).serve(ask(A), ask("x"))
    assert np.isnan(outcome.phases_s[0]).all()
    assert outcome.phases_s[1] == seconds([0, 0, 5])
