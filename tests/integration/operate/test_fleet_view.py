"""Who leads, as ``opencue-sched fleet`` and ``inspect leader_status`` show it."""

from __future__ import annotations

import pytest
from redis import Redis

from opencue_sched.beat import LeaderScheduler, make_gate
from opencue_sched.celery import app
from opencue_sched.coordination.names import LeaderKeys, beat_role
from opencue_sched.coordination.presence import call_roll
from opencue_sched.operate.fleet_view import fleet_view, leader_view
from opencue_sched.settings import Settings

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
