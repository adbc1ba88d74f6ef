"""Noise: what is drawn, what it multiplies, and that nothing else changes."""

from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from kvsim.engine.substrate import Work
from kvsim.hardware.noise import Noise, Variation
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.noise import KINDS, OF_LINKS, Factors, NoiseSource
from kvsim.substrate.simulated.noisy_steps import steps_of_run
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import HARDWARE, MODEL, ask, small_engine
from tests.substrate.simulated.works import altered

TWICE = Variation(each=[[0, 2.0], [1, 2.0]])
"""Everything takes twice the expected time."""
EVEN = Variation(each=[[0, 0.5], [1, 1.5]])


def factors(variation: Variation | None, seed: int = 0) -> Factors:
    return Factors(variation, np.random.default_rng(seed))


def drawn(variation: Variation, count: int, seed: int = 0) -> list[float]:
    made = factors(variation, seed)
    return [made.draw() for _ in range(count)]


def test_factors_have_the_quantiles_that_were_measured() -> None:
    found = np.quantile(
        drawn(Variation(each=[[0, 0.9], [0.5, 1.0], [0.9, 1.1], [1, 3.0]]), 20_000), (0.0, 0.25, 0.5, 0.9, 0.95, 1.0)
    )
    assert found == pytest.approx([0.9, 0.95, 1.0, 1.1, 2.05, 3.0], rel=0.03)


def test_successive_factors_are_as_correlated_as_measured() -> None:
    for correlation in (0.0, 0.6):
        values = drawn(Variation(each=EVEN.each, correlation=correlation), 20_000)
        scores = [NormalDist().inv_cdf(min(max(value - 0.5, 1e-6), 1 - 1e-6)) for value in values]
        assert np.corrcoef(scores[:-1], scores[1:])[0, 1] == pytest.approx(correlation, abs=0.02)


def test_a_run_has_a_factor_of_its_own() -> None:
    runs = [factors(Variation(each=[[0, 1.0], [1, 1.0]], run=0.2), seed) for seed in range(2000)]
    first, second = np.log([[run.draw() for _ in range(2)] for run in runs]).T
    assert first == pytest.approx(second, abs=1e-12) and np.std(first) == pytest.approx(0.2, rel=0.05)


def test_factors_do_not_depend_on_how_they_are_asked_for() -> None:
    """Neither on the order nor on the blocks in which they are drawn."""
    one, other = factors(EVEN), factors(EVEN)
    values = [one.draw() for _ in range(3000)]
    assert other.excess(2900, 50) == pytest.approx(sum(values[2900:2950]) - 50)
    assert other.excess(0, 10) == pytest.approx(sum(values[:10]) - 10)
    assert factors(None).excess(5, 7) == 0


def test_kinds_engines_seeds_and_runs_draw_apart() -> None:
    noise = Noise(**dict.fromkeys(KINDS, EVEN))
    sources = [NoiseSource(noise, 0), NoiseSource(noise, 1), NoiseSource(replace(noise, seed=1), 0)]
    found = {source.factors(kind, owner).draw() for source in sources for kind in KINDS for owner in (0, 1)}
    assert len(found) == 3 * len(KINDS) * 2
    assert set(OF_LINKS.values()) <= set(KINDS)


def machine(**changes: Any) -> HardwareSpec:
    return HardwareSpec(**(HARDWARE | changes))


DECODE = Work(decode_requests=2, decode_context_tokens=10, max_steps=6, decode_step=3)
CHUNK = Work(chunks=[(5, 0)])


def test_without_noise_steps_are_those_of_the_machine() -> None:
    plain, silent = machine(), machine(noise=Noise(), prefill_launch_s=9.0, prefill_overhead_s=2.0)
    assert type(steps_of_run(MODEL, plain, seed=0, engines=1)) is type(step_times(MODEL, plain))
    steps, expected = steps_of_run(MODEL, silent, seed=0, engines=1), step_times(MODEL, silent)
    for work, count in ((DECODE, 1), (DECODE, 6), (CHUNK, 1), (Work(chunks=[(50, 0)]), 1)):
        assert steps.leap_s(work, count) == pytest.approx(expected.leap_s(work, count), rel=1e-12)


def test_each_step_of_a_leap_has_its_factor() -> None:
    steps = steps_of_run(MODEL, machine(noise=Noise(decode_steps=EVEN)), seed=0, engines=1)
    ends = [steps.leap_s(DECODE, count) for count in range(1, 7)]
    made = NoiseSource(Noise(decode_steps=EVEN), 0).factors("decode_steps", 0)
    expected = [made.excess(3 + step, 1) for step in range(6)]
    step_s = step_times(MODEL, machine()).leap_s(DECODE, 1)
    assert [after - before for before, after in pairwise([0.0, *ends])] == pytest.approx(
        [step_s * (1 + more) for more in expected], rel=1e-6
    )
    assert steps.steps_by(DECODE, ends[2] + 1e-9, 6) == (4, steps.leap_s(DECODE, 4))
    later = altered(DECODE, decode_step=5)
    assert steps.leap_s(later, 1) == pytest.approx(ends[2] - ends[1]), "the same step, in a leap that begins with it"


def test_prefill_takes_its_computation_or_its_launch_each_with_its_factor() -> None:
    """Five tokens take 5 s and a launch 4 s."""
    expected = {"prefill_steps": 10.0, "launches": 8.0, "decode_steps": 5.0}
    for kind, seconds in expected.items():
        spec = machine(noise=Noise(**{kind: TWICE}), prefill_launch_s=4.0)
        assert steps_of_run(MODEL, spec, seed=0, engines=1).leap_s(CHUNK, 1) == pytest.approx(seconds)


def test_launches_of_further_chunks_and_of_what_decodes_have_the_same_factor() -> None:
    spec = machine(noise=Noise(launches=TWICE), prefill_launch_s=40.0, chunk_launch_s=3.0, decode_launch_s=0.5)
    steps = steps_of_run(MODEL, spec, seed=0, engines=1)
    assert steps.leap_s(altered(CHUNK, chunks=CHUNK.chunks * 3), 1) == pytest.approx(2 * (40 + 2 * 3))
    assert steps.leap_s(altered(CHUNK, decode_requests=7, decode_context_tokens=7), 1) == pytest.approx(2 * 40.5)


def test_what_copies_add_has_the_factor_of_a_launch_or_of_the_first_step_of_a_leap() -> None:
    noise = Noise(launches=TWICE, decode_steps=TWICE)
    spec = machine(noise=noise, prefill_launch_s=40.0, copy_launch_s=3.0, leap_overhead_s=1.0, copy_leap_s=4.0)
    steps = steps_of_run(MODEL, spec, seed=0, engines=1)
    assert steps.leap_s(altered(CHUNK, has_copies=True), 1) == pytest.approx(2 * 43)
    for count in (1, 3, 50):
        alone_s, expected_s = steps.leap_s(DECODE, count), step_times(MODEL, machine(leap_overhead_s=1.0)).leap_s(DECODE, count)
        assert steps.leap_s(altered(DECODE, has_copies=True), count) - alone_s == pytest.approx(2 * 4)
        assert alone_s == pytest.approx(2 * expected_s, rel=0.2), "a leap's later steps have the excess of the first"


def test_steps_of_a_leap_that_are_formed_one_by_one_have_their_own_factors_throughout() -> None:
    """Without context, all steps take the same time on a quiet machine: a leap is as long as its steps, each with its number."""
    noise = Noise(decode_steps=EVEN)
    steps = steps_of_run(MODEL, machine(noise=noise, leap_overhead_s=3.0, memory_bytes_per_s=1e30), seed=1, engines=1)
    each = Work(decode_requests=1, forms_each_step=True)
    one_by_one = [steps.leap_s(altered(each, decode_step=number), 1) for number in range(5)]
    assert steps.leap_s(each, 5) == pytest.approx(sum(one_by_one), rel=1e-2) and len(set(one_by_one)) == 5


@pytest.mark.parametrize(("kind", "links"), [("loads", ["cpu-gpu"]), ("stores", ["gpu-cpu"]), ("disk_reads", ["disk-cpu"])])
def test_a_transfer_occupies_its_link_for_its_factor(kind: str, links: list[str]) -> None:
    """Two prompts that displace each other on the GPU and in CPU memory."""
    story = [ask("abcd", 0), ask("klmn", 100), ask("abcd", 200)]
    runs = []
    for noise in (None, Noise(**{kind: TWICE})):
        engine = small_engine(gpu=6, cpu=6, disk=20, hardware={"noise": noise})
        runs.append(engine.serve(*story))
    plain, noisy = runs
    assert plain.hit_pages.tolist() == noisy.hit_pages.tolist()
    for name, use in plain.links.items():
        slower = 2 if name in links else 1
        assert (noisy.links[name].bytes, noisy.links[name].busy_s) == (use.bytes, pytest.approx(slower * use.busy_s))
    assert set(links) <= set(plain.links)


def test_a_cancelled_transfer_with_noise_has_brought_what_its_factor_allows() -> None:
    """A page takes 2 s from disk, 4 s with noise: 9 s bring two of them."""
    noise = Noise(disk_reads=TWICE)
    substrate = SimulatedSubstrate(MODEL, machine(noise=noise), 4, links="fifo")
    assert substrate.ranks is not None
    split = substrate.ranks.split("disk-cpu", 5, 64)
    assert split is not None and split.work_bytes == 2 * 5 * 64
    assert split.arrived(9 * 32) == [2] and not split.failed


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"each": [[0, 1.0]]}, "begin with 0 and end with 1"),
        ({"each": [[0.1, 1.0], [1, 1.0]]}, "begin with 0 and end with 1"),
        ({"each": [[0, 2.0], [1, 1.0]]}, "ascending order"),
        ({"each": [[0, 1.0], [0.5, 1.0], [0.5, 2.0], [1, 2.0]]}, "ascending order"),
        ({"each": [[0, 0.0], [1, 1.0]]}, "each must be above 0"),
        ({"each": [[0, 1.0, 2.0], [1, 1.0]]}, "rows of"),
        ({"each": [[0, True], [1, 1.0]]}, "rows of"),
        ({"each": EVEN.each, "run": 1.0}, "run must be at least 0 and below 1"),
        ({"each": EVEN.each, "correlation": 1.0}, "correlation must be at least 0 and below 1"),
    ],
)
def test_wrong_variations_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^noise\.loads\..*{problem}"):
        Noise(loads=Variation(**settings))
