"""Workers and clusters steered by command while they work, and what the commands show of them."""

from __future__ import annotations

import json
import textwrap

from opencue_sched.coordination.keys import QueueName, priority_lists
from opencue_sched.coordination.presence import list_members
from tests.chaos.conftest import Site
from tests.chaos.planted_site import (
    add_job,
    booked,
    celery,
    cluster_key,
    has_posting,
    last_sweep,
    opencue_sched,
    plant,
    posting,
    steer,
)
from tests.kit.polling import eventually


def test_paused_workers_take_nothing_until_they_resume(site):
    plant(site, frames=2)
    site.fleet.worker("w1")
    said = steer(site, "pause", "--group", "default", "--json")
    assert json.loads(said.stdout) == {"w1@localhost": {"ok": "paused"}}
    eventually(lambda: list_members(site.client, "cue").of("dispatch")[0].state == "paused", 30)
    assert opencue_sched(site, "dispatch", "--cluster", cluster_key(site)).returncode == 0
    waiting = [name for queue in ("group", "type") for name in _lists(queue)]
    eventually(lambda: any(site.client.llen(name) for name in waiting), 10, "a waiting message")
    assert booked(site) == 0
    steer(site, "resume")
    eventually(lambda: booked(site) == 2, 30, "the work")


def _lists(queue: str) -> tuple[str, ...]:
    name = QueueName("cue", "dispatch", "default" if queue == "group" else None)
    return priority_lists(name)


def test_a_worker_that_drains_stays_up_until_it_is_stopped(site):
    site.fleet.worker("w1")
    steer(site, "drain", "--instance", "w1")
    eventually(lambda: list_members(site.client, "cue").of("dispatch")[0].state == "draining", 30, "draining")
    assert site.fleet.processes["w1"].running
    assert opencue_sched(site, "ctl", "stop", "--instance", "w1").returncode == 0
    assert site.fleet.processes["w1"].wait(100) == 0


def test_a_cluster_told_to_rest_is_left_alone_until_it_is_told_otherwise(site):
    plant(site, frames=1)
    site.fleet.worker("w1")
    site.fleet.beat()
    eventually(lambda: booked(site) == 1, 60, "first frame")
    key = cluster_key(site)
    steer(site, "sleep", "--cluster", key, "--for", "10m")
    fence = posting(site)["fence"]
    add_job(site, "more")
    sweeps = last_sweep(site, "beat")
    eventually(lambda: last_sweep(site, "beat") >= sweeps + 2, 30, "sweeps")
    assert posting(site)["fence"] == fence
    steer(site, "sleep", "--cluster", key, "--for", "0")
    eventually(lambda: booked(site) == 2, 30, "the frame that waited")
    assert opencue_sched(site, "ctl", "sleep", "--cluster", "nobody", "--for", "1m").returncode == 1


def test_run_and_wait_reports_the_pass(site):
    plant(site, frames=2)
    site.fleet.worker("w1")
    done = opencue_sched(site, "dispatch", "--cluster", cluster_key(site), "--wait", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["ended"], answer["booked"], answer["launched"]) == ("booked", 2, 2)
    assert opencue_sched(site, "dispatch", "--cluster", "nobody", "--wait").returncode == 1


def test_the_board_is_listed_trashed_and_restored_by_command(site):
    plant(site, frames=1)
    site.fleet.worker("w1")
    site.fleet.beat()
    eventually(lambda: booked(site) == 1, 60, "first frame")
    key = cluster_key(site)
    (row,) = json.loads(opencue_sched(site, "board", "list", "--json").stdout)
    assert (row["cluster"], row["tags"]) == (key, "general")
    eventually(lambda: opencue_sched(site, "board", "trash", key, "--reason", "odd").returncode == 0, 30)
    assert "odd" in opencue_sched(site, "board", "show", key).stdout
    add_job(site, "more")
    (row,) = json.loads(opencue_sched(site, "board", "list", "--state", "trash", "--json").stdout)
    assert row["cluster"] == key
    assert booked(site) == 1
    assert opencue_sched(site, "board", "restore", key).returncode == 0
    eventually(lambda: booked(site) == 2, 30, "the frame that waited")


POISON = """
    import celery
    import redis
    from sqlalchemy import Engine, event
    from opencue_sched.settings import get_settings

    client = redis.Redis.from_url(get_settings().redis_dsn)
    DISPATCH, CLAIMED = "opencue_sched.dispatch.dispatch_cluster", "cue:board:clusters:claimed"

    @event.listens_for(Engine, "before_cursor_execute")
    def poison(connection, cursor, statement, parameters, context, executemany):
        in_a_pass = celery.current_task and celery.current_task.name == DISPATCH and client.exists(CLAIMED)
        if in_a_pass and client.exists("poison"):
            raise RuntimeError("a row nobody foresaw")
"""


def test_a_poison_cluster_is_cooled_down_with_its_traceback_and_comes_back_by_itself(site):
    """Its passes fail in a real worker, again and again."""
    plant(site, frames=1)
    (site.fleet.directory / "poison.py").write_text(textwrap.dedent(POISON), encoding="utf-8")
    path = f"{site.fleet.directory}:{site.fleet.environment.get('PYTHONPATH', '')}"
    site.client.set("poison", "1")
    worker = site.fleet.worker("w1", "--include=poison", PYTHONPATH=path)
    site.fleet.beat()
    eventually(lambda: has_posting(site) and posting(site)["failures"] == "2", 60, "two failures")
    key = cluster_key(site)
    (row,) = json.loads(opencue_sched(site, "board", "list", "--state", "delayed", "--json").stdout)
    assert row["cluster"] == key
    shown = opencue_sched(site, "board", "show", key).stdout
    assert "Traceback (most recent call last)" in shown
    assert "RuntimeError: a row nobody foresaw" in shown
    site.client.delete("poison")
    eventually(lambda: booked(site) == 1, 30, "the frame that waited")
    assert worker.running


def test_the_fleet_is_shown_with_its_leader_and_queues(site):
    site.fleet.worker("w1")
    site.fleet.worker("w2")
    site.fleet.beat(OPENCUE_SCHED_INSTANCE="b1")
    view = eventually(lambda: _view_with_leader(site), 60, "a leader")
    assert [worker["instance"] for worker in view["workers"]] == ["w1", "w2"]
    assert view["workers"][0]["types"] == ["accounting", "dispatch", "maintenance", "sweep"]
    assert view["leader"]["fence"] >= 1
    assert set(view["queues"]) == {"accounting", "dispatch", "maintenance", "sweep"}
    shown = opencue_sched(site, "fleet").stdout
    assert f"leader: {view['leader']['instance']}, fence" in shown
    assert "w2" in shown
    patient = ("--timeout", "60", "--destination", "w1@localhost")
    assert f'"instance": "{view["leader"]["instance"]}"' in celery(site, "inspect", *patient, "leader_status", "--json")


def _view_with_leader(site: Site):
    view = json.loads(opencue_sched(site, "fleet", "--json").stdout)
    leader = view["leader"]
    return view if str(leader["instance"]).startswith("b1-") and leader["tick_age_seconds"] is not None else None
