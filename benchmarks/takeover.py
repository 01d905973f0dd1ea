"""How long others need to take over from a process that was killed: workers, leading beats. Settings as shipped.

A worker is killed in mid-pass: it has the claim of its cluster, has booked in Redis, and waits in its commit, because
the benchmark holds the host table until it is dead. The end is the next committed booking of that cluster.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from benchmarks.recovery_site import Recovery, Site, attempt, recovery_of, start_beat, until
from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import LEASE_SECONDS, StoreState, store_state
from opencue_sched.coordination.keys import LeaderKeys, beat_keys, cluster_board
from opencue_sched.coordination.postings import CLAIM_SECONDS
from opencue_sched.coordination.presence import list_members
from opencue_sched.insight.fleet import leader_view

_WAITS = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'host'::regclass"


@dataclass(frozen=True)
class TakeOver:
    """Seconds from the kill to the next booking, and how many of them the dead worker's claim still lived."""

    whole: float
    claim: float


def takeover(site: Site, rounds: int) -> Iterator[Recovery]:
    """To the next booking of the cluster, and to the lease of the next leader."""
    coordination = site.settings.coordination
    life, lease, retry = CLAIM_SECONDS, coordination.lease_ttl, coordination.retry_interval
    for name, with_beat in (("a worker killed in mid-pass", False), ("the same, with the only beat", True)):
        kills = [kill_a_worker(site, with_beat=with_beat) for _ in range(max(5, rounds))]
        own = [kill.whole - kill.claim for kill in kills]
        yield recovery_of(name, "CLAIM_SECONDS", life, own, [kill.whole for kill in kills])
    killed = [end_the_leader(site, kindly=False) for _ in range(rounds)]
    yield recovery_of("the leading beat killed", "lease_ttl, retry_interval", lease + retry, [], killed)
    stopped = [end_the_leader(site, kindly=True) for _ in range(rounds)]
    yield recovery_of("the leading beat stopped", "retry_interval", retry, [], stopped)


def fillers_killed(site: Site, rounds: int) -> Recovery:
    """Another worker goes on, and waits for an age of its own."""
    at_most = 1.5 * site.settings.accounting.in_flight_age + LEASE_SECONDS
    whole = [kill_the_filler(site) for _ in range(rounds)]
    own = [seconds - at_most for seconds in whole]
    return recovery_of("the same, its filler killed halfway", "1.5 in_flight_age, its lease", at_most, own, whole)


def kill_the_filler(site: Site) -> float:
    """Redis is restarted, empty, and who fills it is killed halfway through its wait; seconds until somebody books."""
    age = site.settings.accounting.in_flight_age
    began = time.monotonic()
    site.cache.restart()
    until(lambda: attempt(lambda: site.client.exists(keys.BOOTSTRAP_LEASE)))
    time.sleep(age / 2)
    filler = str(site.client.get(keys.BOOTSTRAP_LEASE)).partition("|")[0]
    site.fleet.processes.pop(filler).kill()
    until(lambda: store_state(site.client) is StoreState.OPEN)
    site.books_again()
    whole = time.monotonic() - began
    site.fleet.worker(filler)
    return whole


def kill_a_worker(site: Site, *, with_beat: bool) -> TakeOver:
    """Kill one in mid-pass, and every beat in the same moment if told to; all are started again afterwards."""
    beats = _beats(site) if with_beat else []
    with _commits_held_up(site):
        job = site.new_job()
        claim = until(lambda: _claim_of_a_pass_that_waits(site))
        began = time.monotonic()
        for name in (claim["owner"], *beats):
            site.fleet.processes.pop(name).kill()
        lives = (int(claim["expires"]) - _redis_ms(site)) / 1000 + time.monotonic() - began
    until(lambda: site.count(job))
    whole = time.monotonic() - began
    site.fleet.worker(claim["owner"])
    for name in beats:
        start_beat(site.fleet, name)
    until(lambda: _leader(site))
    return TakeOver(whole, lives)


def end_the_leader(site: Site, *, kindly: bool) -> float:
    """Kill or stop the beat that leads while another stands by; seconds until that one has the lease."""
    for number in (1, 2):
        if f"beat{number}" not in site.fleet.processes:
            start_beat(site.fleet, f"beat{number}")
    until(lambda: {name.rpartition("-")[0] for name in _present(site)} >= set(_beats(site)) and _leader(site))
    process = site.fleet.processes.pop(str(_leader(site)))
    fence = _fence(site)
    began = time.monotonic()
    if kindly:
        process.send_signal(signal.SIGTERM)
    else:
        process.kill()
    until(lambda: _fence(site) > fence)
    seconds = time.monotonic() - began
    process.stop()
    return seconds


def _beats(site: Site) -> list[str]:
    return [name for name in site.fleet.processes if name.startswith("beat")]


@contextmanager
def _commits_held_up(site: Site) -> Iterator[None]:
    with site.engine.connect() as connection:
        connection.execute(text("LOCK TABLE host IN EXCLUSIVE MODE"))
        yield
        connection.rollback()


def _claim_of_a_pass_that_waits(site: Site) -> dict[str, str] | None:
    if not site.scalar(_WAITS):
        return None
    keys = cluster_board(site.settings.coordination.namespace, site.settings.scheduler.facility)
    uuids = site.client.zrange(keys.of("claimed"), 0, 0)
    return _fields(site.client.hgetall(keys.job(str(uuids[0])))) if uuids else None


def _fields(read: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in read.items()}


def _redis_ms(site: Site) -> int:
    seconds, micros = site.client.time()
    return 1000 * int(seconds) + int(micros) // 1000


def _keys(site: Site) -> LeaderKeys:
    return beat_keys(site.settings.coordination.namespace, site.settings.scheduler.facility)


def _leader(site: Site) -> str | None:
    """The instance of the beat that leads, as the fleet is shown."""
    members = list_members(site.client, site.settings.coordination.namespace)
    instance: str | None = leader_view(site.client, _keys(site), members)["instance"]
    return instance and instance.rpartition("-")[0]  # without the part of its token


def _fence(site: Site) -> int:
    return int(site.client.get(_keys(site).fence) or 0)


def _present(site: Site) -> set[str]:
    return {actor.instance for actor in list_members(site.client, site.settings.coordination.namespace).alive}
