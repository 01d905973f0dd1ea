"""What a process has in hand, and whether it takes more."""

from __future__ import annotations

import threading

from opencue_sched.coordination.presence import WorkerState
from opencue_sched.worker.workload import Workload


def test_a_process_takes_work_unless_told_not_to():
    workload = Workload()
    assert workload.takes_work
    workload.begin()
    workload.become(WorkerState.PAUSED)
    assert not workload.takes_work
    workload.begin()
    assert workload.state is WorkerState.PAUSED
    workload.become(WorkerState.WORKING)
    assert workload.takes_work
    workload.become(WorkerState.DRAINING)
    assert not workload.takes_work
    workload.become(WorkerState.WORKING)
    assert workload.takes_work


def test_a_process_about_to_end_never_takes_work_again():
    workload = Workload()
    workload.stop()
    workload.begin()
    assert workload.state is WorkerState.DRAINING
    for state in WorkerState:
        workload.become(state)
        assert workload.state is WorkerState.DRAINING


def test_waiting_ends_when_the_last_task_does():
    workload = Workload()
    assert workload.wait_until_idle(0)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with workload.task():
            inside.set()
            leave.wait(10)

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(10)
    assert workload.in_hand == 1
    assert not workload.wait_until_idle(0.01)
    leave.set()
    assert workload.wait_until_idle(10)
    worker.join()


def test_a_failing_task_counts_no_longer():
    workload = Workload()
    try:
        with workload.task():
            raise ValueError
    except ValueError:
        assert workload.in_hand == 0
