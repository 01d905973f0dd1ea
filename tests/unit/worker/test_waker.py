"""Every freed host is swept for, also the one that comes a moment after another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from opencue_sched.worker import events
from opencue_sched.worker.events import COLLECT_SECONDS, DEBOUNCE_SECONDS, SAVED, Waker
from tests.kit.polling import eventually


class Sweeps:
    """Remembers what was asked for; asks to hear of the first hosts again."""

    def __init__(self, pauses: list[float]) -> None:
        self.asked: list[tuple[frozenset[str], frozenset[str]]] = []
        self._pauses = pauses

    def __call__(self, shows: frozenset[str], hosts: frozenset[str]) -> float:
        self.asked.append((shows, hosts))
        return self._pauses.pop(0) if self._pauses else 0.0


def test_hosts_held_back_by_a_sweep_are_asked_for_again_without_another_event():
    # given sweeps of which the first two hold a cluster back
    sweeps = Sweeps([0.02, 0.02])
    waker = Waker(sweeps)
    waker.start()
    try:
        # when a host is freed, and nothing else happens
        waker.note(["host"])

        # then it is asked for until no cluster is held back, and no longer
        eventually(lambda: len(sweeps.asked) == 3)
        assert {hosts for _, hosts in sweeps.asked} == {frozenset({"host"})}
        waker.note(shows=["show"])
        eventually(lambda: len(sweeps.asked) == 4)
        assert sweeps.asked[-1] == (frozenset({"show"}), frozenset())
    finally:
        waker.stop()


def test_a_sweep_that_fails_is_told_and_the_next_one_made():
    asked: list[frozenset[str]] = []

    def sweep(shows: frozenset[str], _hosts: frozenset[str]) -> float:
        asked.append(shows)
        if len(asked) == 1:
            raise RedisConnectionError("away")
        return 0.0

    waker = Waker(sweep)
    waker.note(shows=["show"])
    with capture_logs() as said:
        waker.start()
        try:
            eventually(lambda: said and said[0]["event"] == "wake_up_left_to_the_sweep")
            waker.note(shows=["next"])
            eventually(lambda: asked == [{"show"}, {"next"}])
        finally:
            waker.stop()


def full_farm(waker: Waker, sweeps: Sweeps) -> None:
    """Have hosts come free until the waker has used up the sweep that was due and those that it saved."""
    for _ in range(1 + SAVED):
        waker.note(["host"])
        assert waker.sweep_if_due() is None
    sweeps.asked.clear()


def test_hosts_that_come_free_now_and_then_are_swept_for_at_once_each(monkeypatch):
    # given a waker that has swept for nothing yet
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: 100.0))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    # when a few hosts come free at once
    for host in ("h1", "h2"):
        waker.note([host])
        assert waker.sweep_if_due() is None
    # then there was a sweep for each
    assert [hosts for _, hosts in sweeps.asked] == [{"h1"}, {"h2"}]


def test_a_quiet_time_saves_a_sweep_for_each_pause_that_it_was_long_and_no_more_than_a_few(monkeypatch):
    now = 100.0
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    full_farm(waker, sweeps)
    for quiet, swept in ((1.5 * COLLECT_SECONDS, 1), (1000.0, 1 + SAVED)):
        # given a time in which no host came free
        now += quiet
        # when hosts come free one after the other
        for host in map(str, range(10)):
            now += COLLECT_SECONDS / 1000
            waker.note([host])
            waker.sweep_if_due()
        # then the first ones had a sweep each, and the others share one
        waker.took_in_hosts()
        assert [hosts for _, hosts in sweeps.asked] == [{host} for host in map(str, range(swept))]
        sweeps.asked.clear()


def test_on_a_full_farm_the_hosts_that_come_free_meanwhile_share_a_sweep(monkeypatch):
    now = 100.0
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    full_farm(waker, sweeps)
    now += COLLECT_SECONDS
    waker.note(["h1"])
    waker.sweep_if_due()
    for host in ("h2", "h3"):
        waker.note([host])
        assert waker.sweep_if_due() == pytest.approx(COLLECT_SECONDS)
    assert [hosts for _, hosts in sweeps.asked] == [{"h1"}]
    # new work does not wait for them, and takes them along
    waker.note(shows=["show"])
    now += DEBOUNCE_SECONDS
    assert waker.sweep_if_due() is None
    assert sweeps.asked[1:] == [({"show"}, {"h2", "h3"})]
    waker.note(["h4"])
    due = waker.sweep_if_due()
    assert due is not None
    now += due
    assert waker.sweep_if_due() is None
    assert sweeps.asked[2:] == [(frozenset(), {"h4"})]


def test_sweeps_for_new_work_that_take_hosts_along_do_not_put_off_the_next_for_hosts(monkeypatch):
    now = 100.0
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    # given a burst of new work, of which each sweep takes a freed host along
    for number in range(100):
        now += 2 * DEBOUNCE_SECONDS
        waker.note([str(number)], shows=["show"])
        assert waker.sweep_if_due() is None
    assert len(sweeps.asked) == 100
    # when a host comes free after it
    waker.note(["host"])
    # then it waits for one pause, as after any other sweep
    assert waker.sweep_if_due() == pytest.approx(COLLECT_SECONDS)


def test_a_host_freed_right_after_new_work_was_swept_for_does_not_wait(monkeypatch):
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: 100.0))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    waker.note(shows=["show"])
    waker.sweep_if_due()
    waker.note(["host"])
    assert waker.sweep_if_due() is None
    assert sweeps.asked == [({"show"}, frozenset()), (frozenset(), {"host"})]


def test_new_work_is_swept_for_at_once_and_a_burst_of_it_shares_the_next_sweep(monkeypatch):
    now = 100.0
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    waker.note(shows=["first"])
    assert waker.sweep_if_due() is None
    for show in range(1000):
        waker.note(shows=[str(show)])
        assert waker.sweep_if_due() == pytest.approx(DEBOUNCE_SECONDS)
    now += DEBOUNCE_SECONDS
    assert waker.sweep_if_due() is None
    assert [len(shows) for shows, _ in sweeps.asked] == [1, 1000]


def test_what_is_noted_during_a_pass_is_swept_for_when_it_ends(monkeypatch):
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: 100.0))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    # given two passes under way
    first, second = waker.hold(), waker.hold()
    waker.note(["host"], shows=["show"])
    assert waker.sweep_if_due() is None
    # when one ends, and says so twice, nothing is swept for; when both have, all of it is
    first()
    first()
    assert waker.sweep_if_due() is None
    assert sweeps.asked == []
    second()
    assert waker.sweep_if_due() is None
    assert sweeps.asked == [({"show"}, {"host"})]


def test_hosts_that_a_pass_took_in_are_not_swept_for(monkeypatch):
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: 100.0))
    sweeps = Sweeps([])
    waker = Waker(sweeps)
    release = waker.hold()
    waker.note(["before"], shows=["show"])
    waker.took_in_hosts()
    waker.note(["after"])
    release()
    assert waker.sweep_if_due() is None
    assert sweeps.asked == [({"show"}, {"after"})]


def test_hosts_held_back_are_swept_for_when_their_clusters_may_be_woken_and_no_later(monkeypatch):
    now = 100.0
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    sweeps = Sweeps([COLLECT_SECONDS / 2])
    waker = Waker(sweeps)
    # given a freed host whose clusters may be woken in half the time for which hosts are collected
    waker.note(["h1"])
    assert waker.sweep_if_due() == pytest.approx(COLLECT_SECONDS / 2)
    # when that is over, then it is swept for, with what came since
    waker.note(["h2"])
    assert waker.sweep_if_due() == pytest.approx(COLLECT_SECONDS / 2)
    now += COLLECT_SECONDS / 2
    assert waker.sweep_if_due() is None
    assert sweeps.asked == [(frozenset(), {"h1"}), (frozenset(), {"h1", "h2"})]
