"""Host reports that wait: the latest wins, boots are kept, one host is served by one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opencue_proto import report_pb2

from opencue_sched.reports import service
from opencue_sched.reports.service import HostInbox
from tests.kit.polling import eventually

Mail = tuple[str, dict[str, Any]]


class Desk:
    """Serves one host at a time, and only as often as it is let."""

    def __init__(self) -> None:
        self.inbox = HostInbox(self.serve)
        self.served: list[Mail] = []
        self._turns = threading.Semaphore(0)

    def serve(self, host_name: str, mail: dict[str, Any]) -> None:
        self.served.append((host_name, mail))
        self._turns.acquire()

    def put_status(self, name: str, load: int) -> bool:
        return self.inbox.put(name, status=status(load))

    def next(self) -> Mail:
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


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REPORT_THREADS", 1)


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


def load_of(mail: Mail) -> int:
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


def test_a_host_is_not_served_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a host that is being served, and a thread to spare
    monkeypatch.setattr(service, "REPORT_THREADS", 2)
    desk = Desk()
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


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_HOSTS", 1)
    desk = Desk()
    try:
        desk.put_status("first", 0)
        eventually(lambda: len(desk.served) == 1)
        assert desk.put_status("a", 1)
        assert not desk.put_status("b", 1)
        assert desk.put_status("a", 2)
    finally:
        desk.over()


def test_a_closed_inbox_takes_nothing(desk: Desk) -> None:
    desk.put_status("waits", 1)
    desk.over()
    assert not desk.put_status("b", 1)
    assert [mail[0] for mail in desk.served] == ["first"]
