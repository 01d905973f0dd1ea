"""Every metric of the scheduler reference, and of ours, is exported and moves when what it counts happens."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import redis
from prometheus_client import REGISTRY, Gauge
from sqlalchemy import Engine, text

from opencue_sched.accounting.epoch import look_at_store
from opencue_sched.accounting.keys import Booking
from opencue_sched.coordination.presence import Presence
from opencue_sched.coordination.transport import note_unreadable
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.caps import Vertices
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.placement.plan_state import Plan
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Accounting, Events
from opencue_sched.store.depends import finish_jobs
from opencue_sched.worker import fleet_metrics, metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from opencue_sched.worker.process import Process
from tasks import accounting, dispatch, maintenance
from tests.integration.worker.metered import fail_and_trash, hold_a_host, increments, put_to_sleep, run_passes, sample
from tests.kit.declared_metrics import declared_metrics
from tests.kit.failed_runs import failed_on
from tests.kit.forced import force
from tests.kit.limits import has_types
from tests.kit.polling import eventually
from tests.kit.statements import listening
from tests.kit.tasks import run_task

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


def test_every_named_metric_is_exported_with_its_labels():
    exported = families()
    for wanted in NAMED:
        name, _, label = wanted.rstrip("}").partition("{")
        assert name in exported, name
        assert exported[name] == ((label,) if label else ()), name


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
    fail_and_trash(process, cluster.key)
    census.look_at_queues()
    short = Accounting(commit_deadline=0.075)
    process.settings = process.settings.model_copy(update={"accounting": short})
    redis_client.flushdb()
    metrics.record_store(*look_at_store(redis_client))
    walk.look()
    of_v49 = [] if reports else ["scheduler_limit_report_age_seconds"]
    assert [name for name in walk.unmoved() if name not in OF_BEATS] == of_v49


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
