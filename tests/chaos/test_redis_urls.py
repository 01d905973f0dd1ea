"""A fleet whose Redis URL is not a plain one: counters, board, leader and broker follow a failover of Sentinels, and
all of them speak TLS.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import redis
from redis.exceptions import RedisError
from sqlalchemy import text

from benchmarks.warm_start import WarmFleet
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.coordination.presence import list_members
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Settings
from opencue_sched.store.fences import PersistentFences
from tests.chaos.conftest import QUICK, Site
from tests.chaos.planted_site import add_job, booked, opencue_sched, plant, steer
from tests.kit.brief_fleet import brief_fleet, open_counters
from tests.kit.polling import eventually
from tests.kit.sentinel import watched_pair
from tests.kit.tls import tls_front

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


@contextmanager
def empty_fleet(url, server, database_url, engine, directory, monkeypatch):
    urls = {"OPENCUE_SCHED_DATABASE_URL": database_url, "OPENCUE_SCHED_REDIS_URL": url}
    ages = {"OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "1s"}
    environment = {**urls, **QUICK, **ages}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = guarded_redis(url, Settings())
    eventually(lambda: run_id(client), what="a Redis that answers")
    open_counters(client)
    with brief_fleet(environment, directory, fleet_type=WarmFleet) as fleet:
        yield Site(fleet, Settings(), engine, client, server)
    client.close()


@pytest.fixture
def sentinel_site(database_url, engine, tmp_path, monkeypatch):
    """An empty fleet behind a Sentinel. ``server`` is the first master."""
    with (
        watched_pair(tmp_path) as pair,
        empty_fleet(pair.url, pair.first, database_url, engine, tmp_path, monkeypatch) as site,
    ):
        yield site


@pytest.fixture
def tls_site(database_url, engine, tmp_path, monkeypatch):
    """An empty fleet whose Redis is reached by TLS, under an authority that only the URL names."""
    with (
        EmbeddedRedis() as server,
        tls_front(server, tmp_path) as front,
        empty_fleet(front.trusting_url, server, database_url, engine, tmp_path, monkeypatch) as site,
    ):
        yield site


def test_a_fleet_follows_the_master_that_its_sentinel_names(sentinel_site):
    """Booking, leading, presence and the audit go on, and the fence does not go back: it is that in PostgreSQL, and no
    lower than before. The replica has caught up when its master dies; what one that lags forgets is in
    test_leader_lost_memory.py.
    """
    site = sentinel_site
    plant(site, frames=1)
    site.fleet.worker("w1")
    site.fleet.beat()
    eventually(lambda: booked(site) == 1, 60, "the first frame")
    led = eventually(lambda: fence(site.client), 30, "a leader")
    before = run_id(site.client)
    site.client.wait(1, 5000)
    site.server.kill()
    eventually(lambda: run_id(site.client) not in ("", before), 60, "the failover")
    add_job(site, "more", frames=3)
    eventually(lambda: booked(site) == 4, 60, "frames booked on the other master")
    recorded = PersistentFences(site.engine)
    eventually(lambda: fence(site.client) == recorded.leader(KEYS.name).fence >= led, 30, "a leader there")
    assert site.fleet.ended() == []
    assert "bootstrapped" in site.fleet.log("w1").read_text()
    eventually(lambda: list_members(site.client, "cue").of("dispatch"), 30, "presence")
    view = json.loads(opencue_sched(site, "fleet", "--json").stdout)
    assert [worker["instance"] for worker in view["workers"]] == ["w1"]
    eventually(lambda: not run_audit(site.engine, site.client, site.settings).failed, 60, "a clean audit")
    with site.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM proc")).scalar() == 4


def test_a_fleet_whose_redis_speaks_tls_books_is_steered_and_is_shown_in_flower(tls_site):
    site = tls_site
    plant(site, frames=1)
    site.fleet.worker("w1")
    site.fleet.beat()
    eventually(lambda: booked(site) == 1, 60, "the frame")
    said = steer(site, "pause", "--json")
    assert json.loads(said.stdout) == {"w1@localhost": {"ok": "paused"}}
    port = free_port()
    site.fleet.flower(port)

    def page(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            return str(error)

    eventually(lambda: "w1@localhost" in page("/workers?refresh=1"), 60, "the worker in Flower")
    queue = "<td>cue:q:work:type:sweep:group:default</td>"  # who is paused takes nothing from those of dispatch
    eventually(lambda: queue in page("/broker"), 60, "its queue, of which Flower asks Redis itself")
    assert site.fleet.ended() == []
