"""What the learned time to live learns."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.continuum import FIRST_TTL_S, Continuum, Memory, Pauses
from tests.core.small import MACHINE, MODEL
from tests.workloads import make_request


def pauses_of(*pauses_s: float) -> Pauses:
    pauses = Pauses()
    for pause_s in pauses_s:
        pauses.add(pause_s)
    return pauses


def test_the_best_tau_weighs_its_length_against_what_it_saves() -> None:
    """Of pauses 1, 1, 1, 10: tau 1 is worth .75 x gain - 1, tau 10 is worth gain - 10; equal at a gain of 36."""
    pauses = pauses_of(1, 1, 10, 1)
    assert [pauses.best_s(gain_s) for gain_s in (0, 1, 2, 35, 37)] == [0, 0, 1, 1, 10]
    assert pauses.best_s(-5) == 0


def test_the_best_tau_is_that_of_trying_all() -> None:
    random = Random(1)
    for _ in range(200):
        seen = [float(random.randint(0, 30)) for _ in range(random.randint(1, 40))]
        pauses, gain_s = pauses_of(*seen), random.uniform(-5, 60)
        worth = {tau: sum(pause <= tau for pause in seen) / len(seen) * gain_s - tau for tau in {0.0, *seen}}
        assert worth[pauses.best_s(gain_s)] == pytest.approx(max(worth.values()))


def test_new_pauses_count_when_they_are_a_tenth() -> None:
    pauses = pauses_of(*[1.0] * 100)
    assert pauses.best_s(50) == 1
    for _ in range(1000):
        pauses.add(2.0)
    assert pauses.best_s(50) == 2


def test_sessions_of_one_length_remember_perfectly() -> None:
    memory = Memory()
    assert memory.eta == 1
    memory.add(5)
    assert memory.eta == pytest.approx(1)
    ones = Memory()
    ones.add(1)
    ones.add(1)
    assert ones.eta == 1, "nothing varies"


def test_eta_is_the_negative_correlation() -> None:
    memory, done, left = Memory(), [], []
    for turns in (1, 1, 2, 9, 3, 1, 30):
        memory.add(turns)
        done += range(1, turns + 1)
        left += range(turns - 1, -1, -1)
    assert memory.eta == pytest.approx(-np.corrcoef(done, left)[0, 1])


def turn(continuum: Continuum, index: int, session: int, now: float, kind: str = "") -> None:
    request = make_request([0], index=index, session=session, kind=kind)
    continuum.observe_admission(request, now)
    continuum.observe_admission(request, now)
    continuum.observe_finish(request, now)


def test_pauses_are_taken_by_kind_once_there_are_enough() -> None:
    """Session 0 runs a tool of 1 s, then session 1 one of 5 s. A kind with too few pauses takes all of them."""
    continuum = Continuum()
    for step in range(102):
        assert continuum.ttl_s("quick", 1e6) == FIRST_TTL_S
        turn(continuum, step, 0, 1.0 * step, "quick")
    assert [continuum.ttl_s(kind, 1e6) for kind in ("quick", "slow")] == [1, 1]
    for step in range(102):
        turn(continuum, 200 + step, 1, 200 + 5.0 * step, "slow")
    assert [continuum.ttl_s(kind, 1e6) for kind in ("quick", "slow", "other")] == [1, 5, 5]


def test_queueing_makes_keeping_worth_more() -> None:
    """Pauses of 1 s, nothing to reload: without a queue nothing is kept; with 3 s of it, 1 s is worth while."""
    continuum = Continuum()
    for step in range(102):
        turn(continuum, step, 0, 1.0 * step)
    assert continuum.ttl_s("", 0.0) == 0
    waiting = make_request([0], index=1000, session=7)
    continuum.observe_arrival(waiting, 200.0)
    continuum.observe_admission(waiting, 203.0)
    continuum.observe_admission(waiting, 209.0)
    assert continuum.ttl_s("", 0.0) == 1


def sums(memory: Memory) -> tuple[float, ...]:
    return memory._pairs, memory._done, memory._left, memory._done_squares, memory._left_squares, memory._products


def test_a_session_has_ended_when_it_is_silent_for_longer_than_any_pause() -> None:
    continuum = Continuum()
    for step in range(102):
        turn(continuum, step, 0, 1.0 * step)
    for index, session in ((500, 1), (501, 2), (502, 3)):
        turn(continuum, index, session, 101.5)
    assert continuum.memory.eta == 1
    turn(continuum, 600, 9, 102.2)
    expected = Memory()
    expected.add(102)
    assert sums(continuum.memory) == sums(expected)
    turn(continuum, 601, 9, 103.0)
    for _ in range(3):
        expected.add(1)
    assert sums(continuum.memory) == sums(expected)
    assert continuum.memory.eta < 1


def test_what_a_context_costs_to_get_back() -> None:
    """16 bytes a token at 1,000 and 100 bytes a second; 3 tokens cost 3 x 1,152 + 6 x 32 FLOPs at 1e6 a second."""
    seconds = [PolicyContext(model=MODEL, hardware=MACHINE, lower_tier_name=lower).reload_s(3) for lower in ("cpu", "disk", None)]
    assert seconds == pytest.approx([0.048, 0.48, 0.003648])


def test_copies_of_kv_on_several_gpus_come_back_one_by_one() -> None:
    heads, gpus = MODEL.kv_heads, 3 * MODEL.kv_heads
    own, copied = (
        PolicyContext(model=MODEL, hardware=replace(MACHINE, gpus=number), lower_tier_name="cpu") for number in (heads, gpus)
    )
    assert copied.reload_s(3) == pytest.approx(own.reload_s(3)), "three links for each part, and three copies of it"
    assert copied.host_load_s(5) == pytest.approx(own.host_load_s(5))
    assert copied.host_write_s(5) == pytest.approx(own.host_write_s(5))


def test_from_a_disk_straight_to_the_gpu_the_slower_of_disk_and_host_link_counts() -> None:
    slow_link = replace(MACHINE, host_to_device_bytes_per_s=50.0)
    contexts = [
        PolicyContext(tier=tier, model=MODEL, hardware=hardware, lower_tier_name="disk")
        for tier in (0, 1)
        for hardware in (MACHINE, slow_link)
    ]
    rates = [3 * MODEL.kv_bytes_per_token / context.reload_s(3) for context in contexts]
    assert rates == pytest.approx([100, 50, 100, 100])
