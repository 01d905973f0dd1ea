"""What a process has in hand, and whether it takes more."""

from __future__ import annotations

import threading

from opencue_sched.coordination.presence import Duty, DutyState


def test_a_process_takes_work_unless_told_not_to():
    duty = Duty()
    assert duty.takes_work
    duty.begin()
    duty.pause()
    assert not duty.takes_work
    duty.begin()
    assert duty.state is DutyState.PAUSED
    duty.resume()
    assert duty.takes_work
    duty.drain()
    assert not duty.takes_work
    duty.resume()
    assert duty.takes_work


def test_a_process_about_to_end_never_takes_work_again():
    duty = Duty()
    duty.stop()
    for call in (duty.begin, duty.resume, duty.pause):
        call()
        assert duty.state is DutyState.DRAINING


def test_waiting_ends_when_the_last_task_does():
    duty = Duty()
    assert duty.wait_until_idle(0)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with duty.task():
            inside.set()
            leave.wait(10)

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(10)
    assert duty.in_hand == 1
    assert not duty.wait_until_idle(0.01)
    leave.set()
    assert duty.wait_until_idle(10)
    worker.join()


def test_a_failing_task_counts_no_longer():
    duty = Duty()
    try:
        with duty.task():
            raise ValueError
    except ValueError:
        assert duty.in_hand == 0
