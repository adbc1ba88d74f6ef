"""The threads that carry out tasks."""

import pytest
import torch

from kvsim.substrate.hardware.worker import Worker


def test_a_thread_that_cannot_use_its_device_answers_every_task_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError(f"{device} is lost")

    monkeypatch.setattr(torch.cuda, "set_device", lost)
    done, failed = list[int](), list[tuple[int, str]]()
    worker = Worker[int]("tasks", done.append, lambda task, error: failed.append((task, str(error))), torch.device("cuda", 7))
    worker.give(1)
    with pytest.raises(RuntimeError, match="cuda:7 is lost"):
        worker.call(lambda: done.append(2))
    assert worker.close()
    assert (done, failed) == ([], [(1, "cuda:7 is lost")])


def test_tasks_are_done_in_order_and_one_that_fails_stops_no_other() -> None:
    done, failed = list[float](), list[int]()
    worker = Worker[int](
        "tasks", lambda task: done.append(1 / task), lambda task, error: failed.append(task), torch.device("cpu")
    )
    for task in (2, 0, 4):
        worker.give(task)
    worker.call(lambda: done.append(0.0))
    assert worker.close()
    assert (done, failed) == ([0.5, 0.25, 0.0], [0])
