"""Host reports that wait: the latest wins, boots are kept, one host is served by one thread."""

from __future__ import annotations

import threading

import pytest
from opencue_proto import report_pb2

from opencue_sched.farm.service import HostInbox
from tests.unit.farm.test_hosts import render_host


def status(load: int) -> report_pb2.HostReport:
    return report_pb2.HostReport(host=report_pb2.RenderHost(name="h", load=load))


def test_the_latest_status_wins_and_a_boot_is_kept() -> None:
    inbox = HostInbox()
    inbox.put_boot("h", report_pb2.BootReport())
    for load in (1, 2, 3):
        assert inbox.put_status("h", status(load))
    assert inbox.waiting == 1
    mail = inbox.take()
    assert mail is not None
    assert mail.boot is not None
    assert mail.status is not None
    assert mail.status.host.load == 3

    inbox.put_status("other", status(4))
    inbox.put_boot("other", report_pb2.BootReport())
    mail = inbox.take()
    assert mail is not None
    assert mail.status is not None
    assert mail.boot is not None


def test_hosts_are_served_in_the_order_they_began_to_wait() -> None:
    inbox = HostInbox()
    for name in ("a", "b", "a", "c"):
        inbox.put_status(name, status(0))
    served = [inbox.take() for _ in range(3)]
    assert [mail.host_name for mail in served if mail] == ["a", "b", "c"]


def test_a_host_is_not_served_twice_at_once() -> None:
    # given a host that is being served
    inbox = HostInbox()
    inbox.put_status("a", status(1))
    assert inbox.take() is not None

    # when it reports again, and another host does
    inbox.put_status("a", status(2))
    inbox.put_status("b", status(3))

    # then the other is next, and the first only when it is done
    second = inbox.take()
    assert second is not None
    assert second.host_name == "b"
    inbox.done("a")
    third = inbox.take()
    assert third is not None
    assert third.status is not None
    assert (third.host_name, third.status.host.load) == ("a", 2)


def test_it_is_bounded() -> None:
    inbox = HostInbox(most_hosts=1)
    assert inbox.put_status("a", status(1))
    assert not inbox.put_status("b", status(1))
    assert inbox.put_status("a", status(2))


def test_the_bytes_that_wait_are_bounded() -> None:
    # given room for two reports
    size = status(1).ByteSize()
    inbox = HostInbox(most_bytes=2 * size)
    assert inbox.put_status("a", status(1))
    assert inbox.put_status("b", status(1))
    # when there are more, then only one that takes the place of another is kept
    assert not inbox.put_status("c", status(1))
    assert not inbox.put_boot("a", report_pb2.BootReport(host=render_host()))
    assert inbox.put_status("a", status(2))
    # and what is served makes room
    mail = inbox.take()
    assert mail is not None
    assert mail.boot is None
    assert inbox.put_status("c", status(1))
    assert not inbox.put_status("d", status(1))


def test_the_age_of_mail_is_since_it_came() -> None:
    now = [10.0]
    inbox = HostInbox(clock=lambda: now[0])
    inbox.put_status("a", status(1))
    mail = inbox.take()
    assert mail is not None
    now[0] = 13.0
    assert inbox.age(mail) == 3.0


def test_who_waits_for_mail_is_let_go_when_the_inbox_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = HostInbox()
    waiting, wait = threading.Event(), inbox._wake.wait
    monkeypatch.setattr(inbox._wake, "wait", lambda: (waiting.set(), wait(20)))
    taken: list[object] = []
    waiter = threading.Thread(target=lambda: taken.append(inbox.take()))
    waiter.start()
    assert waiting.wait(10)
    inbox.close()
    waiter.join(10)
    assert taken == [None]
    assert not inbox.put_status("b", status(1))
