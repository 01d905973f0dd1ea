"""Every freed host is swept for, also the one that comes a moment after another."""

from __future__ import annotations

from opencue_sched.operate.waker import Waker
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
