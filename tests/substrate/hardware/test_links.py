"""Links carry flights in order, whole or not at all, and know what they have carried and how long the rest will take."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from tests.waiting import LONG_S

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.hardware.copy_rule import CopyRule  # noqa: E402
from kvsim.substrate.hardware.disk.disk_link import DiskLink  # noqa: E402
from kvsim.substrate.hardware.memory import tier_copy  # noqa: E402
from kvsim.substrate.hardware.memory.copy_links import HostLink  # noqa: E402
from kvsim.substrate.hardware.memory.flight import Flight, Meter  # noqa: E402
from kvsim.substrate.hardware.memory.tier_copy import TierCopy  # noqa: E402
from kvsim.substrate.hardware.page_names import PageNames  # noqa: E402
from kvsim.substrate.hardware.process.order_book import OrderBook, Party  # noqa: E402
from kvsim.substrate.hardware.turn import Turn  # noqa: E402
from kvsim.substrate.hardware.wall_clock import WallClock  # noqa: E402

LAYERS, FRAGMENT_BYTES = 3, 512
PAGE_BYTES = LAYERS * FRAGMENT_BYTES


def flight(book, sources, targets, meter=None):
    """A flight and the event of its end."""
    pages = np.array(sources, dtype=np.int64)
    number, done = book.enter(meter=meter, pages=len(sources), page_bytes=PAGE_BYTES)
    return Flight(number=number, sources=pages, targets=np.array(targets, dtype=np.int64), page_ids=pages), done


class HostLinks:
    """Both directions between a GPU of 20 pages and a host of 25."""

    def __init__(self, device, *, is_layerwise=True):
        gpu = torch.randint(0, 256, (LAYERS, 20, FRAGMENT_BYTES), dtype=torch.uint8, device=device)
        host = torch.randint(0, 256, (25, LAYERS, FRAGMENT_BYTES), dtype=torch.uint8)
        self.tiers = TierCopy(gpu, host.pin_memory() if device.type == "cuda" else host, CopyRule())
        self.clock, self.turn = WallClock(), Turn(device)
        self.book = OrderBook(self.clock)
        answers = Party(self.book, 0)
        busy = [lambda: self.stores.is_busy, lambda: self.loads.is_busy]
        self.loads = HostLink(answers, self.tiers, self.turn, busy[0], is_load=True, is_layerwise=is_layerwise)
        self.stores = HostLink(answers, self.tiers, self.turn, busy[1], is_load=False, is_layerwise=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.loads.close() and self.stores.close()


def test_pages_go_down_and_up_again_in_order(device):
    with HostLinks(device) as both:
        meter = Meter(1e9)
        sent, is_sent = flight(both.book, [3, 7], [20, 4], meter)
        ended = []
        both.stores.send(sent)
        back, is_back = flight(both.book, [4, 20], [0, 1])
        is_sent.callbacks.append(lambda _: both.loads.send(back))
        for one, done in ((sent, is_sent), (back, is_back)):
            done.callbacks.append(lambda event, one=one: ended.append((one, event.value)))
        expected = both.tiers.gpu[[7, 3]].clone()
        both.clock.run()
        assert ended == [(sent, 2), (back, 2)]
        assert torch.equal(both.tiers.gpu[[0, 1]], expected)
        used = meter.used()
        assert (used.bytes, used.transfers) == (2 * PAGE_BYTES, 1)
        assert used.busy_s == pytest.approx(used.intervals[0, 1] - used.intervals[0, 0])


@pytest.mark.parametrize(("part_bytes", "parts"), [(1, 3), (2 * PAGE_BYTES // 2, 2), (1 << 20, 1)])
def test_a_load_lands_in_parts_of_some_layers_each_long_enough(part_bytes, parts, device, monkeypatch):
    monkeypatch.setattr(tier_copy, "PART_BYTES", part_bytes)
    with HostLinks(device) as both:
        load, _ = flight(both.book, [5, 6], [1, 2])
        both.loads.send(load)
        assert len(load.landings) == parts
        for layer in range(LAYERS):
            with both.turn:
                load.await_layer(layer, None, both.turn)
            assert load.landings[layer // load.layers_at_once].submitted.is_set()
        both.clock.run()
        assert torch.equal(both.tiers.gpu[[1, 2]].cpu(), both.tiers.host[[5, 6]])


def test_without_overlap_a_load_lands_at_once(device, monkeypatch):
    monkeypatch.setattr(tier_copy, "PART_BYTES", 1)
    with HostLinks(device, is_layerwise=False) as both:
        load, _ = flight(both.book, [5], [1])
        both.loads.send(load)
        assert len(load.landings) == 1
        both.clock.run()


def test_a_cancelled_flight_moves_nothing_and_delays_nothing(device):
    with HostLinks(device) as both:
        meter, before = Meter(1e9), both.tiers.gpu.clone()
        load, done = flight(both.book, [5], [1], meter)
        load.is_cancelled = True
        both.loads.send(load)
        both.clock.run()
        assert done.value == 0 and all(landing.submitted.is_set() for landing in load.landings)
        assert torch.equal(both.tiers.gpu, before)
        assert not both.loads.is_busy and not meter.is_busy and meter.used().bytes == 0


def test_a_queue_is_as_long_as_what_is_asked_for_takes():
    meter = Meter(100.0)
    assert meter.queued_s() == 0 and not meter.is_busy
    meter.ask(50)
    assert meter.queued_s() == 0.5, "nothing was carried yet: at the rate that was assumed"
    meter.ask(50)
    meter.book(1.0, 2.0, 50, 50)
    assert meter.queued_s() == 1.0 and meter.is_busy, "50 bytes a second were measured"
    meter.book(2.0, 2.0, 0, 50)
    assert meter.queued_s() == 0 and not meter.is_busy, "what was cancelled does not wait any more"


def test_a_link_is_busy_while_anything_is_under_way():
    meter = Meter(1.0)
    for start_s, end_s in ((0.0, 2.0), (1.0, 3.0), (5.0, 6.0)):
        meter.ask(10)
        meter.book(start_s, end_s, 10, 10, 7)
    used = meter.used()
    assert (used.bytes, used.transfers, used.busy_s) == (30, 3, 4.0)
    assert used.intervals.tolist() == [[0.0, 2.0, 10.0, 7.0], [1.0, 3.0, 10.0, 7.0], [5.0, 6.0, 10.0, 7.0]]


class Shelf:
    """A disk in a dictionary: what it is asked for waits until the test lets it go on."""

    def __init__(self):
        self.calls, self.faults = [], {}
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    def read(self, slots, keys, host, host_slots, *, cancelled):
        self.calls.append((slots.tolist(), keys, host_slots.tolist()))
        answer: Future[int] = Future()
        self.has_begun.set()

        def carry():
            self.go_on.wait(LONG_S)
            answer.set_result(1 if cancelled() else len(slots))

        threading.Thread(target=carry).start()
        return answer

    write = read

    def close(self):
        self.go_on.set()


def test_a_disk_carries_one_flight_after_another_and_a_cancelled_one_not_at_all():
    clock, shelf, meter = WallClock(), Shelf(), Meter(1e6)
    book = OrderBook(clock)
    names = PageNames(10, lambda page: bytes([page]) * 16)
    link = DiskLink(Party(book, 0), shelf, np.zeros((8, 100), dtype=np.uint8), names.keys, is_read=True)
    both = [flight(book, sources, targets, meter) for sources, targets in (([1, 2], [5, 6]), ([3], [7]), ([4], [0]))]
    (first, _), (second, _), _ = both
    for one, _ in both:
        link.send(one)
    assert meter.queued_s() == pytest.approx(4 * PAGE_BYTES / 1e6)
    assert shelf.has_begun.wait(LONG_S)
    link.cancel(second.number)
    link.cancel(first.number)
    shelf.go_on.set()
    clock.run()
    assert [done.value for _, done in both] == [1, 0, 1]
    assert shelf.calls == [([1, 2], [b"\1" * 16, b"\2" * 16], [5, 6]), ([4], [b"\4" * 16], [0])]
    assert meter.used().bytes == 2 * PAGE_BYTES
    assert link.close()


def test_patterns_follow_keys_where_pages_outlive_the_run():
    ids = np.array([2, 0])
    assert PageNames(3).patterns(ids).tolist() == [2, 0]
    named = PageNames(3, lambda page: (page + 5).to_bytes(8, "little") + bytes(8))
    assert named.patterns(ids).tolist() == [7, 5]
    assert named.patterns(ids[:0]).tolist() == []
