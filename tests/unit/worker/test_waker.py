"""Every freed host is swept for, also the one that comes a moment after another."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from opencue_sched.worker.events import COLLECT_SECONDS, Waker
from tests.polling import eventually


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
        waker.hosts(["host"])

        # then it is asked for until no cluster is held back, and no longer
        eventually(lambda: len(sweeps.asked) == 3)
        assert {hosts for _, hosts in sweeps.asked} == {frozenset({"host"})}
        waker.shows(["show"])
        eventually(lambda: len(sweeps.asked) == 4)
        assert sweeps.asked[-1] == (frozenset({"show"}), frozenset())
    finally:
        waker.stop()


@pytest.mark.parametrize("error", [RedisConnectionError("away"), ResponseError("WRONGTYPE")])
def test_what_a_store_in_trouble_kept_from_being_swept_for_is_swept_for_later(error: Exception):
    """Else what rests goes on resting: a plain sweep does not rouse it. What fails again is not tried for ever."""
    asked: list[tuple[frozenset[str], frozenset[str]]] = []

    def sweep(shows: frozenset[str], hosts: frozenset[str]) -> float:
        asked.append((shows, hosts))
        if len(asked) == 1:
            raise error
        return 0.0

    waker = Waker(sweep)
    lost = (frozenset({"show"}), frozenset({"host"}))
    waker.shows(["show"])
    waker.hosts(["host"])
    with capture_logs() as said:
        waker.start()
        try:
            eventually(lambda: said and said[0]["event"] == "wake_up_left_for_later")
            waker.shows(["next"])
            eventually(lambda: "next" in asked[-1][0])
        finally:
            waker.stop()
    kept = isinstance(error, RedisConnectionError)
    assert asked[0] == lost
    assert frozenset().union(*(shows for shows, _ in asked[1:])) == ({"show", "next"} if kept else {"next"})
    assert frozenset().union(*(hosts for _, hosts in asked[1:])) == ({"host"} if kept else set())


def test_the_first_freed_host_is_swept_for_at_once_and_those_that_follow_share_a_sweep():
    now = 100.0
    sweeps = Sweeps([])
    waker = Waker(sweeps, clock=lambda: now)
    waker.hosts(["h1"])
    assert waker._wake() is None
    for host in ("h2", "h3"):
        waker.hosts([host])
        assert waker._wake() == pytest.approx(COLLECT_SECONDS)
    assert [hosts for _, hosts in sweeps.asked] == [{"h1"}]
    # new work waits for nothing, and takes them along
    waker.shows(["show"])
    waker._wake()
    assert sweeps.asked[1:] == [({"show"}, {"h2", "h3"})]
    waker.hosts(["h4"])
    waker._wake()
    now += COLLECT_SECONDS
    assert waker._wake() is None
    assert sweeps.asked[2:] == [(frozenset(), {"h4"})]
