"""GPUs in processes of their own: one writes a page, another one loads and verifies it; whatever ends, nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.waiting import wait_until

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.engine.substrate import LOST  # noqa: E402
from kvsim.errors import UsageError  # noqa: E402
from kvsim.substrate.hardware.orders import DecodePages  # noqa: E402
from kvsim.substrate.hardware.process.remote_gpu import GpuLost  # noqa: E402
from tests.substrate.hardware import pair as machine  # noqa: E402
from tests.substrate.hardware.pair import NOTHING, copy, is_running, opened, run, some, step  # noqa: E402


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Both GPUs and a disk, shared by the tests that leave them usable."""
    threads = threading.active_count()
    substrate = opened(disk_pages=100, disk_folder=tmp_path_factory.mktemp("disk"))
    pids = [gpu.pid for gpu in substrate.gpus]
    yield substrate
    substrate.close()
    assert not any(is_running(pid) for pid in pids)
    assert threading.active_count() == threads


def verified(substrate):
    found = substrate.findings()
    return found["verified_pages"], found["wrong_words"], found["wrong_pages"]


def test_a_page_that_one_process_wrote_is_loaded_and_verified_by_another(pair):
    before = verified(pair)

    def pages():
        yield step(pair, 0, some(1, 2, 3), some(10, 11, 12), is_fill=True)[0]
        stored = yield copy(pair, 0, some(1, 2, 3), some(7, 8, 29), is_load=False)[0]
        loaded, number = copy(pair, 1, some(4, 5, 6), some(7, 8, 29), is_load=True)
        yield step(pair, 1, some(4, 5, 6), some(10, 11, 12), loads=[number])[0]
        return stored, (yield loaded)

    assert run(pair, pages()) == (3, 3)
    assert verified(pair) == (before[0] + 3, 0, 0)


@pytest.mark.long
def test_a_wrong_page_is_found_in_the_process_that_uses_it():
    """Its own machine: wrong words stay counted."""
    substrate = opened()

    def pages():
        yield step(substrate, 0, some(0, 1), some(3, 4), is_fill=True)[0]
        yield copy(substrate, 0, some(0, 1), some(0, 1), is_load=False)[0]
        substrate.hosts[0].rows[1, 8:16] ^= 1
        yield copy(substrate, 1, some(0, 1), some(0, 1), is_load=True)[0]
        yield step(substrate, 1, some(0, 1), some(3, 4))[0]

    try:
        run(substrate, pages())
        assert verified(substrate) == (2, 1, 1)
        copy(substrate, 0, some(20), some(0), is_load=True)
        with pytest.raises(ValueError, match="gpu_pages contains page 20, but the pool has pages 0 to 19"):
            substrate.env.run()
    finally:
        substrate.close()


def test_pages_are_sent_from_gpu_to_gpu_and_verified_there(pair):
    before, moved = verified(pair), pair.moved_pages.get("gpu-gpu", 0)

    def pages():
        yield step(pair, 1, some(0, 19), some(50, 51), is_fill=True)[0]
        arrived = yield pair.send_pages(1, 0, some(19, 0), some(9, 8))
        yield step(pair, 0, some(8, 9), some(50, 51))[0]
        return arrived

    assert run(pair, pages()) == 2
    assert verified(pair) == (before[0] + 2, 0, 0)
    assert pair.moved_pages["gpu-gpu"] == moved + 2
    assert [use.bytes for use in pair.link_use() if (use.name, use.owner) == ("gpu-gpu", 1)] == [2 * 1024]
    with pytest.raises(ValueError, match="2 pages cannot go to 1 slots"):
        pair.send_pages(1, 0, some(0, 1), some(2))


def test_both_processes_work_at_the_same_time(pair):
    """Each waits for what the other does: an order to one does not hold up the other."""

    def leaps():
        stops = [long_leap(pair, gpu) for gpu in (0, 1)]
        answers = []
        for gpu in (0, 1):
            answers.append((yield copy(pair, gpu, NOTHING, NOTHING, is_load=True)[0]))
        for gpu, (_, number) in enumerate(stops):
            pair.gpus[gpu].stop(number)
        steps = []
        for done, _ in stops:
            steps.append((yield done))
        return answers, steps

    answers, steps = run(pair, leaps())
    assert answers == [0, 0]
    assert all(1 <= count < 10_000 for count in steps)


def long_leap(substrate, gpu):
    """Ten thousand decode steps of one request."""
    decode = DecodePages(request=1, context_tokens=3, slots=np.arange(19), filled_slots=NOTHING, filled_ids=NOTHING)
    return step(substrate, gpu, NOTHING, NOTHING, steps=10_000, decodes=[decode])


def test_a_copy_that_has_not_begun_is_dropped_when_it_is_cancelled(pair):
    """The lists are long enough that the last copies wait for the first."""

    def copies():
        orders = [copy(pair, 0, np.arange(20), np.arange(20), is_load=True) for _ in range(10)]
        for _, number in orders[1:]:
            pair.gpus[0].cancel(number)
        values = []
        for done, _ in orders:
            values.append((yield done))
        return values

    values = run(pair, copies())
    assert values[0] == 20 and values[-1] == 0 and set(values) <= {0, 20}


def test_a_killed_process_is_noticed_and_the_other_goes_on():
    substrate, lost = opened(), []
    pids = [gpu.pid for gpu in substrate.gpus]
    substrate.on_worker_lost = lost.append

    def story():
        yield step(substrate, 0, some(0, 1), some(5, 6), is_fill=True)[0]
        yield copy(substrate, 0, some(0, 1), some(0, 1), is_load=False)[0]
        copies = [copy(substrate, 0, np.arange(20), np.arange(20), is_load=True)[0] for _ in range(20)]
        leap, _ = long_leap(substrate, 0)
        beside = copy(substrate, 1, some(4, 5), some(0, 1), is_load=True)[0]
        os.kill(pids[0], signal.SIGKILL)
        at_leap = yield leap
        seen = list(lost)
        values = yield substrate.env.all_of(copies)
        later = (yield copy(substrate, 0, some(0), some(0), is_load=True)[0]), (yield long_leap(substrate, 0)[0])
        arrived = yield beside
        yield step(substrate, 1, some(4, 5), some(5, 6))[0]
        return at_leap, seen, list(values.values()), later, arrived

    try:
        at_leap, seen, values, later, arrived = run(substrate, story())
        assert at_leap == LOST and seen == [0] and lost == [0], "the loss is known before the orders end"
        assert values[-1] == 0 and set(values) <= {0, 20}
        assert later == (0, LOST) and arrived == 2
        found = substrate.findings()
        assert found["lost_gpus"] == [0] and (found["verified_pages"], found["wrong_words"]) == (2, 0)
    finally:
        substrate.close()
    assert not any(is_running(pid) for pid in pids)


KILLS_ITSELF = """
import os, signal
from tests.substrate.hardware.pair import opened
substrate = opened()
print(*[gpu.pid for gpu in substrate.gpus], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_when_the_one_that_started_them_is_killed():
    ended = subprocess.run([sys.executable, "-c", KILLS_ITSELF], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pids = [int(pid) for pid in ended.stdout.split()]
    wait_until(lambda: not any(is_running(pid) for pid in pids))
    assert len(pids) == 2


@pytest.mark.long
def test_a_loss_that_nobody_handles_ends_the_run():
    substrate = opened(engines=2, cpu_pages=0)
    try:
        leap, _ = long_leap(substrate, 1)
        substrate.env.timeout(0.05).callbacks.append(lambda _: os.kill(substrate.gpus[1].pid, signal.SIGKILL))
        with pytest.raises(GpuLost, match="the process of GPU 1 was killed by SIGKILL"):
            substrate.env.run()
        assert not leap.processed
    finally:
        substrate.close()


def test_what_a_process_refuses_is_said_here():
    with pytest.raises(UsageError, match="page_tokens: a fragment"):
        opened(page_tokens=3, page_ids=10)


def test_more_memory_than_there_is_is_refused():
    """On a CPU before any process starts; how much a GPU has left, its own process knows."""
    with pytest.raises(UsageError, match=r"are available: decrease the tiers|GiB free; decrease it"):
        opened(gpu_pages=1 << 40)
    assert machine.demand().engines == 2
