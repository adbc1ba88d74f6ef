"""Real time for SimPy: timers are not early, other threads are heard at once, and the end is found."""

import threading
from queue import SimpleQueue
from statistics import median
from time import perf_counter, process_time, sleep

import pytest
from simpy.core import EmptySchedule

from kvsim.substrate.hardware.wall_clock import WallClock


def later(seconds, call, *arguments):
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()


def test_timers_are_due_in_real_time_and_do_not_drift():
    clock, seen = WallClock(), []

    def ticks():
        for _ in range(5):
            yield clock.timeout(0.01)
            seen.append((clock.now, clock.elapsed_s()))

    clock.process(ticks())
    began = perf_counter()
    clock.run()
    assert 0.05 <= perf_counter() - began < 10
    assert [now for now, _ in seen] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert all(elapsed >= now for now, elapsed in seen)


def test_another_thread_ends_the_sleep():
    clock = WallClock()
    event, order = clock.expect(), []
    event.callbacks.append(lambda event: order.append((event.value, clock.now)))
    clock.timeout(60.0).callbacks.append(lambda _: order.append(("timer", clock.now)))
    later(0.02, clock.complete, event, "done")
    clock.run(until=event)
    ((name, now),) = order
    assert name == "done" and 0.0 < now < 60.0


def test_the_run_waits_for_what_is_expected_and_ends_after_it():
    clock = WallClock()
    event = clock.expect()
    later(0.02, clock.complete, event, 7)
    clock.run()
    assert event.value == 7 and event.processed
    with pytest.raises(EmptySchedule):
        clock.step()


def test_many_threads_complete_each_event_once():
    clock, values = WallClock(), []
    events = [clock.expect() for _ in range(200)]
    for event in events:
        event.callbacks.append(lambda event: values.append(event.value))

    def complete(first):
        for number in range(first, 200, 4):
            clock.complete(events[number], number)

    threads = [threading.Thread(target=complete, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    clock.run()
    for thread in threads:
        thread.join()
    assert sorted(values) == list(range(200))


def test_now_never_goes_back_when_a_report_was_overtaken():
    clock, seen = WallClock(), []
    event = clock.expect()
    event.callbacks.append(lambda _: seen.append(clock.now))

    def busy(_):
        seen.append(clock.now)
        clock.complete(event)  # reported while the handler of a later moment runs

    clock.timeout(0.01).callbacks.append(busy)
    clock.timeout(0.01).callbacks.append(lambda _: seen.append(clock.now))
    clock.run()
    assert seen == sorted(seen) and len(seen) == 3


def test_a_failure_in_another_thread_ends_the_run():
    clock = WallClock()
    clock.expect()
    later(0.01, clock.fail, OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        clock.run()


def test_a_report_is_handled_soon_and_without_busy_waiting():
    """About 30 us on a quiet machine; the bound leaves room for a loaded one."""
    clock, waits_s = WallClock(), []

    def rounds():
        for _ in range(50):
            event = clock.expect()
            asked.put(event)
            reported_s = yield event
            waits_s.append(perf_counter() - reported_s)

    asked: SimpleQueue = SimpleQueue()

    def answer():
        while (event := asked.get()) is not None:
            sleep(0.002)
            clock.complete(event, perf_counter())

    thread = threading.Thread(target=answer)
    thread.start()
    clock.process(rounds())
    began = process_time()
    clock.run()
    busy_s = process_time() - began
    asked.put(None)
    thread.join()
    print(f"median {1e6 * median(waits_s):.0f} us, {1e3 * busy_s:.1f} ms of CPU in {1e3 * clock.now:.0f} ms")
    assert median(waits_s) < 0.025
    assert busy_s < 0.5 * clock.now
