"""What passes and sweeps count, and what is shown of a worker's backlog."""

from __future__ import annotations

from sqlalchemy import Engine, text

from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.worker import metrics
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.integration.worker.metered import increments, put_to_sleep, run_passes, sample
from tests.kit.frozen_clock import Clock
from tests.kit.tasks import run_task


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
