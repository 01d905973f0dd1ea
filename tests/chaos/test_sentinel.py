"""A fleet whose one Redis URL names Sentinels: counters, board, leader and broker all follow a failover."""

from __future__ import annotations

import json

import pytest
import redis
from redis.exceptions import RedisError
from sqlalchemy import text

from opencue_sched.accounting.connection import make_redis
from opencue_sched.accounting.keys import EPOCH
from opencue_sched.accounting.store_epoch import Epoch
from opencue_sched.coordination.names import LeaderKeys
from opencue_sched.coordination.presence import call_roll
from opencue_sched.embedded.fleet import Fleet
from opencue_sched.operate.audit import run_audit
from opencue_sched.settings import Settings
from tests.chaos.conftest import QUICK, Site
from tests.chaos.test_coordination_workers import add_job, booked, opencue_sched, plant
from tests.polling import eventually
from tests.sentinel import watched_pair

KEYS = LeaderKeys("cue", "beat")


def run_id(client: redis.Redis) -> str:
    """Which server answers; empty while none does."""
    try:
        return str(client.info("server")["run_id"])
    except RedisError:
        return ""


def fence(client: redis.Redis) -> int:
    """The fence of the beat that leads now; 0 while none does."""
    try:
        return int((client.get(KEYS.lease) or "|0").rpartition("|")[2])
    except RedisError:
        return 0


@pytest.fixture
def sentinel_site(database_url, engine, tmp_path, monkeypatch):
    """An empty fleet behind a Sentinel. ``server`` is the first master."""
    with watched_pair(tmp_path) as pair:
        urls = {"OPENCUE_SCHED_DATABASE_URL": database_url, "OPENCUE_SCHED_REDIS_URL": pair.url}
        ages = {"OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "1s", "OPENCUE_SCHED_ACCOUNTING__IN_FLIGHT_AGE": "3s"}
        environment = {**urls, **QUICK, **ages}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        client = make_redis(pair.url, Settings())
        eventually(lambda: run_id(client), what="a master that the Sentinel names")
        client.set(EPOCH, Epoch.new(run_id(client)).text)
        with Fleet(environment, tmp_path) as fleet:
            yield Site(fleet, Settings(), engine, client, pair.first)
        client.close()


def test_a_fleet_follows_the_master_that_its_sentinel_names(sentinel_site):
    site = sentinel_site
    plant(site, frames=1)
    site.fleet.worker("w1")
    site.fleet.beat()
    eventually(lambda: booked(site) == 1, 60, "the first frame")
    before, led = run_id(site.client), fence(site.client)
    assert led > 0
    site.client.wait(1, 5000)
    site.server.kill()
    eventually(lambda: run_id(site.client) not in ("", before), 60, "the failover")
    add_job(site, "more", frames=3)
    eventually(lambda: booked(site) == 4, 60, "frames booked on the other master")
    eventually(lambda: fence(site.client) > 0, 30, "a leader there")
    assert fence(site.client) >= led
    assert site.fleet.ended() == []
    assert "bootstrapped" in site.fleet.log("w1").read_text()
    eventually(lambda: call_roll(site.client, "cue").of("dispatch"), 30, "presence")
    view = json.loads(opencue_sched(site, "fleet", "--json").stdout)
    assert [worker["instance"] for worker in view["workers"]] == ["w1"]
    eventually(lambda: not run_audit(site.engine, site.client, site.settings).failed, 60, "a clean audit")
    with site.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM proc")).scalar() == 4
