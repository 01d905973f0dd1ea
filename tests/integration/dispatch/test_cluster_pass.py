"""Whole passes on real stores, in dry run: what is booked, what is refused, and what it costs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from psycopg2 import OperationalError
from redis.exceptions import ConnectionError
from sqlalchemy import event, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import reseed_limits
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.recompute import recompute
from opencue_sched.clients.lua_scripts import load_script, lua_directory
from opencue_sched.coordination.permits import FramePermits
from opencue_sched.dispatch.cluster_pass import CONTENDED_SLEEP_SECONDS
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import HostBookingStrategy, Queue, Rqd
from tests.kit.forced import force
from tests.kit.frozen_clock import Clock
from tests.kit.passes import passes
from tests.kit.polling import eventually


@pytest.fixture
def dry(settings):
    return settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})


@pytest.fixture
def one(engine, dry):
    with passes(engine, dry) as runner:
        yield runner


def scalar(engine, sql, **parameters):
    with engine.connect() as connection:
        return connection.execute(text(sql), parameters).scalar()


def assert_audit(runner) -> None:
    report = run_audit(runner.engine, runner.client, runner.settings)
    assert not report.failed, "\n".join(report.lines())


def test_a_farm_with_room_books_every_frame(one, engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=8) for _ in range(4)])
        farm.jobs([JobSpec(layers=[LayerSpec(frames=4), LayerSpec(frames=4)]) for _ in range(3)])
    reports = one.drain()
    assert sum(report.frames_booked for report in reports) == 24
    assert scalar(engine, "SELECT count(*) FROM proc") == 24
    assert scalar(engine, "SELECT count(*) FROM frame WHERE str_state = 'RUNNING'") == 24
    assert_audit(one)


def test_a_job_whose_counter_somebody_spoilt_keeps_no_other_from_its_frames(one, engine, dry):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=8) for _ in range(4)])
        spoilt, other = farm.jobs([JobSpec(layers=[LayerSpec(frames=4)]) for _ in range(2)])
        connection.execute(text("UPDATE job_resource SET int_max_cores = 2000"))
    reseed_limits(engine, one.runner.ledger, [scalar(engine, "SELECT pk_show FROM show WHERE b_scheduler_managed")])
    one.client.hset(keys.job(spoilt.id), "int_cores", "abc")
    booked = text("SELECT pk_job, count(*) FROM proc GROUP BY pk_job")

    reports = one.drain()
    with engine.connect() as connection:
        assert connection.execute(booked).all() == [(other.id, 4)]
    assert {v.verdict for v in reports[0].verdicts if v.job_id == spoilt.id} == {Verdict.FAILED}

    recompute(engine, one.runner.ledger)
    with passes(engine, dry, "two") as two:
        two.clusters = one.clusters
        two.drain()
    with engine.connect() as connection:
        assert {tuple(row) for row in connection.execute(booked)} == {(spoilt.id, 4), (other.id, 4)}
    assert_audit(one)


@pytest.mark.parametrize("origin", ["cuebot", "opencue-sched"])
def test_round_trips_do_not_grow_with_jobs_layers_frames_or_hosts(engine, dry, redis_client, origin):
    """Constant by construction: the same numbers for 1 frame on 4 hosts and for 200 frames on 40. With few cores idle
    the caps of the jobs that were planned are read afterwards, in one round trip more. Beside a Cuebot, which has
    layers wait for licences, a pass asks for no more."""
    costs = []
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = :origin"), {"origin": origin})
    for path in lua_directory().glob("*.lua"):
        redis_client.script_load(load_script(path.stem).text)
    for jobs, layers, frames, hosts in ((1, 1, 1, 4), (10, 4, 5, 40)):
        with engine.begin() as connection:
            farm = Farm(connection)
            show, alloc = farm.show(f"s{jobs}"), farm.alloc(f"t{jobs}")
            farm.subscription(show, alloc, size=10_000)
            farm.hosts([HostSpec(name=f"s{jobs}h{n}", cores=8, alloc=alloc, hostname_tag=False) for n in range(hosts)])
            layer = [LayerSpec(frames=frames, tags=alloc.tag, name=f"l{n}") for n in range(layers)]
            farm.jobs([JobSpec(layers=layer, show=show, name=f"s{jobs}j{n}") for n in range(jobs)])
        with passes(engine, dry, named=True, clock=Clock()) as runner:
            (cluster,) = [c for c, _ in runner.sweeper.sweep().send if c.show_id == show.id]
            runner.client.ping()
            # What waits and the hosts are known, as to any process that has made a pass.
            runner.runner.backlog.follow()
            runner.runner.hosts.refresh(cluster)
            with runner.counted() as count:
                report = runner.runner.run([cluster], alive=lambda: True)[0]
        assert report.frames_booked == jobs * layers * frames
        costs.append((count.statements, count.packets))
    assert costs[0] == costs[1]
    assert costs[0][0] <= 12


def test_what_is_read_for_a_new_job_does_not_grow_with_what_waits(engine, dry, redis_client):
    """The same statements, rows and packets beside 600 frames in 120 layers and beside 3,000 in 600."""
    costs = []
    for path in lua_directory().glob("*.lua"):
        redis_client.script_load(load_script(path.stem).text)
    for jobs in (60, 300):
        # given a host with room for the frame of one job, and work before that which no host has the memory for
        with engine.begin() as connection:
            farm = Farm(connection)
            show, alloc = farm.show(f"s{jobs}"), farm.alloc(f"t{jobs}")
            farm.subscription(show, alloc, size=10_000)
            farm.host(name=f"s{jobs}h", cores=4, memory_gb=8, alloc=alloc, hostname_tag=False)
            farm.jobs(
                JobSpec(
                    [LayerSpec(frames=5, memory_gb=20 + job + half, tags=alloc.tag) for half in (0, 0.5)],
                    show=show,
                    name=f"s{jobs}j{job}",
                    priority=200,
                )
                for job in range(jobs)
            )
        with passes(engine, dry, named=True, clock=Clock()) as runner:
            (cluster,) = [c for c, _ in runner.sweeper.sweep().send if c.show_id == show.id]
            assert runner.run([cluster])[0].frames_booked == 0

            # when that job comes and is named
            with engine.begin() as connection:
                job = Farm(connection).job([LayerSpec(frames=1, tags=alloc.tag)], show=show, name=f"s{jobs}new")
            runner.runner.backlog.note([job.layers[0].id])
            with runner.counted() as count:
                report = runner.run([cluster])[0]
        assert report.frames_booked == 1
        costs.append((count.statements, count.rows, count.packets))
    assert costs[0] == costs[1]


def test_a_pass_over_many_clusters_costs_as_many_round_trips_as_over_one(engine, dry):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=8, hostname_tag=False) for _ in range(4)])
        shows = [farm.show(name) for name in ("alone", "first", "warm", "second", "third")]
        for show in shows:
            farm.subscription(show, farm.default_alloc(), size=50)
            farm.job([LayerSpec(frames=2)], show=show)
    costs = {}
    with passes(engine, dry, named=True, clock=Clock()) as runner:
        clusters = {cluster.show_id: cluster for cluster, _ in runner.sweeper.sweep().send}
        alone, first, warm, *others = [clusters[show.id] for show in shows]
        # The second of these reads the log of changes from its start, to which the first has written.
        assert [runner.run([cluster])[0].frames_booked for cluster in (first, warm)] == [2, 2]
        for of_pass in ([alone], others):
            with runner.counted() as count:
                reports = runner.run(of_pass)
            assert [report.frames_booked for report in reports] == [2] * len(of_pass)
            costs[len(of_pass)] = (count.statements, count.packets)
    assert costs[1] == costs[2]


def test_two_processes_never_pass_a_burst_together(engine, dry):
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show(), farm.alloc("tight")
        farm.subscription(show, alloc, size=10, burst=13)
        farm.hosts([HostSpec(cores=8, alloc=alloc) for _ in range(8)])
        farm.jobs([JobSpec(layers=[LayerSpec(frames=4, cores=2, tags="tight")], show=show) for _ in range(8)])
    with passes(engine, dry, "one") as first, passes(engine, dry, "two") as second:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(runner.drain) for runner in (first, second)]:
                future.result()
        assert scalar(engine, "SELECT sum(int_cores_reserved) FROM proc") == 1200
        assert_audit(first)


def held_until(looks):
    """Whether a claim is still held, to who asks: so many times it is."""
    left = iter([True] * looks)
    return lambda: next(left, False)


@pytest.mark.parametrize("looks", [0, 1, 2], ids=["planned", "permitted", "booked"])
def test_a_claim_lost_by_the_time_something_was_done_commits_nothing(one, engine, looks):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        farm.job()
    ((cluster, _),) = one.sweeper.sweep().send
    report = one.runner.run([cluster], alive=held_until(looks))[0]
    assert report.ended is PassEnd.CLAIM_LOST
    assert scalar(engine, "SELECT count(*) FROM proc") == 0
    assert one.client.hlen("acct:ledger") == 0
    assert_audit(one)
    assert one.runner.run([cluster], alive=held_until(3))[0].frames_booked == 1, "with the host that was given back"


def waiting_frames(engine, layer_id):
    """Its frames that wait, as permits name them."""
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT pk_frame, int_version FROM frame WHERE pk_layer = :layer AND str_state = 'WAITING'"),
            {"layer": layer_id},
        )
        return [tuple(row) for row in found]


def test_a_worker_that_goes_on_when_its_cluster_is_anothers_leaves_it_the_permits(one, engine):
    """It stood still for longer than its claim lived: what the passes of the cluster have is by now the other's."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        layer = farm.job([LayerSpec(frames=1)]).layers[0].id
    ((cluster, _),) = one.sweeper.sweep().send
    wanted, taken = waiting_frames(engine, layer), []

    def frozen():
        taken.extend(one.runner.permits.take(wanted, "successor", seconds=300))

    report = one.runner.run([cluster], alive=lambda: not taken, progress=frozen)[0]

    assert report.ended is PassEnd.CLAIM_LOST
    assert one.runner.permits.drop(wanted, "successor") == 1


@pytest.mark.parametrize("looks", [1, 2], ids=["permitted", "booked"])
def test_the_permits_of_frames_that_are_not_booked_are_given_back(one, engine, looks):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        layer = farm.job([LayerSpec(frames=2)]).layers[0].id
    ((cluster, _),) = one.sweeper.sweep().send
    wanted = waiting_frames(engine, layer)

    report = one.runner.run([cluster], alive=held_until(looks))[0]

    assert report.ended is PassEnd.CLAIM_LOST
    assert len(one.runner.permits.take(wanted, "another", seconds=300)) == 2


@pytest.mark.parametrize(
    ("others", "again"), [(3, None), (6, CONTENDED_SLEEP_SECONDS)], ids=["replaced", "cores stay idle"]
)
def test_a_pass_looks_again_at_once_only_for_cores_that_stay_idle_for_want_of_permits(one, engine, others, again):
    # given eight waiting frames, some of which another planner has, for a host of five cores
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=5, hostname_tag=False)
        layer = farm.job([LayerSpec(frames=8)]).layers[0].id
    ((cluster, _),) = one.sweeper.sweep().send
    assert len(one.runner.permits.take(waiting_frames(engine, layer)[:others], "another", seconds=300)) == others

    report = one.runner.run([cluster], alive=lambda: True)[0]

    assert report.frames_booked == min(5, 8 - others)
    assert report.look_again == again


def test_an_emptied_redis_stops_booking(one, engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        farm.job()
    ((cluster, _),) = one.sweeper.sweep().send
    one.client.flushdb()
    report = one.runner.run([cluster], alive=lambda: True)[0]
    assert report.ended is PassEnd.NOT_READY
    assert scalar(engine, "SELECT count(*) FROM proc") == 0


def test_every_layer_gets_one_verdict_with_its_reason(one, engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, memory_gb=16, hostname_tag=False)
        wide = farm.job(layers=[LayerSpec(cores=64)], priority=300)
        capped = farm.job(layers=[LayerSpec(frames=3)], max_cores=2, priority=200)
        free = farm.job(layers=[LayerSpec(frames=2)], priority=100)
    ((cluster, _),) = one.sweeper.sweep().send
    report = one.runner.run([cluster], alive=lambda: True)[0]
    verdicts = {verdict.layer_id: verdict for verdict in report.verdicts}
    assert len(report.verdicts) == len(verdicts) == 3
    assert verdicts[wide.layers[0].id].verdict in (Verdict.NO_FIT, Verdict.NO_HOST)
    assert verdicts[wide.layers[0].id].detail
    assert verdicts[capped.layers[0].id].verdict is Verdict.OVER_JOB
    assert verdicts[capped.layers[0].id].frames == 2
    assert verdicts[free.layers[0].id].verdict is Verdict.FLOWING


def test_a_pass_tells_once_what_the_layers_wait_for_that_it_does_not_look_at(one, engine):
    # given a farm that is full, and more layers that wait than a plan looks at one by one
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=4)
        show = farm.default_show()
        farm.jobs([JobSpec([LayerSpec(frames=1) for _ in range(30)], show=show) for _ in range(10)])
    one.drain()
    known = one.runner.verdicts

    # then what it found of their hosts is there for all of them, and of some a verdict of their own
    (found,) = known.of_show(show.id)
    assert [(shortage.need.cores, shortage.verdict) for shortage in found.shortages] == [(1, Verdict.CAPACITY)]

    # and when hosts are idle for all that waits, it is there no more
    with engine.begin() as connection:
        Farm(connection).hosts([HostSpec(name=f"more{number}", cores=100, memory_gb=400) for number in range(3)])
    one.runner.hosts.missed()
    one.drain()
    assert [recorded.shortages for recorded in known.of_show(show.id)] == [()]


def test_a_pass_tells_what_refused(one, engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, hostname_tag=False)
        job = farm.job([LayerSpec(frames=3)])
        subscription = keys.subscription(farm.default_show().id, farm.default_alloc().id)
    ((cluster, _),) = one.sweeper.sweep().send
    one.runner.ledger.load_caps([subscription, keys.folder(job.folder_id), keys.job(job.id)])
    one.client.hset(subscription, "burst", 1)
    report = one.runner.run([cluster], alive=lambda: True)[0]
    assert (report.frames_booked, report.refusals) == (1, {"subscription": 2})


def test_frames_of_others_under_a_licence_are_counted_again_by_each_pass(one, engine):
    """A Cuebot has started one since the limits were loaded, and another process of ours is committing one."""
    with engine.begin() as connection:
        farm = Farm(connection)
        host, limit = farm.host(cores=32, hostname_tag=False), farm.limit("nuke", 3)
        theirs = farm.job([LayerSpec(limits=[limit])], show=farm.show("theirs", managed=False))
        ours = farm.job([LayerSpec(frames=3, limits=[limit])])
        subscription = keys.subscription(farm.default_show().id, farm.default_alloc().id)
    one.runner.ledger.load_caps([subscription, keys.folder(ours.folder_id), keys.job(ours.id), keys.limit(limit)])
    force(one.runner.ledger, [Booking("committing", Vertices("show", "", "", "", "", "", (limit,)), 1)])
    with engine.begin() as connection:
        Farm(connection).run(theirs.frames, host)
    assert sum(report.frames_booked for report in one.drain()) == 3 - 1 - 1


@pytest.mark.parametrize("cores", [True, False])
@pytest.mark.parametrize("memory", [True, False])
def test_all_four_strategies_fill_the_farm(engine, dry, cores, memory):
    strategy = HostBookingStrategy(core_saturation=cores, memory_saturation=memory)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=n, memory_gb=64) for n in (2, 4, 8)])
        farm.job(layers=[LayerSpec(frames=14)])
    with passes(engine, dry.model_copy(update={"queue": Queue(host_booking_strategy=strategy)})) as runner:
        runner.drain()
        assert scalar(engine, "SELECT count(*) FROM proc") == 14
        assert_audit(runner)


def test_a_licence_is_never_exceeded_and_frames_of_unmanaged_shows_count(one, engine):
    """Five licences, two of them taken by a show Cuebot runs: three frames of ours, no more."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=8, hostname_tag=False) for _ in range(2)])
        licence = farm.limit("arnold", 5)
        foreign = farm.show("cuebots", managed=False)
        farm.subscription(foreign, farm.default_alloc(), size=100)
        host = farm.host(cores=8, hostname_tag=False)
        theirs = farm.job(layers=[LayerSpec(frames=2, limits=[licence])], show=foreign)
        farm.run(theirs.frames, host)
        farm.job(layers=[LayerSpec(frames=10, limits=[licence])])
    one.drain()
    assert scalar(engine, "SELECT count(*) FROM proc JOIN show USING (pk_show) WHERE b_scheduler_managed") == 3


def test_a_frame_that_cannot_be_launched_sets_its_job_aside_and_nothing_else(engine, settings):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, hostname_tag=False)
        broken = farm.job(layers=[LayerSpec(frames=1, range="5-9")], os=None)
    with passes(engine, settings) as runner:
        ((cluster, _),) = runner.sweeper.sweep().send
        runner.runner.run([cluster], alive=lambda: True)[0]
        assert scalar(engine, "SELECT pk_job FROM opencue_sched_quarantine") == broken.id
        assert scalar(engine, "SELECT count(*) FROM proc") == 0
        assert runner.runner.run([cluster], alive=lambda: True)[0].jobs == 0
        assert_audit(runner)


def test_a_layer_whose_limit_was_deleted_is_not_held_back_for_ever(one, engine):
    """Cuebot deletes a limit_record and leaves its layer_limit rows behind."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, hostname_tag=False)
        farm.job(layers=[LayerSpec(frames=2, limits=[farm.limit("gone", 5)])])
        connection.execute(text("DELETE FROM limit_record"))
    one.drain()
    assert scalar(engine, "SELECT count(*) FROM proc") == 2
    assert_audit(one)


def test_a_host_somebody_holds_is_left_for_another(one, engine):
    """Retriable: nothing is waited for, the host is read anew and tried again; then the frames go elsewhere."""
    one.runner = replace(one.runner, locked=Cooldowns(60.0, 60.0, free=1))
    with engine.begin() as connection:
        farm = Farm(connection)
        tight, roomy = (farm.host(cores=cores, hostname_tag=False) for cores in (2, 8))
        farm.job(layers=[LayerSpec(frames=2)])
    ((cluster, _),) = one.sweeper.sweep().send
    with engine.begin() as holder:
        holder.execute(text("SELECT 1 FROM host WHERE pk_host = :host FOR UPDATE"), {"host": tight.id})
        *twice, third = [one.runner.run([cluster], alive=lambda: True)[0] for _ in range(3)]
    assert [(it.frames_booked, dict(it.losses)) for it in twice] == [(0, {"host_locked": 2})] * 2
    assert third.frames_booked == 2
    assert scalar(engine, "SELECT DISTINCT pk_host FROM proc") == roomy.id
    assert_audit(one)


def run_one_within_the_other(one, engine):
    """Two clusters' passes in one process, the second started when the first has locked its host.

    Gives their reports, and in which order they locked hosts and committed what was booked there.
    """
    first, second = (cluster for cluster, _ in one.sweeper.sweep().send)
    reports, steps, booking = [], [], threading.local()

    def run(cluster):
        reports.append(one.runner.run([cluster], alive=lambda: True)[0])

    later = threading.Thread(target=run, args=(second,))

    def come_second(_connection, _cursor, statement, *_):
        if not statement.lstrip().startswith("SAVEPOINT"):
            return
        booking.under_way = True
        steps.append(("locked", threading.current_thread() is later))
        if later.ident is None:
            later.start()
            eventually(lambda: one.runner.queue.commits == 2 or not later.is_alive())
            later.join(timeout=0.2)  # by then it would have lost what it planned, or waited with locks of its own

    def committed(_connection):
        if getattr(booking, "under_way", False):
            booking.under_way = False
            steps.append(("committed", threading.current_thread() is later))

    event.listen(engine, "before_cursor_execute", come_second)
    event.listen(engine, "commit", committed)
    run(first)
    later.join()
    event.remove(engine, "before_cursor_execute", come_second)
    event.remove(engine, "commit", committed)
    return reports, steps


ONE_AFTER_THE_OTHER = [("locked", False), ("committed", False), ("locked", True), ("committed", True)]


def test_passes_of_one_process_that_share_a_host_commit_one_after_the_other(one, engine):
    """Each takes cores that the other leaves, but only one transaction at a time can have the row."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, tags=["fast"], hostname_tag=False)
        for tags in ("fast", "general"):
            farm.job(layers=[LayerSpec(frames=2, tags=tags)])

    reports, steps = run_one_within_the_other(one, engine)

    assert [(report.frames_booked, dict(report.losses)) for report in reports] == [(2, {}), (2, {})]
    assert steps == ONE_AFTER_THE_OTHER
    assert_audit(one)


def test_passes_of_one_process_that_share_a_job_commit_one_after_the_other(one, engine):
    """The counters of a job are one row: who waits for it has its own hosts and frames locked, in the way of others."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, tags=["fast"], hostname_tag=False, alloc_tag=False)
        farm.host(cores=8, hostname_tag=False)
        farm.job(layers=[LayerSpec(frames=2, tags=tags) for tags in ("fast", "general")])

    reports, steps = run_one_within_the_other(one, engine)

    assert [(report.frames_booked, dict(report.losses)) for report in reports] == [(2, {}), (2, {})]
    assert steps == ONE_AFTER_THE_OTHER
    assert_audit(one)


def test_a_pass_plans_no_frames_that_another_process_booked_since_it_read_them(one, engine, dry):
    """They could only be lost: their place in the plan is that of the frames behind them."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.hosts([HostSpec(cores=8, tags=["fast"], hostname_tag=False) for _ in range(2)])
        farm.job(layers=[LayerSpec(frames=3, tags="general | fast")])
        farm.job(layers=[LayerSpec(frames=2, tags="general")])
    fast, general = sorted((c for c, _ in one.sweeper.sweep().send), key=lambda cluster: cluster.tags)
    others = []

    class Late(FramePermits):
        def take(self, frames, owner, *, seconds):
            if not others:
                others.append(two.runner.run([fast], alive=lambda: True)[0])
            return super().take(frames, owner, seconds=seconds)

    late = replace(one.runner, permits=Late(one.client, "cue"))
    with passes(engine, dry, instance="two") as two:
        report = late.run([general], alive=lambda: True)[0]

    assert [other.frames_booked for other in others] == [3]
    assert (report.frames_booked, dict(report.losses)) == (2, {})
    assert [it.verdict for it in report.verdicts] == [Verdict.FLOWING] * 2
    assert_audit(one)


def test_nobody_gets_the_permits_of_frames_that_are_being_committed(one, engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, hostname_tag=False)
        layer = farm.job(layers=[LayerSpec(frames=2)]).layers[0]
    wanted, granted = waiting_frames(engine, layer.id), []

    def ask(_connection, _cursor, statement, *_):
        if statement.lstrip().startswith("SAVEPOINT"):
            granted.append(one.runner.permits.take(wanted, "another", seconds=300))

    event.listen(engine, "before_cursor_execute", ask)
    ((cluster, _),) = one.sweeper.sweep().send
    report = one.runner.run([cluster], alive=lambda: True)[0]
    event.remove(engine, "before_cursor_execute", ask)

    assert (report.frames_booked, granted) == (2, [frozenset()])


def test_what_may_be_committed_is_not_planned_again_before_it_was_read(engine, dry):
    """The answer to the COMMIT was lost: the frames are most likely gone."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, hostname_tag=False)
        farm.job(layers=[LayerSpec(frames=2)])

    def lose_the_answer(connection):
        session = connection.connection.driver_connection
        with session.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM proc")
            if cursor.fetchone() != (2,):
                return
            session.commit()
            with suppress(OperationalError):
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with passes(engine, dry, named=True) as one:
        ((cluster, _),) = one.sweeper.sweep().send
        event.listen(engine, "commit", lose_the_answer)
        report = one.run([cluster])[0]
        event.remove(engine, "commit", lose_the_answer)
        after = one.run([cluster])[0]
    assert (report.frames_booked, dict(report.losses)) == (0, {"database_failure": 2})
    assert scalar(engine, "SELECT count(*) FROM proc") == 2
    assert (after.frames_booked, dict(after.losses)) == (0, {})


def test_a_pass_whose_permits_cannot_be_had_gives_its_hosts_and_frames_back(one, engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, hostname_tag=False)
        farm.job(layers=[LayerSpec(frames=2)])

    class NoAnswer(FramePermits):
        def take(self, frames, owner, *, seconds):
            raise ConnectionError("gone")

    ((cluster, _),) = one.sweeper.sweep().send
    with pytest.raises(ConnectionError):
        replace(one.runner, permits=NoAnswer(one.client, "cue")).run([cluster], alive=lambda: True)
    assert one.runner.run([cluster], alive=lambda: True)[0].frames_booked == 2
    assert_audit(one)


def test_a_job_whose_rows_fail_is_skipped_with_its_reason_and_shown(one, engine):
    """Fatal: the job is set aside, and the pass books the others."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, hostname_tag=False)
        broken, good = farm.job(layers=[LayerSpec(frames=2)], priority=300), farm.job(layers=[LayerSpec(frames=2)])
        connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                "RAISE EXCEPTION 'no frame of this job'; END $$"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER refuse BEFORE UPDATE ON frame FOR EACH ROW "
                f"WHEN (NEW.pk_job = '{broken.id}') EXECUTE FUNCTION refuse()"
            )
        )
    ((cluster, _),) = one.sweeper.sweep().send
    report = one.runner.run([cluster], alive=lambda: True)[0]
    assert report.frames_booked == 2
    assert scalar(engine, "SELECT DISTINCT pk_job FROM proc") == good.id
    assert scalar(engine, "SELECT pk_job FROM opencue_sched_quarantine") == broken.id
    assert scalar(engine, "SELECT reason <> '' FROM opencue_sched_quarantine")
    assert_audit(one)
