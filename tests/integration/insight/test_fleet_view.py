"""Who leads, as ``opencue-sched fleet`` and ``inspect leader_status`` show it."""

from __future__ import annotations

import re

import pytest
from redis import Redis
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from opencue_sched.beat import LeaderScheduler, make_gate
from opencue_sched.celery import app
from opencue_sched.coordination.keys import beat_keys
from opencue_sched.coordination.presence import WorkerState, list_members
from opencue_sched.insight.fleet import fleet_view, leader_view
from opencue_sched.settings import Settings
from opencue_sched.store.fences import LeaderRecord, PersistentFences
from opencue_sched.worker.membership import Membership
from tests.kit.environment import stores_of
from tests.kit.frozen_clock import Clock

QUEUES = ("cue:q:work:type:dispatch", "cue:q:work:type:sweep")
FACILITIES = ("alpha", "beta", None)


@pytest.fixture
def scoped(settings: Settings, redis_client: Redis) -> dict[str | None, Settings]:
    """A beat that leads for each facility, and one for none, all in one Redis and each under its first fence."""
    found = {}
    for facility in FACILITIES:
        mine = settings.model_copy(
            update={
                "instance": f"beat-{facility}".lower(),
                "scheduler": settings.scheduler.model_copy(update={"facility": facility}),
            }
        )
        beat = LeaderScheduler(app=app, lazy=True)
        beat.gate = make_gate(mine)
        with stores_of(mine, **({"SCHEDULER__FACILITY": facility} if facility else {})):
            beat.tick()
        assert beat.gate.fence is not None
        found[facility] = mine
    return found


@pytest.mark.parametrize("facility", FACILITIES)
def test_the_leader_shown_is_that_of_ones_own_facility(scoped, redis_client, facility):
    """Each role counts fences of its own, so leaders of two facilities often have the same."""
    keys = beat_keys("cue", facility)
    view = leader_view(redis_client, keys, list_members(redis_client, "cue"))
    assert (view["role"], view["fence"]) == (keys.role, 1)
    assert re.fullmatch(f"beat-{facility}-[0-9a-f]{{8}}".lower(), view["instance"])
    assert fleet_view(redis_client, scoped[facility])["leader"]["instance"] == view["instance"]


def test_a_worker_says_what_it_takes_and_what_it_has_in_hand(settings: Settings, redis_client: Redis) -> None:
    membership = Membership(redis_client, settings, lambda: {"tags-1", "alloc-1"})
    membership.join("w1@here", queues=lambda: QUEUES, capacity=4)
    membership.workload.become(WorkerState.PAUSED)
    with membership.workload.task():
        membership.heartbeat()
    (worker,) = fleet_view(redis_client, settings)["workers"]
    assert (worker["node"], worker["types"], worker["state"]) == ("w1@here", ["dispatch", "sweep"], "paused")
    assert (worker["in_flight"], worker["capacity"], worker["work"]) == (1, 4, ["alloc-1", "tags-1"])
    assert {actor.capabilities for actor in list_members(redis_client, "cue").alive} == {QUEUES}


def test_a_beat_is_shown_as_leader_as_soon_and_as_long_as_it_leads(settings: Settings, redis_client: Redis) -> None:
    keys, beat, clock = beat_keys("cue", None), LeaderScheduler(app=app, lazy=True), Clock()
    other, beat.gate = make_gate(settings), make_gate(settings, clock=clock)
    longer = settings.coordination.lease_ttl

    def fence_shown() -> int:
        clock.advance(longer)
        beat.tick()
        (actor,) = list_members(redis_client, "cue").of("beat")
        return actor.fence

    with stores_of(settings):
        # while another leads
        assert other.renew() == 1
        assert fence_shown() == 0
        # once it has resigned
        other.resign()
        assert fence_shown() == 2
        view = leader_view(redis_client, keys, list_members(redis_client, "cue"))
        assert (view["fence"], view["instance"]) == (2, f"{settings.instance}-{beat.gate.token[:8]}")
        # and when another leads again
        redis_client.delete(keys.lease)
        third = make_gate(settings)
        assert third.renew() == 3
        assert fence_shown() == 0


def test_without_a_lease_nobody_is_shown_as_leader(scoped, redis_client):
    redis_client.delete(beat_keys("cue", "beta").lease)
    view = leader_view(redis_client, beat_keys("cue", "beta"), list_members(redis_client, "cue"))
    assert (view["fence"], view["instance"]) == (None, None)


def test_the_age_of_the_last_tick_is_shown(redis_client: Redis, engine: Engine) -> None:
    keys, members, fences = (
        beat_keys("cue", None),
        list_members(redis_client, "cue"),
        PersistentFences(engine),
    )
    assert leader_view(redis_client, keys, members, fences)["tick_age_seconds"] is None, "none was fired yet"
    assert fences.claim(keys.name, 1)
    assert fences.claim_tick(keys.name, 1, "recompute", 7)[0]
    assert 0 <= leader_view(redis_client, keys, members, fences)["tick_age_seconds"] < 30


class Away(PersistentFences):
    """The record of leaders while PostgreSQL does not answer."""

    def leader(self, name: str) -> LeaderRecord:
        raise OperationalError("SELECT", {}, Exception("connection refused"))


class NoTicks(PersistentFences):
    """The record of leaders before the first tick was fired."""

    def leader(self, name: str) -> LeaderRecord:
        return LeaderRecord(fence=1)


def test_without_postgresql_the_fleet_is_shown_all_the_same(redis_client: Redis, engine: Engine) -> None:
    keys = beat_keys("cue", None)
    view = leader_view(redis_client, keys, list_members(redis_client, "cue"), Away(engine))
    assert (view["fence"], view["tick_age_seconds"]) == (None, None)


def test_a_record_that_was_not_read_is_not_shown_as_one_without_ticks(scoped, redis_client, engine):
    keys, members = beat_keys("cue", "beta"), list_members(redis_client, "cue")
    unknown = [leader_view(redis_client, keys, members, fences) for fences in (Away(engine), None)]
    assert [view["fence"] for view in unknown] == [1, 1]
    assert [view["words"].endswith(", last tick unknown") for view in unknown] == [True, True]
    # where the record was read, and has none
    assert leader_view(redis_client, keys, members, NoTicks(engine))["words"].endswith(", no tick fired yet")
