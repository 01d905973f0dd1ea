"""Waiting frames are shown for the whole fleet, each once, by its verdict."""

from __future__ import annotations

import json
import time

from sqlalchemy import Engine, text

from opencue_sched.coordination import keys as coordination_keys
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.worker import fleet_metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.integration.worker.metered import hold_a_host, run_passes, sample
from tests.kit.statements import failing_statements
from tests.kit.tasks import run_task


def test_waiting_frames_are_the_fleets_and_forget_what_is_gone(
    process: Process, census: FleetCensus, engine: Engine, redis_client
):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, hostname_tag=False)
        farm.job([LayerSpec(frames=4, cores=16)])
        farm.job([LayerSpec(frames=5)], priority=200)
    run_passes(process)
    census.look_at_farm()
    assert sample("scheduler_waiting_frames", verdict="no_fit") == 4
    assert sample("scheduler_waiting_frames", verdict="capacity") == 3
    # when a pass leaves out the layer that found no host a moment ago, its frames wait all the same
    run_passes(process)
    census.look_at_farm()
    assert sample("scheduler_waiting_frames", verdict="no_fit") == 4
    # when passes said that long ago, nobody has looked at them
    for job in redis_client.scan_iter(coordination_keys.verdicts("cue", "*")):
        for field, entry in redis_client.hgetall(job).items():
            redis_client.hset(job, field, json.dumps([*json.loads(entry)[:-1], time.time() - 1000]))
    census.look_at_farm()
    assert sample("scheduler_waiting_frames", verdict="behind") == 7
    # when they cannot be booked any more, they are forgotten
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = true"))
    census.look_at_farm()
    assert shown_waiting(census) == (0, 0)
    assert redis_client.hkeys(coordination_keys.waiting_frames("cue")) == ["facility:"]


def test_waiting_frames_that_a_pass_had_no_host_for_are_counted_too(
    process: Process, census: FleetCensus, engine: Engine
):
    # given more jobs than a pass books, one at its own cap, and some that somebody holds back
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=4, hostname_tag=False) for _ in range(2)])
        farm.job([LayerSpec(frames=8)], max_cores=1, priority=500)
        farm.jobs([JobSpec([LayerSpec(frames=3)]) for _ in range(21)])
        farm.job([LayerSpec(frames=100)], paused=True)
        later = farm.job([LayerSpec(frames=100)])
        quarantined = farm.job([LayerSpec(frames=100)])
        quarantine_jobs(connection, {quarantined.id: "bad"}, 600)
        connection.execute(text("UPDATE job SET b_auto_book = false WHERE pk_job = :job"), {"job": later.id})

    def shown() -> dict[str, float]:
        census.look_at_farm()
        found = {verdict.value: sample("scheduler_waiting_frames", verdict=verdict.value) for verdict in Verdict}
        return {verdict: frames for verdict, frames in found.items() if frames}

    # when a pass fills the farm from the first of them
    assert run_passes(process) == ["booked"]

    # then it has looked at all the others too, but for the job at its cap, and so does the next pass
    waiting = 21 * 3 - 7
    assert shown() == {"over_job": 7, "capacity": waiting, "quarantined": 100}
    assert run_passes(process) == ["saturated"]
    assert shown() == {"over_job": 7, "capacity": waiting, "quarantined": 100}


def test_waiting_frames_of_a_cluster_whose_passes_fail_are_shown_as_cooled_down(
    process: Process, census: FleetCensus, engine: Engine
):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, hostname_tag=False)
        job = farm.job([LayerSpec(frames=9, cores=16)])
    assert run_passes(process) == ["saturated"]
    (posting,) = process.postings.posted().values()
    process.postings.update(posting, "rest", 0)
    process.backlog.note([job.layers[0].id])
    with failing_statements(process.engine, KeyError("nobody thought of this")):
        assert run_task(dispatch.dispatch_cluster, process, posting)["ended"] == "query_error"
    assert shown_waiting(census) == (9, 9)
    assert sample("scheduler_waiting_frames", verdict="cooled_down") == 9


def shown_waiting(census: FleetCensus) -> tuple[float, float]:
    """Frames waiting by any verdict, and at all."""
    census.look_at_farm()
    by_verdict = sum(sample("scheduler_waiting_frames", verdict=verdict.value) for verdict in Verdict)
    return by_verdict, sample("scheduler_waiting_frames_distinct")


def test_a_frame_that_two_clusters_reach_waits_once_by_the_verdict_that_says_most(
    process: Process, census: FleetCensus, engine: Engine, redis_client
):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, tags=["big"], hostname_tag=False)
        job = farm.job([LayerSpec(frames=9, cores=16, tags="general | big")])
    # when no pass has looked yet, and when both clusters' passes have
    process.sweep()
    assert shown_waiting(census) == (9, 9)
    assert run_passes(process) == ["saturated"] * 2
    assert shown_waiting(census) == (9, 9)
    # when the hosts of one tag are busy
    busy = LayerVerdict(job.id, job.layers[0].id, Verdict.CAPACITY, 0, 9)
    VerdictLog(redis_client, "cue").record({"manual-1": [busy]})
    census.look_at_farm()
    assert sample("scheduler_waiting_frames", verdict="capacity") == 9
    # when an older version of the program left something
    redis_client.hset(
        coordination_keys.waiting_frames("cue"), "alloc-1", json.dumps({"at": time.time(), "frames": {"no_fit": 9}})
    )
    assert shown_waiting(census) == (9, 9)
    assert redis_client.hkeys(coordination_keys.waiting_frames("cue")) == ["facility:"]


def test_what_waits_is_known_when_no_worker_lives(process: Process, census: FleetCensus, engine: Engine, redis_client):
    # given three frames that wait, a message that nobody takes, and a host that reported an hour ago and drains for two
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        farm.job([LayerSpec(frames=3)])
        connection.execute(text("UPDATE host_stat SET ts_ping = now() - interval '1 hour'"))
        hold_a_host(connection)
    message = json.dumps({"headers": {"sent_at": time.time() - 900}, "body": ""})
    redis_client.lpush("cue:q:work:type:dispatch", message)
    # when the leading beat looks at the fleet
    census.look_at_queues()
    census.look_at_farm()
    # then it says so
    assert fleet_metrics.BEAT.get_sample_value("scheduler_workers_alive") == 0
    assert sample("scheduler_queue_depth", type="dispatch") == 1
    assert sample("scheduler_queue_oldest_seconds", type="dispatch") >= 900
    assert sample("scheduler_waiting_frames", verdict="behind") == 3
    assert sample("scheduler_waiting_frames_distinct") == 3
    assert 3600 <= sample("scheduler_host_report_age_seconds") < 3700
    assert 7200 <= sample("scheduler_oldest_hold_seconds") < 7300
    # and that no host drains any more
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_hold SET until = now()"))
    census.look_at_farm()
    assert sample("scheduler_oldest_hold_seconds") == 0
