"""Who leads, as ``opencue-sched fleet`` and ``inspect leader_status`` show it."""

from __future__ import annotations

import pytest
from redis import Redis
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from opencue_sched.beat import LeaderScheduler, make_gate
from opencue_sched.celery import app
from opencue_sched.coordination.names import LeaderKeys, beat_role
from opencue_sched.coordination.presence import call_roll
from opencue_sched.operate.fleet_view import fleet_view, leader_view
from opencue_sched.settings import Settings
from opencue_sched.store.fences import PersistentFences

FACILITIES = ("alpha", "beta", None)


@pytest.fixture
def scoped(monkeypatch: pytest.MonkeyPatch, settings: Settings, redis_client: Redis) -> dict[str | None, Settings]:
    """A beat that leads for each facility, and one for none, all in one Redis and each under its first fence."""
    found = {}
    for facility in FACILITIES:
        mine = settings.model_copy(
            update={
                "instance": f"beat-{facility}".lower(),
                "scheduler": settings.scheduler.model_copy(update={"facility": facility}),
            }
        )
        monkeypatch.setattr("opencue_sched.beat.get_settings", lambda mine=mine: mine)
        beat = LeaderScheduler(app=app, lazy=True)
        gate = make_gate(mine)
        assert gate.renew() is not None
        beat._show(gate)
        found[facility] = mine
    return found


@pytest.mark.parametrize("facility", FACILITIES)
def test_the_leader_shown_is_that_of_ones_own_facility(scoped, redis_client, facility):
    """Each role counts fences of its own, so leaders of two facilities often have the same."""
    keys = LeaderKeys("cue", beat_role(facility))
    view = leader_view(redis_client, keys, call_roll(redis_client, "cue"))
    assert (view["role"], view["fence"]) == (keys.role, 1)
    assert view["instance"] == f"beat-{facility}".lower()
    assert fleet_view(redis_client, scoped[facility])["leader"]["instance"] == view["instance"]


def test_without_a_lease_nobody_is_shown_as_leader(scoped, redis_client):
    redis_client.delete(LeaderKeys("cue", beat_role("beta")).lease)
    view = leader_view(redis_client, LeaderKeys("cue", beat_role("beta")), call_roll(redis_client, "cue"))
    assert (view["fence"], view["instance"]) == (None, None)


def test_the_age_of_the_last_tick_is_known_though_redis_was_emptied(redis_client: Redis, engine: Engine) -> None:
    keys, fences = LeaderKeys("cue", beat_role(None)), PersistentFences(engine)
    roll = call_roll(redis_client, "cue")
    assert leader_view(redis_client, keys, roll, fences)["tick_age_seconds"] is None, "none was fired yet"
    fences.claim(keys.name, 1)
    fences.claim_tick(keys.name, 1, "sweep-clusters@2", int(fences.time() - 60) // 2)
    assert 60 <= leader_view(redis_client, keys, roll, fences)["tick_age_seconds"] < 90
    redis_client.set(keys.fired_at, (int(redis_client.time()[0]) + 3600) * 1000)
    assert 60 <= leader_view(redis_client, keys, roll, fences)["tick_age_seconds"] < 90, "its clock was put back"
    redis_client.set(keys.fired_at, (int(redis_client.time()[0]) - 10) * 1000)
    assert 10 <= leader_view(redis_client, keys, roll, fences)["tick_age_seconds"] < 30


def test_without_postgresql_the_fleet_is_shown_all_the_same(redis_client: Redis, engine: Engine) -> None:
    class Away(PersistentFences):
        def time(self) -> float:
            raise OperationalError("SELECT", {}, Exception("connection refused"))

    keys = LeaderKeys("cue", beat_role(None))
    view = leader_view(redis_client, keys, call_roll(redis_client, "cue"), Away(engine))
    assert (view["fence"], view["tick_age_seconds"]) == (None, None)
