"""Host reports that wait: the latest wins, boots are kept, many hosts are served at once, and each by one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from opencue_proto import report_pb2

from opencue_sched.reports.inbox import MOST_HOSTS, HostInbox, Mail
from tests.kit.polling import eventually

Served = tuple[str, Mail]


class Desk:
    """Serves only as often as it is let."""

    def __init__(self, *, threads: int = 1, together: int = 1, gather_seconds: float = 0.0) -> None:
        self.inbox = HostInbox(
            self.serve, name="desk", threads=threads, together=together, gather_seconds=gather_seconds
        )
        self.served: list[Served] = []
        self.batches: list[list[str]] = []
        self._turns = threading.Semaphore(0)

    def serve(self, hosts: Sequence[Served]) -> None:
        self.batches.append([name for name, _ in hosts])
        self.served += hosts
        self._turns.acquire()

    def put_status(self, name: str, load: int) -> bool:
        return self.inbox.put(name, status=status(load))

    def next(self) -> Served:
        """Let the host go that is served, and wait for the one after it."""
        before = len(self.served)
        self._turns.release()
        eventually(lambda: len(self.served) > before)
        return self.served[-1]

    def over(self) -> None:
        """Close the inbox while hosts are served, then let these go."""
        closing = threading.Thread(target=self.inbox.close)
        closing.start()
        eventually(lambda: not self.put_status("late", 0))
        self._turns.release(1000)
        closing.join()


@pytest.fixture
def desk() -> Iterator[Desk]:
    """One thread, which is busy with the host "first"."""
    made = Desk()
    made.put_status("first", 0)
    eventually(lambda: len(made.served) == 1)
    yield made
    made.over()


def status(load: int) -> report_pb2.HostReport:
    return report_pb2.HostReport(host=report_pb2.RenderHost(name="h", load=load))


def load_of(mail: Served) -> int:
    return int(mail[1]["status"].host.load)


def test_the_latest_status_wins_and_a_boot_is_kept(desk: Desk) -> None:
    desk.inbox.put("h", boot=report_pb2.BootReport())
    for load in (1, 2, 3):
        assert desk.put_status("h", load)
    desk.put_status("other", 4)
    desk.inbox.put("other", boot=report_pb2.BootReport())

    mail = desk.next()
    assert "boot" in mail[1]
    assert load_of(mail) == 3
    mail = desk.next()
    assert "boot" in mail[1]
    assert load_of(mail) == 4


def test_hosts_are_served_in_the_order_they_began_to_wait(desk: Desk) -> None:
    for name in ("a", "b", "a", "c"):
        desk.put_status(name, 0)
    assert [desk.next()[0] for _ in range(3)] == ["a", "b", "c"]


def test_what_waits_is_served_together_as_far_as_it_may() -> None:
    # given a thread that serves three hosts at once, and is busy
    desk = Desk(together=3)
    try:
        desk.put_status("first", 0)
        eventually(lambda: len(desk.served) == 1)
        # when five hosts send something meanwhile, one of them twice
        for name in ("a", "b", "a", "c", "d", "e"):
            desk.put_status(name, 0)
        desk.next()
        desk.next()
        # then they are served in turn, three at once, and each once
        assert desk.batches == [["first"], ["a", "b", "c"], ["d", "e"]]
    finally:
        desk.over()


def test_a_host_that_reports_alone_waits_for_others_to_be_served_with() -> None:
    desk = Desk(together=2, gather_seconds=60.0)
    try:
        # given a host that waits for another
        desk.put_status("a", 0)
        # when the inbox is closed before one comes, then it does not wait on
        desk.over()
        assert desk.served == []
    finally:
        desk.over()


def test_one_thread_waits_for_more_and_another_takes_them_once_there_is_enough() -> None:
    # given two threads, and two hosts that wait for a third
    desk = Desk(threads=2, together=3, gather_seconds=60.0)
    try:
        for name in ("a", "b"):
            desk.put_status(name, 0)
        # when it reports, then all three are served together, and at once
        desk.put_status("c", 0)
        eventually(lambda: desk.batches == [["a", "b", "c"]])
        # and those behind them again wait for more
        desk.put_status("d", 0)
        desk.over()
        assert desk.batches == [["a", "b", "c"]]
    finally:
        desk.over()


def test_what_serving_raises_ends_neither_the_thread_nor_the_turn_of_the_host() -> None:
    failures = [RuntimeError("unforeseen")]
    served: list[str] = []

    def serve(hosts: Sequence[Served]) -> None:
        served.extend(name for name, _ in hosts)
        if failures:
            raise failures.pop()

    desk = HostInbox(serve, name="desk", threads=1)
    try:
        for count in (1, 2):
            desk.put("a", status=status(0))
            eventually(lambda count=count: len(served) == count)
    finally:
        desk.close()


def test_a_host_is_not_served_twice_at_once() -> None:
    # given a host that is being served, and a thread to spare
    desk = Desk(threads=2)
    try:
        desk.put_status("a", 1)
        eventually(lambda: len(desk.served) == 1)

        # when it reports again, and another host does
        desk.put_status("a", 2)
        desk.put_status("b", 3)

        # then the other is next, and the first only when it is done
        eventually(lambda: len(desk.served) == 2)
        assert desk.served[1][0] == "b"
        third = desk.next()
        assert (third[0], load_of(third)) == ("a", 2)
    finally:
        desk.over()


def test_it_is_bounded() -> None:
    desk = Desk()
    try:
        desk.put_status("first", 0)
        eventually(lambda: len(desk.served) == 1)
        assert all(desk.put_status(f"a{number}", 1) for number in range(MOST_HOSTS))
        assert not desk.put_status("b", 1)
        assert desk.put_status("a0", 2)
    finally:
        desk.over()


def test_a_closed_inbox_takes_nothing(desk: Desk) -> None:
    desk.put_status("waits", 1)
    desk.over()
    assert not desk.put_status("b", 1)
    assert [mail[0] for mail in desk.served] == ["first"]
