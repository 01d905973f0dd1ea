"""How long each failure takes to be put right: of the accounting, of processes. Settings as shipped, one at a time.

Two parts make up a recovery: what a setting fixes (how often beat recomputes, how old a booking must be) and what the
machine needs then. ``at_most`` is the first, ``measured`` the second; ``whole`` was waited for in a fleet of a beat and
two workers in dry run, and begins at the worst moment, right after a recompute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from sqlalchemy import text

from benchmarks.pass_faults import Inject, a_crashed_booking, faults_of_others, faults_of_the_ledger
from benchmarks.recovery_site import BURST, WAIT_SECONDS, Recovery, Site, attempt, recovery_of, site_at_work, until
from benchmarks.takeover import fillers_killed, takeover
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import StoreState, store_state
from opencue_sched.accounting.recompute import recompute
from opencue_sched.accounting.show_handover import CUEBOT_CACHE_SECONDS, ImportedShows, hand_back, hand_over

_STREAM_FRAMES = 600
_STREAM_SECONDS = 3.0


def run_recovery(parts: tuple[str, ...], *, rounds: int, console: Console) -> list[Recovery]:
    """The parts asked for, one after the other on one site."""
    results: list[Recovery] = []
    with site_at_work(console) as site:
        for part in parts:
            console.print(f"recovery: {part}")
            results += PARTS[part](site, rounds)
    return results


def events(site: Site, rounds: int) -> Iterator[Recovery]:
    """What is announced, and what a commit finds out."""

    def announced_release() -> float:
        began = time.monotonic()
        proc_id = site.delete(announced=True)
        until(lambda: not site.has_entry(proc_id))
        return time.monotonic() - began

    def cap(cores: int, *, quietly: bool = False) -> None:
        with site.engine.begin() as connection:
            if quietly:
                connection.execute(text("SET LOCAL opencue_sched.quiet_caps = 'on'"))
            connection.execute(text("UPDATE subscription SET int_burst = :burst"), {"burst": cores * 100})

    def lowered() -> float:
        began = time.monotonic()
        cap(10)
        until(lambda: site.client.hget(site.sub_key, "burst") == "10")
        seconds = time.monotonic() - began
        cap(BURST)
        return seconds

    def lowered_quietly() -> float:
        """In the middle of a job's bookings: how long after the edit's commit one is still committed."""
        job = site.new_job(_STREAM_FRAMES)
        until(lambda: site.count(job) > _STREAM_FRAMES // 5)
        cap(10, quietly=True)
        began = last = time.monotonic()
        seen = site.count(job)
        while time.monotonic() < began + _STREAM_SECONDS:
            if (now := site.count(job)) != seen:
                seen, last = now, time.monotonic()
        assert seen < _STREAM_FRAMES, "the job was over before the cap was lowered"
        cap(BURST)
        until(lambda: site.count(job) == _STREAM_FRAMES)
        return last - began

    many = max(20, rounds)
    yield recovery_of("a release, announced", "-", 0, [announced_release() for _ in range(many)])
    yield recovery_of("a cap lowered, announced", "-", 0, [lowered() for _ in range(many)])
    yield recovery_of("a cap lowered without a word", "-", 0, [lowered_quietly() for _ in range(rounds)])
    for managed, fixed_by, at_most in (
        (False, "accounting.commit_deadline", site.settings.accounting.commit_deadline),
        (True, "30 s, with Cuebots", CUEBOT_CACHE_SECONDS),
    ):
        own, whole = [], []
        for number in range(rounds):
            seconds = _flip(site, managed=managed, wait=0.0)
            own.append(seconds)
            if number < rounds - 1:
                _flip(site, managed=not managed, wait=0.0)
        _flip(site, managed=not managed, wait=0.0)
        whole.append(_flip(site, managed=managed, wait=at_most))
        yield recovery_of(f"a show flipped {'on' if managed else 'off'}", fixed_by, at_most, own, whole)
    own = [_flag_only(site, cuebots=False) for _ in range(rounds)]
    whole = [_flag_only(site, cuebots=True)]
    yield recovery_of("... by its flag and nothing else", "30 s, with Cuebots", CUEBOT_CACHE_SECONDS, own, whole)
    site.books_again()


def _flip(site: Site, *, managed: bool, wait: float) -> float:
    began = time.monotonic()
    age = site.settings.accounting.in_flight_age
    move = hand_over if managed else hand_back
    assert move(site.engine, site.ledger, site.show.id, wait_seconds=wait, age_seconds=age).changed
    return time.monotonic() - began


def _flag_only(site: Site, *, cuebots: bool) -> float:
    """A Cuebot hands the show over; until frames of it may be booked, what runs is counted."""
    age = site.settings.accounting.in_flight_age
    site.sql("UPDATE show SET b_booking_enabled = false, b_scheduler_managed = false")
    recompute(site.engine, site.ledger, age_seconds=age)
    assert site.cores() == 0
    site.sql("UPDATE show SET b_scheduler_managed = true")
    quarantine = CUEBOT_CACHE_SECONDS if cuebots else 0.0
    shows = ImportedShows(site.engine, site.ledger, quarantine_seconds=quarantine, age_seconds=age)
    began = time.monotonic()
    if not shows.admits(site.show.id):
        time.sleep(CUEBOT_CACHE_SECONDS)
        until(lambda: shows.admits(site.show.id))
    seconds = time.monotonic() - began
    assert site.cores() == len(site.procs)
    site.sql("UPDATE show SET b_booking_enabled = true")
    return seconds


def passes(site: Site, rounds: int) -> Iterator[Recovery]:
    """What the recompute finds: the pass itself, and how long until beat's own pass has done it."""
    accounting = site.settings.accounting
    every, age = accounting.recompute_interval_seconds, accounting.in_flight_age
    faults = {**faults_of_the_ledger(site), **faults_of_others(site)}
    own: dict[str, list[float]] = {name: [] for name in faults}
    for name, inject in faults.items():
        for _ in range(rounds):
            right = inject()
            began = time.monotonic()
            recompute(site.engine, site.ledger, age_seconds=age)
            assert right(), name
            own[name].append(time.monotonic() - began)

    # First, because what it would have booked is made from an entry that is right.
    died = "a worker that died before its commit"
    whole = _by_beat(site, {died: a_crashed_booking(site), **faults})
    for name in faults:
        yield recovery_of(name, "recompute_interval_seconds", every, own[name], [whole[name]])
    yield recovery_of(died, "2 x the interval, and in_flight_age", 2 * every, [], [whole[died]])


def _by_beat(site: Site, injections: Mapping[str, Inject]) -> dict[str, float]:
    """All faults at once, right after a pass of the fleet's own; how long each stayed."""
    last = site.client.get(keys.RECOMPUTED_AT)
    until(lambda: site.client.get(keys.RECOMPUTED_AT) != last)
    began, waiting = {}, {}
    for name, inject in injections.items():
        waiting[name], began[name] = inject(), time.monotonic()
    seconds = {}
    while waiting:
        for name in [name for name, right in waiting.items() if right()]:
            seconds[name] = time.monotonic() - began[name]
            del waiting[name]
        assert time.monotonic() < min(began.values()) + WAIT_SECONDS, f"not put right: {sorted(waiting)}"
        time.sleep(0.02)
    return seconds


def stores(site: Site, rounds: int) -> Iterator[Recovery]:
    """Redis and PostgreSQL go away and come back."""
    age = site.settings.accounting.in_flight_age
    for name, keeping in (("Redis restarted, empty", False), ("Redis restarted with old data", True)):
        own, whole = [], []
        for _ in range(rounds):
            if keeping:
                site.client.save()
                site.client.hincrby(site.job_key, "int_cores", 3)
            began = time.monotonic()
            site.cache.restart()
            until(lambda: attempt(lambda: store_state(site.client) is StoreState.OPEN))
            opened = time.monotonic() - began
            assert site.cores() == len(site.procs), "filled with what proc says"
            site.books_again()
            own.append(opened - age)
            whole.append(time.monotonic() - began)
        yield recovery_of(name, "in_flight_age", age, own, whole)
    yield fillers_killed(site, rounds)
    for mode in ("fast", "immediate"):
        whole = []
        for _ in range(rounds):
            began = time.monotonic()
            site.postgres.restart(mode)
            down = time.monotonic() - began
            site.books_again()
            whole.append(time.monotonic() - began - down)
        yield recovery_of(f"PostgreSQL restarted ({mode}), from its return", "-", 0, whole)


PARTS: dict[str, Callable[[Site, int], Iterator[Recovery]]] = {
    "events": events,
    "passes": passes,
    "stores": stores,
    "takeover": takeover,
}
