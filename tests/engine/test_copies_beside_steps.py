"""Copies between GPU and host delay the launch of a step that begins with them."""

from typing import Any

import pytest
from simpy import Event

from kvsim.core.transfer import Transfer
from kvsim.engine.substrate import Work
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.cluster.small_cluster import Sent, small_cluster
from tests.engine.small import SmallEngine, ask, small_engine


class Watched(SimulatedSubstrate):
    """Remembers the time of each step or leap, and whether copies begin with it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seen: list[tuple[int, bool]] = []

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        self.seen.append((round(self.env.now), work.has_copies))
        return super().compute(work, loads)


def seen_by(engine: SmallEngine) -> list[tuple[int, bool]]:
    assert isinstance(engine.substrate, Watched)
    return engine.substrate.seen


def test_a_leap_after_a_prompt_whose_pages_are_copied_takes_longer_once() -> None:
    """17 tokens of prompt, then two decode steps."""
    for cpu, more_s in ((9, 100), (0, 0)):
        engine = small_engine(gpu=9, cpu=cpu, hardware={"copy_leap_s": 100.0})
        outcome = engine.serve(ask("abcd", output=3))
        assert outcome.ttft_s[0] == pytest.approx(17)
        assert outcome.e2e_s[0] == pytest.approx(19 + more_s)


def test_a_step_with_prefill_takes_its_launch_which_copies_delay() -> None:
    """The second prompt, of five tokens, begins when the pages of the first are copied, the third of 17 tokens with those of the
    second; a launch takes 3 s and copies 7 more. The fourth begins alone."""
    hardware = {"prefill_launch_s": 3.0, "copy_launch_s": 7.0}
    engine = small_engine(gpu=20, cpu=20, hardware=hardware, make_substrate=Watched)
    outcome = engine.serve(ask("abcd", 0), ask("k", 1), ask("lmno", 20), ask("p", 90))
    assert outcome.ttft_s.tolist() == pytest.approx([17, 17 + 10 - 1, 27 + 17 - 20, 5])
    assert seen_by(engine) == [(0, False), (17, True), (27, True), (90, False)]


def test_copies_to_a_disk_do_not_count() -> None:
    """Four pages reach the CPU 4 s after they are computed, where their copy to the disk begins, as does a step."""
    engine = small_engine(gpu=9, cpu=9, disk=9, make_substrate=Watched)
    outcome = engine.serve(ask("abcd", 0), ask("", 21), ask("", 22))
    assert outcome.links["cpu-disk"].busy_s > 0
    assert seen_by(engine) == [(0, False), (21, False), (22, False)]


def test_loads_count_too() -> None:
    """The first prompt has left the GPU when it comes again; its step begins with the load."""
    engine = small_engine(gpu=6, cpu=20, make_substrate=Watched)
    outcome = engine.serve(ask("abcd", 0), ask("klmn", 100), ask("abcd", 200))
    assert outcome.hit_pages[2, 1] == 3
    assert seen_by(engine) == [(0, False), (100, False), (200, True)]


@pytest.mark.parametrize("engines", [(0, 1), (1, 0)])
def test_copies_delay_the_steps_of_their_own_gpu(engines: tuple[int, int]) -> None:
    """Both prompts end at 17 s, and two decode steps follow. Only the first has pages, which go to a tier of both engines."""
    cluster = small_cluster(gpu=8, cpu=20, routing=Sent(*engines), hardware={"copy_leap_s": 100.0})
    outcome = cluster.serve(ask("abcd", output=3), ask("", 16, output=3))
    assert outcome.e2e_s.tolist() == pytest.approx([19 + 100, 3])
