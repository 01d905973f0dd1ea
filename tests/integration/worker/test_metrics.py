"""Every metric of the scheduler reference, and of ours, is exported and moves when what it counts happens."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import redis
from celery import Celery
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from sqlalchemy import Engine, text

from opencue_sched.accounting.epoch import Epoch, look_at_store
from opencue_sched.accounting.keys import Booking
from opencue_sched.clock import boot_clock
from opencue_sched.coordination import keys as coordination_keys
from opencue_sched.coordination.keys import presence_index
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.postings import FAILURE_KINDS
from opencue_sched.coordination.presence import Presence
from opencue_sched.coordination.transport import note_unreadable
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.report import PassReport
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.errors import SchedulerError
from opencue_sched.placement.plan_state import Plan
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Accounting, Events, Rqd, Settings
from opencue_sched.store.depends import finish_jobs
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.worker import fleet_metrics, metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from opencue_sched.worker.process import Process
from tasks import accounting, dispatch, maintenance
from tests.kit.declared_metrics import declared_metrics
from tests.kit.failed_runs import failed_on
from tests.kit.forced import force
from tests.kit.frozen_clock import Clock
from tests.kit.gathering import counted_statements
from tests.kit.limits import has_types, report_held, set_type
from tests.kit.polling import eventually
from tests.kit.statements import failing_statements, listening
from tests.kit.tasks import run_task

ROOT = Path(__file__).resolve().parents[3]

# Section 7 of the scheduler reference, the metrics of its source, and the two the project added by name.
NAMED = (
    "scheduler_jobs_queried_total",
    "scheduler_jobs_processed_total{show_name}",
    "scheduler_frames_dispatched_total{show_name}",
    "scheduler_time_to_book_seconds",
    "scheduler_job_query_duration_seconds",
    "scheduler_candidates_per_layer",
    "scheduler_no_candidate_iterations_total",
    "scheduler_host_cache_size",
    "scheduler_host_cache_hits_total",
    "scheduler_host_cache_misses_total",
    "scheduler_accounting_limit_exceeded_total{table}",
    "scheduler_cluster_round_trip_seconds{cluster_type}",
    "scheduler_clusters_total{cluster_type}",
    "scheduler_clusters_active",
    "scheduler_active_scan_duration_seconds",
    "scheduler_clusters_sleeping",
    "scheduler_frames_dispatched_per_pass{cluster_type}",
    "scheduler_pass_terminated_reason_total{reason}",
    "scheduler_recompute_cycle_duration_seconds",
    "scheduler_hosts_attempted_total",
    "scheduler_wasted_attempts_total",
    "scheduler_waiting_frames{verdict}",
    "cuebot_redis_publish_misconfigured",
)


def families() -> dict[str, tuple[str, ...]]:
    """The labels of our metrics by exposed name."""
    found = {metric.exposed_name: metric.labels for metric in declared_metrics(metrics, fleet_metrics)}
    of_leader = [gauge for figures in fleet_metrics.LEADING for gauge in figures.gauges]
    return found | {f"scheduler_{name}": tuple(labels.split()) for name, labels, _ in of_leader}


def values() -> dict[str, dict[tuple[object, ...], float]]:
    """Every sample of our metrics, by exposed name of the family."""
    found: dict[str, dict[tuple[object, ...], float]] = {name: {} for name in families()}
    for metric in (it for registry in (REGISTRY, fleet_metrics.BEAT) for it in registry.collect()):
        name = metric.name + ("_total" if metric.type == "counter" else "")
        if name in found:
            found[name] = {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for sample in metric.samples
                if not sample.name.endswith("_created")
            }
    return found


def sample(name: str, **labels: str) -> float:
    """A value that a worker or a beat shows; 0 where neither does."""
    found = (registry.get_sample_value(name, labels) for registry in (REGISTRY, fleet_metrics.BEAT))
    return next((value for value in found if value is not None), 0.0)


@contextmanager
def increments(name: str, **labels: str) -> Iterator[list[float]]:
    """How much a counter grew."""
    grown = [-sample(name, **labels)]
    yield grown
    grown[0] += sample(name, **labels)


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("metrics", broker="memory://", set_as_current=False)
    yield made
    made.close()


@pytest.fixture
def process(settings: Settings, redis_client, app: Celery) -> Iterator[Process]:
    """What a worker has, in this process; its counters are open."""
    changed = settings.model_copy(
        update={
            "rqd": Rqd(dry_run_mode=True),
            "queue": settings.queue.model_copy(update={"cluster_saturated_sleep": 0.001}),
        }
    )
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    made = Process(changed, app)
    # Beside a Cuebot the shows of these tests would have to wait for half a minute before they are booked.
    made.facts = replace(made.facts, origin="opencue-sched")
    yield made
    made.close()


class Gate:
    """The leader gate of a beat, which leads while ``fence`` is a number."""

    def __init__(self) -> None:
        self.fence: int | None = 1
        self.tick_age = 0.0


@pytest.fixture
def gate() -> Gate:
    """The gate by which this process shows figures of the fleet, whatever beat another test had here."""
    made = Gate()
    fleet_metrics.watch_gate(cast(LeaderGate, made))
    return made


@pytest.fixture
def census(process: Process, gate: Gate) -> Iterator[FleetCensus]:
    """What the leading beat has, in this process."""
    made = FleetCensus(process.settings, lambda: gate.fence is not None)
    yield made
    made.close()


def run_passes(process: Process) -> list[str]:
    """Pass once over every cluster that has work; how each ended."""
    process.hosts.cache.expire()
    while not process.hosts.reread():
        pass
    process.backlog.missed()
    process.backlog.resync()
    process.sweep(wake_shows=[cluster.show_id for cluster in process.sweeper.clusters])
    ended = [
        str(run_task(dispatch.dispatch_cluster, process, uuid)["ended"]) for uuid in process.postings.posted().values()
    ]
    process.verdicts.write()
    return ended


def test_every_named_metric_is_exported_with_its_labels():
    exported = families()
    for wanted in NAMED:
        name, _, label = wanted.rstrip("}").partition("{")
        assert name in exported, name
        assert exported[name] == ((label,) if label else ()), name


def test_a_pass_is_counted(process: Process, engine: Engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("counted")
        farm.subscription(show, farm.default_alloc(), size=100)
        farm.hosts([HostSpec(cores=4, hostname_tag=False) for _ in range(2)])
        farm.job([LayerSpec(frames=3), LayerSpec(frames=2, cores=64)], show=show)
    with (
        increments("scheduler_jobs_queried_total") as queried,
        increments("scheduler_jobs_processed_total", show_name="counted") as processed,
        increments("scheduler_frames_dispatched_total", show_name="counted") as dispatched,
        increments("scheduler_hosts_attempted_total") as attempted,
        increments("scheduler_candidates_per_layer_count") as layers,
        increments("scheduler_time_to_book_seconds_count") as booked,
        increments("scheduler_no_candidate_iterations_total") as none,
        increments("scheduler_host_cache_hits_total") as hits,
        increments("scheduler_host_cache_misses_total") as misses,
        increments("scheduler_frames_dispatched_per_pass_sum", cluster_type="alloc") as per_pass,
        increments("scheduler_pass_terminated_reason_total", reason="booked") as ended,
    ):
        assert run_passes(process) == ["booked"]
    assert (queried, processed, dispatched, booked, per_pass) == ([1], [1], [3], [3], [3])
    assert (attempted, layers, none, hits, misses, ended) == ([1], [1], [1], [1], [1], [1])
    assert sample("scheduler_host_cache_size") == 2


def test_the_backlog_is_shown(process: Process, engine: Engine):
    # given layers that are known to wait: one of a job in quarantine, one in cooldown, and one that is changed unheard
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("counted")
        farm.subscription(show, farm.default_alloc(), size=100)
        farm.host(cores=8, hostname_tag=False)
        layers = LayerSpec(frames=3), LayerSpec(frames=3, tags="elsewhere"), LayerSpec(frames=3)
        jobs = farm.jobs([JobSpec(layers=[layer], show=show) for layer in layers])
        quarantine_jobs(connection, {jobs[0].id: "no such thing"}, seconds=300)
    lost = Cooldowns[str](1.0, 1.0, Clock())
    lost.failed(jobs[1].layers[0].id)
    metrics.watch_backlog(process.backlog, lost)
    process.backlog.follow()
    with engine.begin() as connection:
        changed = text("UPDATE layer SET int_mem_min = 2 * int_mem_min WHERE pk_job = :job")
        connection.execute(changed, {"job": jobs[2].id})

    # when a pass plans frames of the last and loses them
    process.sweep()
    with increments("scheduler_bookings_lost_total", reason="layer_changed") as losses:
        for posting in process.postings.posted().values():
            run_task(dispatch.dispatch_cluster, process, posting)

    # then all are counted, by what keeps them, and the last comparison with the database is recent
    assert losses == [3]
    assert sample("scheduler_backlog_layers") == 3
    assert sample("scheduler_backlog_stale_layers") == 1
    assert 0 <= sample("scheduler_backlog_resync_age_seconds") < 60
    aside = {reason: sample("scheduler_backlog_set_aside", reason=reason) for reason in metrics.SET_ASIDE_REASONS}
    assert aside == {"quarantined": 1, "starts_later": 0, "delayed": 0, "failed": 0, "lost": 1}


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


def put_to_sleep(process: Process, cluster: str) -> None:
    for posting in process.postings.find_all(cluster):
        process.postings.update(posting, "rest", 60_000)


def test_clusters_that_rest_are_counted_while_they_have_work(process: Process, engine: Engine):
    # given two clusters that a job reaches, of which one rests
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(tags=["big"], hostname_tag=False)
        farm.job([LayerSpec(frames=9, tags="general | big")])
    process.sweep()
    one, other = process.postings.posted()
    put_to_sleep(process, one)
    process.sweep()
    assert (sample("scheduler_clusters_active"), sample("scheduler_clusters_sleeping")) == (2, 1)
    put_to_sleep(process, other)
    process.sweep()
    assert (sample("scheduler_clusters_active"), sample("scheduler_clusters_sleeping")) == (2, 2)
    # when their work is paused
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = true"))
    process.sweeper.reload()  # what a scan found is believed for ten seconds, until the clusters are read anew
    process.sweep()
    # then none with work rests, though both are still on the board
    assert (sample("scheduler_clusters_active"), sample("scheduler_clusters_sleeping")) == (0, 0)
    assert process.postings.counts().delayed == 2


class Walk:
    """What the metrics showed after each step."""

    def __init__(self) -> None:
        self._seen = [values()]

    def look(self) -> None:
        self._seen.append(values())

    def unmoved(self) -> list[str]:
        first, *later = self._seen
        return sorted(name for name, figures in first.items() if all(_same(figures, seen[name]) for seen in later))


def _same(before: dict[tuple[object, ...], float], after: dict[tuple[object, ...], float]) -> bool:
    return before.keys() == after.keys() and all(
        value == after[key] or (math.isnan(value) and math.isnan(after[key])) for key, value in before.items()
    )


# A beat's own, looked at by tests/chaos/test_coordination_leader.py and coordination/test_wrong_clocks.py.
OF_BEATS = [
    "scheduler_leader_fence",
    "scheduler_tick_age_seconds",
    "scheduler_ticks_ahead_seconds",
]


def test_every_metric_of_ours_moves(process: Process, census: FleetCensus, engine: Engine, redis_client):
    """One walk through everything a fleet does; afterwards no metric is as it was all the time."""
    _forget_gauges()
    process.watch_backlog()
    process.sweep()
    walk = Walk()
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        farm.hosts([HostSpec(cores=4, hostname_tag=False) for _ in range(2)])
        farm.job([LayerSpec(frames=3)])
        farm.job([LayerSpec(frames=1, cores=64)])
        farm.job([LayerSpec(frames=2)], max_cores=1, priority=500)
        bad = farm.job()
        folder = farm.folder(show.id, "capped", max_cores=100, max_gpus=2)
        farm.job([LayerSpec(frames=1, limits=[farm.limit("licence", 5)])], folder_id=folder, paused=True)
        reports = has_types(connection)
        connection.execute(text("UPDATE layer SET int_mem_min = :m WHERE pk_job = :job"), {"m": 2**55, "job": bad.id})

    _fleet(process, redis_client)
    census.look_at_queues()
    process.sweeper.reload()
    process.sweep()
    walk.look()
    run_passes(process)
    run_passes(process)
    census.look_at_farm()
    walk.look()

    cluster = next(iter(process.sweeper.clusters))
    with increments("scheduler_accounting_limit_exceeded_total", table="job") as grown:
        metrics.record_pass(PassReport(cluster, refusals=Counter(job=1)))
    assert grown == [1]

    with engine.begin() as connection:
        Farm(connection).job([LayerSpec(frames=1)], show=show, name="paused")
    with (
        _paused_before_commit(process, engine),
        increments("scheduler_bookings_lost_total", reason="frame_lost") as grown,
    ):
        run_passes(process)
    assert grown[0] >= 1
    walk.look()

    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = false"))
        if reports:
            connection.execute(text("UPDATE limit_record SET ts_reported = now()"))
        farm = Farm(connection)
        failed_on(farm, "render07", [farm.job(name=name, paused=True) for name in ("first", "second", "third")])
        refused = (
            "INSERT INTO opencue_sched_job_event (event, facility, body, made_at, last_error) VALUES"
            " ('job_ended', 'local', '{}', clock_timestamp() - interval '1 hour', 'it answered 503')"
        )
        connection.execute(text(refused))
    run_passes(process)
    walk.look()

    _completion(engine, process)
    _drift_and_feed(process, engine, redis_client)
    with engine.begin() as connection:
        hold_a_host(connection)
    census.look_at_farm()
    walk.look()
    run_task(maintenance.keep_promises, process)
    _job_event_is_sent(process, engine)
    walk.look()
    _hosts_go_down(process, engine)
    cluster = next(iter(process.sweeper.clusters))
    crowded = Plan(attempts=Counter(layer=2), wasted_attempts=1)
    with increments("scheduler_wasted_attempts_total") as grown:
        metrics.record_pass(PassReport(cluster, plan=crowded))
    assert grown == [1]
    put_to_sleep(process, cluster.key)
    process.sweep()
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, until)"
                " VALUES ('gone', 'layer', 'job', 8, 1, 0, now() + interval '1 minute')"
            )
        )
    assert run_task(maintenance.keep_promises, process)["ended"]
    _fail_and_trash(process, cluster.key)
    census.look_at_queues()
    short = Accounting(commit_deadline=0.075)
    process.settings = process.settings.model_copy(update={"accounting": short})
    redis_client.flushdb()
    metrics.record_store(*look_at_store(redis_client))
    walk.look()
    assert [name for name in walk.unmoved() if name not in OF_BEATS] == []


def hold_a_host(connection) -> None:
    """A host has drained for two hours, for a layer that is gone."""
    connection.execute(
        text(
            "INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, granted_at, until)"
            " SELECT pk_host, 'layer', 'job', 8, 1, 0, now() - interval '2 hours', now() + interval '1 minute'"
            " FROM host LIMIT 1"
        )
    )


def _forget_gauges() -> None:
    """Whatever tests before this one left there."""
    for figures in fleet_metrics.LEADING:
        figures.update([])
    for gauge in declared_metrics(metrics, fleet_metrics):
        if isinstance(gauge.metric, Gauge) and gauge.labels:
            gauge.metric.clear()
        elif isinstance(gauge.metric, Gauge):
            gauge.metric.set(-1)


def _fleet(process: Process, client: redis.Redis) -> None:
    """A worker is there, another one is gone, and messages of both wait; one nobody can read, one that is stale."""
    message = json.dumps({"headers": {"sent_at": time.time() - 30}, "body": ""})
    for instance in ("gone", process.settings.instance):
        client.lpush(f"cue:q:work:type:dispatch:group:default:inst:{instance}", message)
    gone = Presence(
        client,
        "cue",
        types=["dispatch"],
        group="default",
        instance="gone",
        node="gone@here",
        capacity=1,
        capabilities=[],
    )
    gone.announce()
    for key in client.keys("cue:meta:actor:inst:dispatch:default:gone"):
        client.delete(key)
    process.membership.join("one@here", queues=lambda: ["cue:q:work:type:dispatch"], capacity=2)
    process.membership.heartbeat()
    assert run_task(dispatch.dispatch_cluster, process, "0" * 40)["ended"] == "dropped"
    note_unreadable("task", "no task of ours")


def _fail_and_trash(process: Process, *clusters: str) -> None:
    """A pass over each cluster fails; the first of them somebody takes off the board."""
    for key in clusters:
        posting = process.postings.posted().get(key)
        assert posting is not None
        process.postings.update(posting, "rest", 0)
        claim = process.postings.claim(posting, "test", ttl_seconds=60)
        assert claim is not None
        process.postings.end(claim, "fail", delay_seconds=60, reason="postgresql: DataError: out of range", error="")
    process.postings.update(str(process.postings.posted().get(clusters[0])), "trash", "bad hosts")


@contextmanager
def _paused_before_commit(process: Process, engine: Engine) -> Iterator[None]:
    """Between booking and commit, somebody pauses every job."""
    before, run = len(list(process.ledger.records())), [True]

    def pause(*_: object) -> None:
        if run and len(list(process.ledger.records())) > before:
            run.clear()
            with engine.begin() as connection:
                connection.execute(text("UPDATE job SET b_paused = true"))

    with listening(process.engine, "before_cursor_execute", pause):
        yield


def _completion(engine: Engine, process: Process) -> None:
    with engine.connect() as connection:
        query = "SELECT pk_proc, pk_frame, str_name FROM proc JOIN host USING (pk_host) LIMIT 1"
        proc, frame, host = connection.execute(text(query)).one()
    with increments("scheduler_release_events_total", event="completion_applied") as grown:
        Releaser(engine, ledger=process.ledger, count=metrics.record_event).end([CompletedFrame(proc, frame, host, 0)])
    assert grown == [1]


def _job_event_is_sent(process: Process, engine: Engine) -> None:
    process.settings = process.settings.model_copy(update={"events": Events(command=("true",))})
    run_task(maintenance.send_events, process)
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=1)], name="told")
        connection.execute(text("UPDATE frame SET str_state = 'EATEN' WHERE pk_job = :job"), {"job": job.id})
        finish_jobs(connection, [job.id])
    with increments("scheduler_job_events_total", outcome="sent") as grown:
        assert run_task(maintenance.send_events, process)["sent"] == 1
    assert grown == [1]


def _drift_and_feed(process: Process, engine: Engine, client: redis.Redis) -> None:
    """A lost entry, a counter somebody wrote over, a booking in flight, and a trigger that is gone."""
    with engine.begin() as connection:
        proc = connection.execute(text("SELECT pk_proc FROM proc LIMIT 1")).scalar_one()
        connection.execute(text("DROP TRIGGER opencue_sched_proc_released ON proc"))
    client.hdel("acct:ledger", proc)
    force(process.ledger, [Booking("9" * 36, Vertices(*("f" * 36,) * 6), 1)])
    with ExitStack() as stack:
        kinds = ("sub", "folder", "job", "layer", "point", "limit")
        found = [stack.enter_context(increments("scheduler_drift_found_total", kind=kind)) for kind in kinds]
        causes = ("missing", "moved")
        healed = [
            stack.enter_context(increments("scheduler_ledger_entries_healed_total", cause=cause)) for cause in causes
        ]
        assert int(str(run_task(accounting.recompute, process)["healed"])) > 0
    assert found == [[float(kind != "limit")] for kind in kinds]
    assert healed == [[1.0], [0.0]]

    def is_old() -> bool:
        """The age of a booking is told in whole seconds."""
        run_task(accounting.recompute, process)
        return sample("scheduler_ledger_oldest_in_flight_seconds") > 0

    eventually(is_old, what="a booking that has been in flight for a second")


def _hosts_go_down(process: Process, engine: Engine) -> None:
    with engine.begin() as connection:
        down = "UPDATE host_stat SET str_state = 'DOWN', ts_ping = now() - interval '1 hour'"
        connection.execute(text(down))
    assert run_task(maintenance.reap, process)["procs_released"]


def test_a_second_process_serves_the_next_free_port_and_none_serves_none():
    port = free_port()
    first = metrics.serve_metrics("127.0.0.1", port, REGISTRY)
    second = metrics.serve_metrics("127.0.0.1", port, REGISTRY)
    assert first is not None
    assert second is not None
    try:
        assert first[1] == port
        assert port < second[1] < port + metrics.PORTS_TRIED
        with urllib.request.urlopen(f"http://127.0.0.1:{second[1]}/metrics", timeout=10) as answer:
            assert b"scheduler_jobs_queried_total" in answer.read()
    finally:
        for server in (first[0], second[0]):
            server.shutdown()
            server.server_close()
    assert metrics.serve_metrics("127.0.0.1", 0, REGISTRY) is None


def test_an_address_of_another_machine_is_a_clear_error():
    with pytest.raises(SchedulerError, match=r"192\.0\.2\.1:"):
        metrics.serve_metrics("192.0.2.1", free_port(), REGISTRY)


def of_beats(*, leading: bool) -> set[str]:
    of_leader = {name for figures in fleet_metrics.LEADING for name, _, _ in figures.gauges} if leading else set()
    standby = {"leader_fence", "tick_age_seconds", "ticks_ahead_seconds"}
    return {f"scheduler_{name}" for name in standby | of_leader}


def test_each_process_shows_only_the_series_that_it_feeds(census: FleetCensus, gate: Gate, monkeypatch):
    def names(registry: CollectorRegistry) -> set[str]:
        found = {metric.name for metric in registry.collect()}
        return {name for name in found if name.startswith(("scheduler_", "cuebot_"))}

    assert names(metrics.REPORT_SERVICE) == {"scheduler_release_events"}
    assert not names(REGISTRY) & of_beats(leading=True)
    assert "scheduler_jobs_queried" in names(REGISTRY)
    # when a beat leads and has looked at the fleet, when it leads no more, and when no census went well for a minute
    census.look_at_queues()
    census.look_at_farm()
    assert names(fleet_metrics.BEAT) == of_beats(leading=True)
    gate.fence = None
    assert names(fleet_metrics.BEAT) == of_beats(leading=False)
    gate.fence = 1
    assert names(fleet_metrics.BEAT) == of_beats(leading=True)
    later = boot_clock() + 61
    monkeypatch.setattr(fleet_metrics, "boot_clock", lambda: later)
    assert names(fleet_metrics.BEAT) == of_beats(leading=False)


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


def series(name: str) -> dict[tuple[str, ...], float]:
    """What a beat shows of a metric, by the values of its labels; without zeros."""
    found = (metric for metric in fleet_metrics.BEAT.collect() if metric.name == name)
    return {tuple(it.labels.values()): it.value for metric in found for it in metric.samples if it.value}


def test_the_leading_beat_names_hosts_that_break_frames(census: FleetCensus, engine: Engine):
    # given a host on which a frame of each of three jobs failed, and one with a frame of one
    with engine.begin() as connection:
        farm = Farm(connection)
        failed_on(farm, "render07", [farm.job() for _ in range(3)])
        failed_on(farm, "render08", [farm.job()])
    census.look_at_farm()
    assert series("scheduler_breaking_hosts") == {("render07",): 3}


def test_the_leading_beat_shows_the_farm_its_shows_and_what_their_caps_leave(
    census: FleetCensus, gate: Gate, engine: Engine
):
    # given hosts in three states, a show that runs two frames under caps of all kinds, and one for which a host drains
    with engine.begin() as connection:
        farm = Farm(connection)
        alloc, main, second = farm.default_alloc(), farm.show("main"), farm.show("second")
        farm.subscription(main, alloc, size=30, burst=40)
        farm.subscription(second, alloc, size=10)
        specs = [HostSpec(cores=8), HostSpec(cores=8, lock="LOCKED"), HostSpec(cores=4, state="DOWN")]
        host, locked, _ = farm.hosts(specs)
        folder = farm.folder(main.id, "shots", max_cores=16)
        layer = LayerSpec(frames=5, limits=[farm.limit("nuke", 3)])
        job = farm.job([layer], show=main, folder_id=folder)
        dead = farm.job([LayerSpec(frames=2)], show=second)
        farm.run(job.frames[:2], host, cores=2)
        connection.execute(
            text("UPDATE frame SET str_state = 'DEAD' WHERE pk_frame = :frame"), {"frame": dead.frames[0]}
        )
        hold = """
            INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, until)
            VALUES (:host, :layer, :job, 8, 1, 0, now() + interval '1 minute')
            """
        connection.execute(text(hold), {"host": locked.id, "layer": dead.layers[0].id, "job": dead.id})
    # when the leading beat looks at them
    census.look_at_farm()
    # then all of it is there
    place = ("local", alloc.name)
    assert series("scheduler_farm_hosts") == {
        ("local", "UP", "OPEN"): 1,
        ("local", "UP", "LOCKED"): 1,
        ("local", "DOWN", "OPEN"): 1,
    }
    cores = series("scheduler_farm_cores")
    assert cores == {(*place, "booked"): 4, (*place, "idle"): 4, (*place, "locked"): 8, (*place, "down"): 4}
    assert series("scheduler_show_frames") == {
        ("main", "running"): 2,
        ("main", "waiting"): 3,
        ("second", "waiting"): 1,
        ("second", "dead"): 1,
    }
    assert series("scheduler_show_cores") == {("main",): 4}
    assert series("scheduler_draining_hosts") == {("local", "second"): 1}
    assert series("scheduler_subscription_cores") == {(*place, "main"): 4}
    assert series("scheduler_subscription_size_cores") == {(*place, "main"): 30, (*place, "second"): 10}
    assert series("scheduler_subscription_burst_cores") == {(*place, "main"): 40, (*place, "second"): 10}
    assert series("scheduler_subscription_share") == {(*place, "main"): 1}
    assert series("scheduler_subscription_due") == {(*place, "main"): 0.75, (*place, "second"): 0.25}
    assert series("scheduler_folder_cores") == {("main", "shots"): 4}
    assert series("scheduler_folder_max_cores") == {("main", "shots"): 16}
    assert series("scheduler_folder_max_gpus") == {}
    assert (series("scheduler_limit_frames"), series("scheduler_limit_max_frames")) == ({("nuke",): 2}, {("nuke",): 3})
    of_limit = {name: series(f"scheduler_limit_{name}") for name in ("machines", "settled", "pending", "open")}
    assert of_limit == {
        "machines": {("nuke",): 1},
        "settled": {},
        "pending": {("nuke",): 2},
        "open": {},
    }
    assert series("scheduler_limit_report_age_seconds") == {}
    # and what is gone has no series any more
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM layer_limit"))
        connection.execute(text("DELETE FROM limit_record"))
        connection.execute(text("UPDATE host_stat SET ts_ping = now() - interval '1 day' WHERE str_state = 'UP'"))
    census.look_at_farm()
    assert series("scheduler_limit_frames") == series("scheduler_limit_max_frames") == {}
    assert series("scheduler_farm_hosts") == {
        ("local", "SILENT", "OPEN"): 1,
        ("local", "SILENT", "LOCKED"): 1,
        ("local", "DOWN", "OPEN"): 1,
    }
    # and nothing of it is shown by a beat that leads no more
    gate.fence = None
    assert series("scheduler_farm_hosts") == series("scheduler_show_cores") == {}


def test_the_census_tells_of_reported_licences_and_of_a_report_that_is_too_old(
    census: FleetCensus, engine: Engine
) -> None:
    # given a limit of machines that two hold by a report of half an hour ago, one of them an artist's
    with engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
        limit = Farm(connection).limit("houdini", 6)
        set_type(connection, limit, "HOST")
        report_held(connection, limit, "r01", "ws017")
        connection.execute(text("UPDATE limit_record SET ts_reported = now() - interval '30 minutes'"))
    census.look_at_farm()
    label = ("houdini",)
    assert [series(f"scheduler_limit_{name}")[label] for name in ("frames", "settled", "machines", "open")] == [
        2,
        2,
        2,
        1,
    ]
    assert series("scheduler_limit_report_age_seconds")[label] >= 1800
    # when the limit's time to live is longer than that, then it is enforced
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET int_report_ttl = 3600"))
    census.look_at_farm()
    assert series("scheduler_limit_open") == {}


def test_the_oldest_event_that_was_not_delivered_has_an_age(census: FleetCensus, engine: Engine):
    # given an event that was refused an hour ago, and one that is on its way
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO opencue_sched_job_event (event, facility, body, made_at, last_error) VALUES"
                " ('job_ended', 'local', '{}', clock_timestamp() - interval '1 hour', 'it answered 503'),"
                " ('job_ended', 'local', '{}', clock_timestamp(), NULL)"
            )
        )
    census.look_at_farm()
    assert 3600 <= sample("scheduler_job_events_oldest_seconds") < 3700
    # when it was delivered
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM opencue_sched_job_event WHERE last_error IS NOT NULL"))
    census.look_at_farm()
    assert sample("scheduler_job_events_oldest_seconds") == 0


def test_where_nothing_waits_the_census_reads_no_clusters(census: FleetCensus, engine: Engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8)
        job = farm.job([LayerSpec(frames=1)])
    census.look_at_farm()  # the first look asks what the schema has, too
    with counted_statements(Engine) as busy:
        census.look_at_farm()
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = true WHERE pk_job = :job"), {"job": job.id})
    with counted_statements(Engine) as idle:
        census.look_at_farm()
    assert (len(busy), len(idle)) == (12, 10)
    # and every figure is there all the same
    assert sample("scheduler_waiting_frames_distinct") == 0
    assert series("scheduler_farm_hosts")
    assert series("scheduler_show_frames")


def test_of_a_large_farm_the_busiest_have_series_and_the_others_a_sum(census: FleetCensus, engine: Engine):
    def add(first: int, last: int) -> None:
        with engine.begin() as connection:
            farm = Farm(connection)
            for number in range(first, last):
                show = farm.show(f"show{number}")
                farm.subscription(show, farm.alloc(f"tag{number}"), size=100)
                farm.folder(show.id, f"folder{number}", max_cores=10, max_gpus=2)
                farm.limit(f"limit{number}", 7)
                farm.job([LayerSpec(frames=3)], show=show, name=f"job{number}")

    # given a farm that works under caps, and ever more shows beside it, each with an allocation and caps of its own
    with engine.begin() as connection:
        farm = Farm(connection)
        folder = farm.folder(farm.default_show().id, "used", max_cores=10, max_gpus=2)
        job = farm.job([LayerSpec(frames=1, limits=[farm.limit("used", 7)])], folder_id=folder)
        farm.run(job.frames, farm.host(cores=8), cores=6)
    add(0, 2)
    census.look_at_farm()  # the first look asks what the schema has, too
    with counted_statements(Engine) as small:
        census.look_at_farm()
    most = fleet_metrics.MOST_SERIES
    shows = most + 10
    add(2, shows)
    with counted_statements(Engine) as large:
        census.look_at_farm()
    # then looking at them takes no more statements
    assert len(small) == len(large) <= 14
    # and there are as many series as may be, with those at work among them, and the others' sums
    assert series("scheduler_show_cores") == {("show",): 6}
    assert series("scheduler_folder_cores") == {("show", "used"): 6}
    assert series("scheduler_limit_frames") == {("used",): 1}
    for name, each, others in (
        ("scheduler_limit_max_frames", 7, ("other",)),
        ("scheduler_folder_max_cores", 10, ("other", "other")),
        ("scheduler_folder_max_gpus", 2, ("other", "other")),
    ):
        assert len(series(name)) == most + 1, name
        assert series(name)[others] == each * (shows + 1 - most), name
    waiting = {show: it for (show, state), it in series("scheduler_show_frames").items() if state == "waiting"}
    assert (len(waiting), waiting["other"], sum(waiting.values())) == (most, 3 * (shows + 1 - most), 3 * shows)
    sizes = series("scheduler_subscription_size_cores")
    assert sum(sizes.values()) == 100 * shows + 100_000
    assert len([labels for labels in sizes if labels[2] != "other"]) == most
    assert len({allocation for _, allocation, _ in sizes}) == most + 1
    # and parts of different allocations are not added up
    due = series("scheduler_subscription_due")
    assert due
    assert max(due.values()) == 1


def test_clusters_that_failed_and_those_off_the_board_are_known(process: Process, census: FleetCensus, engine: Engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(tags=["big"], hostname_tag=False)
        farm.job([LayerSpec(frames=9, tags="general | big")])
    process.sweep()
    one, other = process.postings.posted()
    census.look_at_queues()
    assert sample("scheduler_clusters_cooled_down", reason="postgresql") == sample("scheduler_postings_trashed") == 0
    # when the passes of both fail, and somebody takes one of them off the board
    _fail_and_trash(process, one, other)
    census.look_at_queues()
    # then each is known by its state, and the failed one by what failed
    failed = {kind: sample("scheduler_clusters_cooled_down", reason=kind) for kind in FAILURE_KINDS}
    assert failed == {"postgresql": 1, "redis": 0, "program": 0}
    assert sample("scheduler_postings_trashed") == 1


def test_a_group_that_is_gone_has_no_backlog_any_more(census: FleetCensus, redis_client):
    worker = Presence(redis_client, "cue", types=["dispatch"], group="old", instance="one")
    worker.announce()
    census.look_at_queues()
    assert fleet_metrics.BEAT.get_sample_value("scheduler_backlog_per_worker", {"group": "old"}) == 0
    # when it is gone, and forgotten
    worker.withdraw()
    redis_client.delete(presence_index("cue"))
    census.look_at_queues()
    assert fleet_metrics.BEAT.get_sample_value("scheduler_backlog_per_worker", {"group": "old"}) is None
