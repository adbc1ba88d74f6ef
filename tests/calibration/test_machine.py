"""Lines through measured times, and disks measured in files that are gone afterwards."""

import csv
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.calibration.disk_rates import DiskRates  # noqa: E402
from kvsim.calibration.link_rates import LEAST_LATENCY_S, fitted  # noqa: E402
from kvsim.calibration.machine import INTERPRETED, Sizes  # noqa: E402
from kvsim.calibration.method_rates import Pair, derived_rule, fewest_programs  # noqa: E402
from kvsim.calibration.step_parts import StepParts, repeated_share  # noqa: E402
from kvsim.hardware.copy_rule import CopyRule  # noqa: E402
from kvsim.model.spec import ModelSpec  # noqa: E402
from kvsim.substrate.hardware.stopwatch import Stopwatch  # noqa: E402

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "hardware"


def test_a_line_has_the_latency_and_the_rate_of_its_points():
    n_bytes = np.array([1e3, 1e6, 1e9])
    assert fitted(n_bytes, 2e-5 + n_bytes / 5e10) == pytest.approx((2e-5, 5e10))


def test_short_copies_count_as_much_as_long_ones():
    """A hundredth more for the longest copy moves the rate by that, and the latency by no more."""
    n_bytes = np.array([1e3, 1e6, 1e9])
    seconds = (2e-5 + n_bytes / 5e10) * [1, 1, 1.01]
    latency_s, rate = fitted(n_bytes, seconds)
    assert latency_s == pytest.approx(2e-5, rel=0.01) and rate == pytest.approx(5e10 / 1.01, rel=0.005)


def test_noise_makes_no_latency_or_rate_of_zero_or_less():
    assert fitted(np.array([1e3, 1e6]), np.array([1e-3, 1e-4])) == (LEAST_LATENCY_S, 1e10)
    assert fitted(np.array([1e3, 1e6]), np.array([1e-7, 2e-4]))[0] == LEAST_LATENCY_S
    assert fitted(np.array([1e6]), np.array([1e-3])) == (LEAST_LATENCY_S, 1e9)


def test_a_disk_is_measured_in_files_that_are_gone_afterwards(tmp_path):
    rates = DiskRates(tmp_path, most_bytes=1 << 18, most_pages=8, seed=0)
    for page_bytes, threads in ((1 << 14, 1), (1 << 16, 3)):
        found = rates.bytes_per_s(page_bytes, threads)
        assert len(found) == 3 and all(0 < rate < 1e12 for rate in found)
    assert 0 < rates.latency_s(1 << 14) < 1
    assert not list(tmp_path.iterdir())


def test_a_disk_that_loses_pages_is_not_measured(tmp_path):
    rates = DiskRates(tmp_path, most_bytes=1 << 18, most_pages=8, seed=0)
    with rates._open(4, 1 << 14, 1) as disk, pytest.raises(OSError, match=r"4 of 4 pages were lost .*'missing': 1"):
        rates._seconds(disk, disk.read, np.arange(4))
    assert not list(tmp_path.iterdir())


def test_reading_beside_writing_loses_no_page_of_either(tmp_path):
    rates = DiskRates(tmp_path, most_bytes=1 << 18, most_pages=16, seed=0)
    with rates._open(16, 1 << 14, 2) as disk:
        rates._seconds(disk, disk.write, np.arange(16))
        for share in (0.0, 0.3, 1.0):
            assert 0 < rates._both_seconds(disk, np.arange(16), share) < 1
        assert len(disk.recovered()) == 16 and not any(disk.faults.values())


def made_rule(load, store, memcpy=(0.02, 0.03, 0.97), pairs=(), programs=4):
    """The rule for fragments of 1, 8 and 64 KiB, 4 a page; rates of the kernel and of staged copies by direction."""
    alone = {}
    for way, (kernel, staged) in {"load": load, "store": store}.items():
        for at, size in enumerate((1 << 10, 1 << 13, 1 << 16)):
            alone |= {(way, "kernel", size): kernel[at], (way, "staged", size): staged[at], (way, "memcpy", size): memcpy[at]}
    return derived_rule(alone, pairs, layers=4, programs=programs)


def test_a_method_is_used_from_the_size_on_from_which_it_suffices():
    """Staging leaves multiprocessors to products: three quarters of the kernel's rate are enough."""
    pairs = [Pair(size, load, pace, rate) for size, load, pace, rate in (
        (1 << 10, "kernel", 40.0, 0.8), (1 << 10, "staged", 40.0, 0.59), (1 << 10, "staged", 45.0, 0.5),
        (1 << 13, "kernel", 45.0, 0.8), (1 << 13, "staged", 40.0, 0.5), (1 << 13, "staged", 45.0, 0.61),
    )]  # fmt: skip
    rule = made_rule(([0.9, 0.9, 0.9], [0.67, 0.68, 0.95]), ([0.9, 0.9, 0.9], [0.9, 0.67, 0.68]), pairs=pairs, programs=8)
    assert rule == CopyRule(
        programs=8,
        memcpy_fragment_bytes=1 << 16,
        staged_load_page_bytes=4 << 13,
        staged_store_page_bytes=4 << 16,
        staged_load_beside_store_page_bytes=4 << 13,
        store_beside_load_bytes_per_s=45.0,
    )


def test_a_method_that_never_keeps_up_is_never_used():
    pairs = [Pair(1 << 10, "kernel", 40.0, 0.8), Pair(1 << 10, "staged", 45.0, 0.5)]
    slow = [0.1, 0.1, 0.1]
    rule = made_rule(([0.9, 0.9, 0.9], slow), ([0.9, 0.9, 0.9], slow), memcpy=slow, pairs=pairs)
    for size in (1 << 10, 1 << 16):
        assert rule.load_method(size, 4 * size, is_shared=False) == rule.store_method(size, 4 * size) == "kernel"
    assert rule.load_method(1 << 10, 4 << 10, is_shared=True) == "kernel" and rule.store_beside_load_bytes_per_s == 45.0


def test_memcpy_need_not_be_the_fastest():
    """It needs no multiprocessor, for which other methods wait beside prefill: three quarters of their rate are enough."""
    rates = ([0.9, 0.9, 0.9], [0.5, 0.5, 0.95])
    pairs = [Pair(1 << 10, load, 40.0, 0.7) for load in ("kernel", "staged")]
    assert made_rule(rates, rates, memcpy=(0.02, 0.67, 0.97), pairs=pairs).memcpy_fragment_bytes == 1 << 16
    assert made_rule(rates, rates, memcpy=(0.02, 0.68, 0.72), pairs=pairs).memcpy_fragment_bytes == 1 << 13


def test_no_more_programs_are_taken_than_are_of_use():
    assert fewest_programs({2: 0.9, 4: 0.995, 8: 1.0, 16: 0.7}) == 4


def test_the_default_rule_is_that_of_the_committed_copies():
    """Derived again from experiments/hardware/copies.csv and, for both ways at once, from rows of copies.md."""
    with (EXPERIMENTS / "copies.csv").open() as file:
        rows = list(csv.DictReader(file))
    alone = {(row["way"], row["method"], int(row["fragment_bytes"])): float(row["share"]) for row in rows[-66:]}
    assert len(alone) == 3 * 2 * 11
    pairs = [Pair(1 << 10, "kernel", 1.0, 0.736), Pair(1 << 10, "staged", 1.0, 0.717)]
    pairs += [Pair(1 << 11, "kernel", 1.0, 0.755), Pair(1 << 11, "staged", 47.08e9, 0.817)]
    rule, known = derived_rule(alone, pairs, layers=32), CopyRule()
    for name in ("programs", "memcpy_fragment_bytes", "staged_load_page_bytes", "staged_store_page_bytes"):
        assert getattr(rule, name) == getattr(known, name)
    assert rule.staged_load_beside_store_page_bytes == known.staged_load_beside_store_page_bytes
    assert rule.store_beside_load_bytes_per_s == pytest.approx(known.store_beside_load_bytes_per_s, rel=0.01)


def test_a_stopwatch_leaves_the_first_call_out():
    calls = []
    watch = Stopwatch(torch.device("cpu"), 3)
    assert 0 <= watch.seconds(lambda: calls.append(len(calls))) < 1
    assert calls == [0, 1, 2, 3]


@pytest.mark.parametrize(("own_s", "common_s", "share"), [(9.0, 3.0, 0.25), (9.0, 0.5, 0.0), (9.0, 10.0, 1.0), (1.0, 1.0, 1.0)])
def test_repeated_context_is_what_exceeds_context_that_is_read_once(own_s: float, common_s: float, share: float) -> None:
    """As much context as requests have in common takes 1 second."""
    assert repeated_share(1.0, own_s, common_s) == share


MODEL = ModelSpec(layers=2, hidden_size=8, vocabulary=5, heads=2, kv_heads=1, head_dim=2, mlp_width=8)


class Timed:
    """A transformer whose steps take a second, 2 for each token, 5 for the attention of each chunk, and nothing in reality."""

    model, page_tokens, device = MODEL, 4, torch.device("cpu")
    kv = torch.zeros(2, 9, 1)

    def step(self, chunks, decodes, *, sampled_tokens):
        self.took_s = 1.0 + 5.0 * len(chunks) + 2.0 * sum(chunk.tokens for chunk in chunks)

    def products(self, tokens, *, sampled_tokens):
        self.took_s = 1.0 + 2.0 * tokens


class Watch:
    """Says what the transformer does."""

    device = torch.device("cpu")

    def __init__(self, transformer):
        self.transformer = transformer

    def seconds(self, action):
        action()
        return self.transformer.took_s


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_attention_of_a_chunk_is_what_several_take_beyond_their_products(chunks: int) -> None:
    """Three tokens attend to 7 before them and to 1, 2 and 3 of their own: 27 pairs in 5 seconds."""
    timed = Timed()
    parts = StepParts(Watch(timed), Watch(timed), timed, flops_per_s=1e9, memory_bytes_per_s=1.0, seed=0)  # type: ignore[arg-type]
    rows, context, rate = parts.prefill_row(3, 10, chunks)
    assert (rows, context) == (6, 10)
    assert rate == pytest.approx(MODEL.attention_flops_per_pair * 27 / 5)


def test_chunks_are_measured_in_numbers_whose_products_are_measured_too() -> None:
    sizes = Sizes()
    counts = {tokens: sizes.chunks_at_once(tokens, tokens) for tokens in range(128, 2049, 128)}
    assert counts[128] == 32 and counts[640] == 6 and counts[1024] == 4 and counts[1408] == counts[2048] == 2
    tiled = range(sizes.tile_tokens, sizes.tiled_tokens + 1, sizes.tile_tokens)
    assert {tokens * count for tokens, count in counts.items()} <= {*tiled, *sizes.tokens}
    assert (sizes.chunks_at_once(8192, 8192), sizes.chunks_at_once(128, 65536), sizes.chunks_at_once(128, 16384)) == (1, 1, 4)
    assert INTERPRETED.chunks_at_once(2, 2) == 2 and INTERPRETED.chunks_at_once(8, 32) == 1
