"""When SGLang asks storage again for requests for which nothing was read, and which passes it can leave out until then."""

import pytest

from kvsim.core.pool import UNLIMITED
from kvsim.engine.job import Job
from kvsim.engines.sglang.storage_waits import RETRY_PASSES, Retries, Waiter
from kvsim.engines.vllm.line import ArrivalLine
from tests.workloads import make_request


def waiting(count: int) -> tuple[ArrivalLine, list[Job]]:
    """A queue in the order of arrival, and its jobs."""
    queue, jobs = ArrivalLine(), [Job(make_request([0], index=number), 0.0) for number in range(count)]
    for job in jobs:
        queue.push(job)
    return queue, jobs


def test_without_a_request_to_ask_for_every_pass_is_quiet() -> None:
    queue, jobs = waiting(1)
    retries = Retries()
    assert retries.quiet_passes == UNLIMITED
    retries.later(jobs[0], Waiter())
    retries.take_due(queue)  # the first one of the queue is not asked for
    assert not len(retries) and retries.quiet_passes == UNLIMITED


def test_a_request_that_is_not_counted_yet_needs_the_next_pass() -> None:
    queue, jobs = waiting(2)
    retries = Retries()
    retries.later(jobs[1], Waiter())
    assert retries.quiet_passes == 0
    retries.take_due(queue)
    assert retries.quiet_passes == RETRY_PASSES - 1


@pytest.mark.parametrize("left_out", range(RETRY_PASSES))
def test_passes_that_were_left_out_count(left_out: int) -> None:
    """Whether quiet passes take place or not, storage is asked again eight passes after the first one."""
    queue, jobs = waiting(2)
    retries, waiter = Retries(), Waiter()
    retries.later(jobs[1], waiter)
    retries.take_due(queue)
    retries.left_out(left_out)
    for quiet in reversed(range(RETRY_PASSES - left_out)):
        assert retries.quiet_passes == quiet
        due = retries.take_due(queue)
        assert due == ([] if quiet else [(jobs[1], waiter)])
    assert not len(retries)
