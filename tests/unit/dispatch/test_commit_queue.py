"""Commits that lock the same rows wait for each other; others do not."""

from __future__ import annotations

import threading
from collections.abc import Collection

from opencue_sched.dispatch.commit import CommitQueue
from tests.kit.polling import eventually

LONG = 30.0


class Commit:
    """A commit in a thread of its own, under way from its place at the head until it is told to end."""

    def __init__(self, queue: CommitQueue, *hosts: str, wait_seconds: float = LONG) -> None:
        self.began, self._end = threading.Event(), threading.Event()
        self.in_time: bool | None = None
        before = queue.commits
        self._thread = threading.Thread(target=self._run, args=(queue, hosts, wait_seconds), daemon=True)
        self._thread.start()
        eventually(lambda: queue.commits > before)

    def _run(self, queue: CommitQueue, hosts: Collection[str], wait_seconds: float) -> None:
        with queue.on(hosts, wait_seconds=wait_seconds) as self.in_time:
            self.began.set()
            assert self._end.wait(LONG)

    def end(self) -> None:
        assert self.began.wait(LONG)
        self._end.set()
        self._thread.join(LONG)
        assert not self._thread.is_alive()


def test_a_commit_waits_for_those_before_it_on_its_hosts_and_for_no_other() -> None:
    queue = CommitQueue()
    first = Commit(queue, "h1", "h2")
    second = Commit(queue, "h2", "h3")
    elsewhere = Commit(queue, "h4")
    assert first.began.wait(LONG)
    assert elsewhere.began.wait(LONG)
    assert not second.began.is_set()

    first.end()

    second.end()
    elsewhere.end()
    assert [first.in_time, second.in_time, elsewhere.in_time] == [True, True, True]


def test_nobody_who_asks_later_overtakes_a_commit_of_many_hosts() -> None:
    queue = CommitQueue()
    first = Commit(queue, "h1")
    many = Commit(queue, "h1", "h2")
    later = Commit(queue, "h2")
    assert first.began.wait(LONG)
    assert not later.began.is_set(), "h2 is free, but asked for before"

    first.end()
    assert many.began.wait(LONG)
    assert not later.began.is_set()
    many.end()
    later.end()


def test_a_commit_goes_on_after_a_while_though_others_are_before_it() -> None:
    queue = CommitQueue()
    stuck = Commit(queue, "h1")
    hasty = Commit(queue, "h1", wait_seconds=0.01)
    hasty.end()
    assert hasty.in_time is False
    stuck.end()


def test_a_commit_that_fails_leaves_the_queue() -> None:
    queue = CommitQueue()
    try:
        with queue.on({"h1"}, wait_seconds=LONG):
            raise ConnectionError
    except ConnectionError:
        pass
    after = Commit(queue, "h1")
    after.end()
    assert queue.commits == 0
