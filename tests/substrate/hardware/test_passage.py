"""A disk directly below the GPU on real memory: pages pass through pinned buffers, part by part."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import simpy

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.substrate.hardware.disk import passage  # noqa: E402
from kvsim.substrate.hardware.disk.passage import Passage, Passing  # noqa: E402
from kvsim.substrate.hardware.under_way import UnderWay  # noqa: E402
from tests.engine.small import ask, make_requests  # noqa: E402
from tests.substrate.hardware.small import PAGE_BYTES, PAGE_TOKENS, in_turn, plan, serve, tiers  # noqa: E402

STORY = ("abcd", "abcx", "klmn", "abcdef", "pq", "klmno", "abcx")
BELOW_GPU = "tiers.disk.below=gpu"


@pytest.fixture(autouse=True)
def _parts_of_two_pages(monkeypatch):
    monkeypatch.setattr(passage, "BUFFER_BYTES", 2 * PAGE_BYTES)


@pytest.mark.parametrize(
    ("cpu", "placement", "hit"),
    [(0, "write_through", [6, 0, 9]), (0, "write_back", [6, 0, 9]), (5, "write_through", [6, 2, 7])],
)
def test_one_at_a_time_all_is_as_simulated_and_every_reused_page_is_right(cpu, placement, hit, tmp_path):
    """Without a CPU tier, or beside one."""
    settings = [*tiers(8, cpu, 40), BELOW_GPU, f"placement={placement}"]
    real = serve(plan(tmp_path, *settings), in_turn(*STORY))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn(*STORY))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert real.hit_pages.sum(axis=0).tolist() == hit
    assert real.tiers == simulated.tiers and real.placement == simulated.placement
    moved = {name: (link.bytes, link.transfers, link.owner) for name, link in real.links.items()}
    assert moved == {name: (link.bytes, link.transfers, link.owner) for name, link in simulated.links.items()}
    found = real.hardware
    assert (found["verified_pages"], found["wrong_words"], found["disk_faults"]) == (sum(hit), 0, {})
    assert found["page_moves"] == {name: link.bytes // PAGE_BYTES for name, link in real.links.items()}
    assert real.phases_s.sum(axis=1) == pytest.approx(real.ttft_s)


def test_many_at_a_time_reuse_right_pages(tmp_path):
    """Small steps, so that chunks of several requests mix with decodes, while pages pass both ways and go to CPU memory, too."""
    words = ("abcd", "klm", "stuvwx", "zyxwvu", "abcdef", "klmno", "stuv", "zyxw", "abcdef", "klmnop")
    requests = make_requests([ask(word, output=3, after=max(-1, at - 2)) for at, word in enumerate(words)], PAGE_TOKENS)
    settings = [*tiers(16, 4, 40), BELOW_GPU, "engine.max_batch_tokens=14", "placement=write_through"]
    outcome = serve(plan(tmp_path, *settings), requests)
    assert not outcome.status.any() and outcome.hardware["wrong_words"] == 0 and outcome.hit_pages[:, 2].any()
    assert outcome.hardware["verified_pages"] >= outcome.hit_pages.sum()
    for link in outcome.links.values():
        assert 0 < link.busy_s <= outcome.simulated_s + 5
        assert (link.intervals[:, 1] >= link.intervals[:, 0]).all() and len(link.intervals) == link.transfers


@pytest.mark.gpu
def test_on_a_gpu_pages_pass_both_ways_beside_steps_and_copies(tmp_path, monkeypatch):
    """Layers wide enough to take a while, in bf16, and parts of seven pages of 128 KiB; then again with all that is on disk."""
    wide = ["model.layers=8", "model.hidden_size=1024", "model.heads=8", "model.kv_heads=8", "model.head_dim=128"]
    wide += ["model.mlp_width=4096", "model.kv_dtype_bytes=2", "model.weight_dtype_bytes=2"]
    monkeypatch.setattr(passage, "BUFFER_BYTES", 7 << 17)
    words = ["".join(chr(ord("a") + (seed * step) % 26) for step in range(1, 40)) for seed in (1, 3, 5, 1, 7, 9, 3, 5, 11, 1)]
    asks = [ask(word[: 20 + number], output=8, after=max(-1, number - 3)) for number, word in enumerate(words)]
    settings = [*tiers(110, 30, 400), BELOW_GPU, *wide, f"disk.folder={tmp_path / 'kept'}"]
    for restored in (False, True):
        outcome = serve(plan(tmp_path, *settings), make_requests(asks, PAGE_TOKENS))
        found = outcome.hardware
        assert not outcome.status.any() and outcome.hit_pages[:, 2].sum() > 0
        assert found["wrong_words"] == 0 and found["verified_pages"] >= outcome.hit_pages.sum()
        assert found["disk_faults"] == {} and (found["restored_pages"] > 0) == restored


def test_pages_in_each_other_s_places_are_found_out(tmp_path):
    def swap(substrate):
        load = substrate.gpus[0].copy
        substrate.gpus[0].copy = lambda order: load(replace(order, host_slots=order.host_slots[::-1]) if order.is_load else order)

    outcome = serve(plan(tmp_path, *tiers(5, 0, 30), BELOW_GPU), in_turn("abcd", "klmn", "abcd"), meddle=swap)
    assert outcome.hit_pages[2].tolist() == [0, 0, 4] and outcome.hardware["wrong_pages"] == 4


def test_what_the_disk_does_not_deliver_is_computed(tmp_path):
    """The file is damaged in the fourth page of the first prompt, the second of its part: three pages are hit, and all six once
    it has been written again."""

    def damage(substrate):
        write = substrate.disk.write
        path = tmp_path / "run" / "disk" / "pages.data"

        def damaged(slots, keys, host, host_slots, *, cancelled):
            answer = write(slots, keys, host, host_slots, cancelled=cancelled)
            answer.result()
            writes.append(slots)
            if len(writes) == 2:
                with path.open("r+b") as file:
                    file.seek(int(slots[1]) * substrate.disk.slot_bytes + 100)
                    file.write(b"other")
            return answer

        substrate.disk.write = damaged

    writes: list[object] = []
    requests = in_turn("abcdef", "klmnop", "abcdef", "klmnop", "abcdef")
    outcome = serve(plan(tmp_path, *tiers(7, 0, 30), BELOW_GPU), requests, meddle=damage)
    assert outcome.hit_pages[2].tolist() == [0, 0, 3]
    assert outcome.hit_pages[3:].tolist() == [[0, 0, 6], [0, 0, 6]]
    found = outcome.hardware
    assert found["disk_faults"] == {"checksum": 1}
    assert (found["verified_pages"], found["wrong_words"]) == (3 + 6 + 6, 0)


def test_pages_on_disk_outlive_a_run(tmp_path):
    settings = [*tiers(8, 0, 40), BELOW_GPU, f"disk.folder={tmp_path / 'kept'}"]
    serve(plan(tmp_path, *settings), in_turn("abcd"))
    second = serve(plan(tmp_path, *settings), in_turn("abcdef"))
    assert second.hardware["restored_pages"] == 4 and second.hit_pages.tolist() == [[0, 0, 4]]
    assert (second.hardware["verified_pages"], second.hardware["wrong_words"]) == (4, 0)


def test_two_ranks_have_their_shares_of_what_passes(tmp_path):
    settings = [*tiers(8, 0, 40), BELOW_GPU, "model.heads=4", "model.kv_heads=2", "hardware.gpus=2"]
    outcome = serve(plan(tmp_path, *settings), in_turn(*STORY))
    assert outcome.hit_pages.sum(axis=0).tolist() == [6, 0, 9]
    assert (outcome.hardware["verified_pages"], outcome.hardware["wrong_words"]) == (15, 0)


def test_an_engine_whose_process_is_killed_while_pages_pass_leaves_its_requests_to_the_other(tmp_path):
    def kill(substrate):
        order = substrate._order_read

        def killing(passing, part, host_slots):
            if not killed:
                killed.append(passing.gpu)
                os.kill(substrate.gpus[passing.gpu].pid, signal.SIGKILL)
            return order(passing, part, host_slots)

        substrate.passages[True]._first = killing

    killed: list[int] = []
    settings = [*tiers(8, 0, 40), BELOW_GPU, "cluster.engines=2"]
    words = "abcdef", "klmnop", "qrstuv", "wxyzab", "abcdef", "klmnop"
    outcome = serve(plan(tmp_path, *settings), in_turn(*words), meddle=kill)
    assert not outcome.status.any() and outcome.hit_pages[:, 2].any(), "every request is served"
    assert outcome.hardware["lost_gpus"] == killed and outcome.hardware["wrong_words"] == 0


class Halves:
    """Both halves of a way on a clock: a page takes 1 s on the first and 2 s on the second. What they do, in order."""

    def __init__(self):
        self.env, self.log = simpy.Environment(), []

    def half(self, name, page_s, shortest=99, lost=()):
        """A way on which no page arrives from page ``shortest`` on, and those in ``lost`` do not either."""

        def begin(passing, part, rows):
            self.log.append((self.env.now, name, rows.tolist()))
            pages = min(part.stop, shortest, *(page for page in lost if page >= part.start)) - part.start
            done = self.env.event()
            ending = self.env.timeout(page_s * pages, pages)
            ending.callbacks.append(lambda event: done.succeed(event.value) if not done.triggered else None)
            return UnderWay(7, [Ending(done)], done)

        return begin


class Ending:
    def __init__(self, done):
        self.done = done

    def cancel(self, number):
        assert number == 7
        self.done.succeed(1)


def passing(pages):
    slots = np.arange(pages)
    return Passing(gpu=0, gpu_slots=slots, disk_slots=slots, page_ids=slots)


def way(halves, shortest=99, lost=()):
    first, second = halves.half("first", 1, shortest), halves.half("second", 2, lost=lost)
    return Passage(halves.env, passage.buffers_of(10, 2)[0], first, second)


def test_a_part_is_brought_while_the_one_before_it_is_taken():
    """Five pages in buffers of two: pages 10 and 11 of the host, 12 and 13, then 10 again, which is free at 6 s."""
    halves = Halves()
    one = way(halves)
    ends = [halves.env.process(one.carry(passing(pages))) for pages in (5, 1)]
    halves.env.run()
    assert [end.value for end in ends] == [5, 1]
    assert halves.log == [
        (0, "first", [10, 11]),
        (2, "second", [10, 11]),
        (2, "first", [12, 13]),
        (4, "second", [12, 13]),
        (6, "first", [10]),
        (7, "second", [10]),
        (8, "first", [12]),
        (9, "second", [12]),
    ]


@pytest.mark.parametrize(("shortest", "arrived"), [(3, 3), (4, 4), (0, 0)])
def test_pages_after_one_that_does_not_arrive_are_not_brought(shortest, arrived):
    halves, short = Halves(), passing(7)
    one = way(halves, shortest)
    end = halves.env.process(one.carry(short))
    halves.env.run()
    assert (end.value, short.is_short) == (arrived, True)
    after = passing(1)
    end = halves.env.process(way(halves).carry(after))
    halves.env.run()
    assert (end.value, after.is_short) == (1, False)


def test_pages_behind_one_that_is_lost_half_way_do_not_count():
    """The first part loses its second page; the others arrive."""
    halves, behind = Halves(), passing(6)
    end = halves.env.process(way(halves, lost=[1]).carry(behind))
    halves.env.run()
    assert (end.value, behind.is_short) == (1, False)


def test_a_transfer_that_is_cancelled_ends_with_the_pages_that_are_on_their_way():
    """At 2.5 s, the second part is being read: one of its pages has arrived. Buffers are free afterwards."""
    halves, stopped = Halves(), passing(7)
    one = way(halves)
    end = halves.env.process(one.carry(stopped))
    halves.env.timeout(2.5).callbacks.append(lambda _: stopped.cancel(-1))
    halves.env.run()
    assert (end.value, stopped.is_short) == (3, False)
    waiting = passing(2)
    waiting.cancel(-1)
    assert [halves.env.run(halves.env.process(one.carry(each))) for each in (waiting, passing(4))] == [0, 4]
