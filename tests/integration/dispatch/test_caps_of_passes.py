"""Caps, bursts, folders and limits: what a pass still books under them, and who has the hosts instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.recompute import recompute
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobIds, JobSpec, LayerSpec
from opencue_sched.errors import CapChanging
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from tests.kit.gathering import cluster_of
from tests.kit.limits import has_types, list_twice, report, set_type
from tests.kit.passes import Passes, passes
from tests.kit.statements import listening

ONE_JOB_A_PLAN = {"max_jobs_per_cluster_pass": 1}


def dry(settings: Settings, **queue: Any) -> Settings:
    changes = {"rqd": Rqd(dry_run_mode=True), "queue": settings.queue.model_copy(update=queue)}
    return settings.model_copy(update=changes)


@pytest.fixture
def here(engine: Engine, settings: Settings, request: pytest.FixtureRequest) -> Iterator[Passes]:
    with passes(engine, dry(settings, **getattr(request, "param", {}))) as runner:
        yield runner


one_job_a_plan = pytest.mark.parametrize("here", [ONE_JOB_A_PLAN], indirect=True, ids=["one job a plan"])


def execute(engine: Engine, sql: str, **parameters: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), parameters)


def uses_read(here: Passes) -> int:
    """How many vertices' use was read until now."""
    return int(here.client.info("commandstats").get("cmdstat_hmget", {}).get("calls", 0))


def running(engine: Engine, job: JobIds) -> int:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT count(*) FROM proc WHERE pk_job = :job"), {"job": job.id}).scalar_one()
        return int(found)


def running_of_layers(engine: Engine, job: JobIds) -> list[int]:
    statement = text("SELECT count(*) FROM proc WHERE pk_layer = :layer")
    with engine.connect() as connection:
        return [connection.execute(statement, {"layer": layer.id}).scalar_one() for layer in job.layers]


def test_a_pass_on_a_full_farm_reads_the_use_of_the_jobs_that_it_plans_alone(here: Passes, engine: Engine) -> None:
    # given a host with one core idle, and fifty jobs each with a folder, a cap and a layer
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("small")
        farm.subscription(show, farm.default_alloc(), size=100)
        farm.host(tags=["fast"], cores=8, idle_cores=1)
        for _ in range(50):
            farm.job([LayerSpec(frames=1, tags="fast")], show=show, max_cores=10)
        cluster = cluster_of(farm, "fast", show_id=show.id)
    before = uses_read(here)

    booked = here.run([cluster])[0].frames_booked

    assert booked == 1
    assert uses_read(here) - before < 20


# Bursts


@pytest.mark.parametrize("table", ["subscription", "job_resource", "folder_resource"])
def test_upstream_bug_stale_columns_of_use_keep_nobody_waiting(here: Passes, engine: Engine, table: str) -> None:
    # given a burst, a job's and a folder's cap of ten, of which six are in use, and a column that says all are
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        folder = farm.folder(farm.default_show(), "shots", max_cores=10)
        job = farm.job([LayerSpec(frames=12)], max_cores=10, folder_id=folder)
        farm.run(job.frames[:3], host, cores=2)
        cluster = cluster_of(farm)
        connection.execute(text("ALTER TABLE job_resource DISABLE TRIGGER USER"))
        connection.execute(text("ALTER TABLE folder_resource DISABLE TRIGGER USER"))
        connection.execute(text("UPDATE subscription SET int_burst = 1000"))
        connection.execute(text(f"UPDATE {table} SET int_cores = 1000"))  # noqa: S608 - a name of this test

    here.run([cluster])

    assert running(engine, job) == 3 + 4


def test_each_allocation_has_a_burst_of_its_own(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, allocs = farm.show("small"), [farm.alloc(name) for name in ("first", "second")]
        for alloc, burst in zip(allocs, (2, 3), strict=True):
            farm.subscription(show, alloc, size=burst)
            farm.host(alloc=alloc, tags=["both"])
        farm.job([LayerSpec(frames=9, tags="both")], show=show)
        cluster = cluster_of(farm, "both", show_id=show.id)

    here.drain()
    here.run([cluster])

    with engine.connect() as connection:
        used = connection.execute(text("SELECT pk_alloc, count(*) FROM proc JOIN host USING (pk_host) GROUP BY 1"))
        assert {tuple(row) for row in used} == {(allocs[0].id, 2), (allocs[1].id, 3)}


@pytest.mark.parametrize("burst", [0, 0.5])
def test_a_burst_of_less_than_a_core_admits_nothing(here: Passes, engine: Engine, burst: float) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, none = farm.show("small"), farm.alloc("none")
        farm.subscription(show, none, size=10, burst=burst)
        farm.host(alloc=none, tags=["fast"])
        farm.job([LayerSpec(frames=2, tags="fast")], show=show)
        cluster = cluster_of(farm, "fast", show_id=show.id)

    assert here.run([cluster])[0].frames_booked == 0


@one_job_a_plan
def test_jobs_that_reach_only_full_allocations_give_their_places_to_others(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, full, free = farm.show("small"), farm.alloc("full"), farm.alloc("free")
        farm.subscription(show, full, size=1)
        farm.subscription(show, free, size=100)
        busy = farm.host(alloc=full, tags=["m1"])
        farm.host(alloc=free, tags=["m2"])
        first = farm.job([LayerSpec(frames=5, tags="m1")], show=show, priority=200)
        farm.run(first.frames[:1], busy)
        second = farm.job([LayerSpec(tags="m2")], show=show, priority=1)
        cluster = cluster_of(farm, "m1", "m2", show_id=show.id)

    here.run([cluster])

    assert (running(engine, first), running(engine, second)) == (1, 1)


@one_job_a_plan
def test_a_job_too_wide_for_what_is_left_of_the_burst_gives_its_place_to_a_narrow_one(
    here: Passes, engine: Engine
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show("small"), farm.default_alloc()
        farm.subscription(show, alloc, size=6)
        host = farm.host(cores=64, memory_gb=64)
        wide, narrow = farm.jobs(
            [JobSpec([LayerSpec(frames=4, cores=cores)], show=show, priority=10 * cores) for cores in (4, 2)]
        )
        farm.run(wide.frames[:1], host, cores=4)
        cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, ("general",), alloc.id)

    here.run([cluster])

    assert (running(engine, wide), running(engine, narrow)) == (1, 1)


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("burst", Verdict.OVER_SUBSCRIPTION),
        ("job", Verdict.OVER_JOB),
        ("folder", Verdict.OVER_FOLDER),
        ("limit", Verdict.OVER_LIMIT),
    ],
)
def test_a_cluster_that_waits_at_a_cap_is_saturated_and_known_to_wait_for_it(
    here: Passes, engine: Engine, reason: str, verdict: Verdict
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show("small"), farm.default_alloc()
        farm.subscription(show, alloc, size=1 if reason == "burst" else 100)
        folder = farm.folder(show, "shots", max_cores=1 if reason == "folder" else -1)
        limits = [farm.limit("nuke", 1)] if reason == "limit" else []
        layers = [LayerSpec(frames=2, limits=limits)]
        job = farm.job(layers, show=show, folder_id=folder, max_cores=1 if reason == "job" else -1)
        farm.run(job.frames[:1], farm.host())
        cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, ("general",), alloc.id)

    (report,) = here.run([cluster])

    assert (report.ended, report.frames_booked, report.go_on) == (PassEnd.SATURATED, 0, False)
    assert [(it.layer_id, it.verdict, it.waiting) for it in report.verdicts] == [(job.layers[0].id, verdict, 1)]
    assert cluster.key in here.runner.at_caps


# Jobs and folders


@pytest.mark.parametrize("cap", [-1, 0])
def test_upstream_bug_vs_waiting_hides_jobs_with_unlimited_caps(here: Passes, engine: Engine, cap: int) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, gpus=8)
        job = farm.job([LayerSpec(frames=3), LayerSpec(frames=2, gpus=1)], max_cores=cap, max_gpus=cap)
        hidden = connection.scalar(text("SELECT count(*) FROM vs_waiting")) == 0
        cluster = cluster_of(farm)

    here.run([cluster])

    assert hidden
    assert running(engine, job) == 5


@one_job_a_plan
@pytest.mark.parametrize(
    ("caps", "layer"),
    [
        ({"max_cores": 2}, LayerSpec(frames=5)),
        ({"max_cores": 3}, LayerSpec(frames=5, cores=2)),
        ({"max_cores": 0.5}, LayerSpec(frames=5)),
        ({"max_gpus": 2}, LayerSpec(frames=5, gpus=1)),
    ],
    ids=["full", "too little left", "cap below one core", "gpus"],
)
def test_a_job_at_its_cap_gives_its_place_to_the_next(
    here: Passes, engine: Engine, caps: dict[str, float], layer: LayerSpec
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16, gpus=8)
        full = farm.job([layer], priority=200, **caps)
        farm.run(full.frames[:2], host, cores=1, gpus=layer.gpus)
        below = farm.job(priority=1)
        cluster = cluster_of(farm)

    here.run([cluster])

    assert (running(engine, full), running(engine, below)) == (2, 1)


def test_a_job_at_its_gpu_cap_still_has_its_layers_without_gpus(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16, gpus=8)
        job = farm.job([LayerSpec(frames=3, gpus=1), LayerSpec(frames=3)], max_gpus=1)
        farm.run(job.layers[0].frames[:1], host, gpus=1)
        cluster = cluster_of(farm)

    here.run([cluster])

    assert running_of_layers(engine, job) == [1, 3]


def test_a_folder_at_its_cap_gives_its_places_to_others_until_it_is_raised(engine: Engine, settings: Settings) -> None:
    # given a folder at its cap, with jobs ahead of one in another folder
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        folder = farm.folder(farm.default_show(), "small", max_cores=2)
        runs, waits = farm.jobs([JobSpec([LayerSpec(frames=4)], folder_id=folder, priority=p) for p in (300, 200)])
        farm.run(runs.frames[:2], host, cores=1)
        elsewhere = farm.job([LayerSpec(frames=1)], priority=1)
        cluster = cluster_of(farm)

    # when a plan may take frames of one job
    with passes(engine, dry(settings, **ONE_JOB_A_PLAN)) as here:
        here.run([cluster])
        # then it is the other's
        assert [running(engine, job) for job in (runs, waits, elsewhere)] == [2, 0, 1]

        # when one more core may run in the folder, then its first job has it
        execute(engine, "UPDATE folder_resource SET int_max_cores = 300 WHERE pk_folder = :folder", folder=folder)
        for _ in range(3):
            here.run([cluster])
        assert [running(engine, job) for job in (runs, waits, elsewhere)] == [3, 0, 1]


def test_upstream_bug_folder_sums_skip_finished_jobs_whose_procs_still_run(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        folder = farm.folder(farm.default_show(), "small", max_cores=3)
        finished, waiting = farm.jobs([JobSpec([LayerSpec(frames=3)], folder_id=folder) for _ in range(2)])
        farm.run(finished.frames[:2], host)
        connection.execute(text("UPDATE job SET str_state = 'FINISHED' WHERE pk_job = :job"), {"job": finished.id})
        cluster = cluster_of(farm)

    here.run([cluster])

    assert (running(engine, finished), running(engine, waiting)) == (2, 1)


def test_a_folder_without_a_cap_of_cores_may_have_one_of_gpus(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=16, gpus=8)
        folder = farm.folder(farm.default_show(), "capped", max_gpus=4)
        job = farm.job([LayerSpec(frames=6, gpus=1), LayerSpec(frames=3)], folder_id=folder)
        cluster = cluster_of(farm)

    here.run([cluster])

    assert running_of_layers(engine, job) == [4, 3]


@pytest.mark.parametrize("here", [{"dispatch_frames_per_layer_limit": 2}], indirect=True)
def test_upstream_bug_cap_sums_beyond_the_rank_limit_hide_no_later_layer(here: Passes, engine: Engine) -> None:
    """Upstream summed the whole job's frames against its cap before cutting each layer to the limit."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=16)
        job = farm.job([LayerSpec(frames=10), LayerSpec(frames=10)], max_cores=5)
        cluster = cluster_of(farm)

    here.run([cluster])

    assert running_of_layers(engine, job) == [3, 2]


# Limits


def test_upstream_bug_any_limit_with_room_let_a_layer_through(here: Passes, engine: Engine) -> None:
    """All limits of a layer must have room: one that stands under a full one gives its place away."""
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=16)
        full, roomy = farm.limit("full", 1), farm.limit("roomy", 100)
        holder = farm.job([LayerSpec(frames=2, limits=[full])], priority=300)
        farm.run(holder.frames[:1], host)
        blocked = farm.job([LayerSpec(limits=[full, roomy])], priority=200)
        mixed = farm.job([LayerSpec(limits=[full, roomy]), LayerSpec(limits=[roomy])], priority=100)
        cluster = cluster_of(farm)

    (report,) = here.run([cluster])

    assert (running(engine, holder), running(engine, blocked)) == (1, 0)
    assert running_of_layers(engine, mixed) == [0, 1]
    (detail,) = {it.detail for it in report.verdicts if it.layer_id == blocked.layers[0].id}
    assert "limit full" in detail


def test_a_limit_counts_the_running_frames_of_every_show_once_each(here: Passes, engine: Engine) -> None:
    # given ten licences: three in a show of the Cuebot's, two of a layer that is under them twice, one of another
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 10)
        cuebots = farm.show("cuebots", managed=False)
        host = farm.host(cores=32)
        theirs = farm.job([LayerSpec(frames=4, limits=[limit])], show=cuebots)
        ours = farm.job([LayerSpec(frames=9, limits=[limit]), LayerSpec(frames=9, limits=[limit])])
        list_twice(connection, ours.layers[0].id)
        other = farm.job([LayerSpec(frames=4)])
        started = [*theirs.frames[:3], *ours.layers[0].frames[:2], *ours.layers[1].frames[:1], *other.frames]
        farm.run(started, host)
        note_imported(here.client, managed_show_versions(connection))
        cluster = cluster_of(farm)

    # when passes book what they can, then the other four are in use
    here.run([cluster])
    here.run([cluster])

    assert sum(running_of_layers(engine, ours)) == 3 + 4


@pytest.mark.parametrize("spoil", ["int_max_value = NULL", "int_max_value = 0", "int_max_value = -1"])
def test_a_limit_without_a_value_admits_nothing(here: Passes, engine: Engine, spoil: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(limits=[farm.limit("new", 1)])])
        connection.execute(text(f"UPDATE limit_record SET {spoil}"))  # noqa: S608 - our own
        cluster = cluster_of(farm)

    (report,) = here.run([cluster])

    assert (report.frames_booked, [it.verdict for it in report.verdicts]) == (0, [Verdict.OVER_LIMIT])


def test_a_limit_of_frames_that_is_advice_bounds_none(here: Passes, engine: Engine) -> None:
    """V49 knows limits that are advice, and limits that are ignored."""
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 1)
        if not has_types(connection):
            pytest.skip("no advice before V49")
        connection.execute(text("UPDATE limit_record SET str_enforcement = 'ADVISORY'"))
        job = farm.job([LayerSpec(frames=3, limits=[limit])])
        farm.run(job.frames[:1], farm.host(cores=8))
        cluster = cluster_of(farm)

    (report,) = here.run([cluster])

    assert report.frames_booked == 2


def test_a_limit_that_counts_machines_is_never_held_by_more(here: Passes, engine: Engine) -> None:
    # given ten hosts of eight cores, a limit that two machines may hold, and a layer of a hundred frames under it
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("houdini", 2)
        set_type(connection, limit, "HOST")
        farm.hosts([HostSpec(cores=8, memory_gb=64) for _ in range(10)])
        farm.job([LayerSpec(frames=100, limits=[limit])])
        cluster = cluster_of(farm)

    # when passes book what they can, then every core of two machines has a frame
    def machines() -> list[int]:
        with engine.connect() as connection:
            counted = text("SELECT count(*) FROM proc GROUP BY pk_host ORDER BY 1 DESC")
            return list(connection.execute(counted).scalars())

    (report,) = here.run([cluster])
    assert (machines(), report.refusals) == ([8, 8], {})
    (report,) = here.run([cluster])
    assert (machines(), [it.verdict for it in report.verdicts]) == ([8, 8], [Verdict.OVER_LIMIT])
    assert here.client.zcount(keys.MACHINES_PREFIX + limit, "(0", "+inf") == 2

    # and when a third may, it has one after the next passes.
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET int_max_value = 3"))
    load_caps(engine, here.runner.ledger, [keys.limit(limit)])
    here.run([cluster])
    assert machines() == [8, 8, 8]


def test_a_limit_of_machines_is_full_for_its_own_layers_alone(here: Passes, engine: Engine) -> None:
    # given two hosts, one of which holds all of a limit and is full, and work with and without that limit
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("houdini", 1)
        set_type(connection, limit, "HOST")
        holder, _ = farm.hosts([HostSpec(cores=2, memory_gb=64), HostSpec(cores=8, memory_gb=64)])
        job = farm.job([LayerSpec(frames=9, limits=[limit]), LayerSpec(frames=5)])
        note_imported(here.client, managed_show_versions(connection))
        farm.run(job.layers[0].frames[:2], holder)
        cluster = cluster_of(farm)
    recompute(engine, here.runner.ledger, age_seconds=60, write_tables=False)
    load_caps(engine, here.runner.ledger, [keys.limit(limit)])

    # when a pass is over, then the layer that is under it waits for it, and the other does not
    (report,) = here.run([cluster])

    assert running_of_layers(engine, job) == [2, 5]
    assert [it.verdict for it in report.verdicts if it.layer_id == job.layers[0].id] == [Verdict.OVER_LIMIT]


def test_a_new_seat_goes_to_the_machine_that_takes_most_of_its_frames(here: Passes, engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("houdini", 1)
        set_type(connection, limit, "HOST")
        farm.hosts([HostSpec(cores=cores, memory_gb=64) for cores in (2, 4, 16, 3)])
        job = farm.job([LayerSpec(frames=40, limits=[limit])])
        cluster = cluster_of(farm)

    here.run([cluster])

    assert running_of_layers(engine, job) == [16]


def test_frames_under_a_reported_limit_fill_what_is_left_of_it(here: Passes, engine: Engine) -> None:
    # given a limit of ten frames, of which a licence server says that artists have seven
    with engine.begin() as connection:
        farm = Farm(connection)
        if not has_types(connection):
            pytest.skip("no reports before V49")
        limit = farm.limit("nuke", 10)
        report(connection, limit, "artist", tokens=7)
        farm.hosts([HostSpec(cores=8, memory_gb=64) for _ in range(3)])
        job = farm.job([LayerSpec(frames=40, limits=[limit])])
        note_imported(here.client, managed_show_versions(connection))
        cluster = cluster_of(farm)
    load_caps(engine, here.runner.ledger, [keys.limit(limit)])

    # when a pass is over, then the other three run, and none was refused
    (first,) = here.run([cluster])
    assert (running(engine, job), first.refusals, first.losses) == (3, {}, {})
    here.run([cluster])
    assert running(engine, job) == 3

    # and when the artists have gone, what started since still counts beside the report.
    with engine.begin() as connection:
        report(connection, limit)
    load_caps(engine, here.runner.ledger, [keys.limit(limit)])
    here.run([cluster])
    assert running(engine, job) == 10


FRAMES_ON_HOSTS = text("SELECT pk_host, count(*) AS frames FROM proc GROUP BY pk_host")


def test_a_limit_of_machines_that_was_lowered_gets_its_seats_back(here: Passes, engine: Engine) -> None:
    # given three machines that hold a limit, with a core idle on each
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("houdini", 3)
        set_type(connection, limit, "HOST")
        hosts = farm.hosts([HostSpec(cores=4, memory_gb=64) for _ in range(3)])
        job = farm.job([LayerSpec(frames=40, limits=[limit])])
        note_imported(here.client, managed_show_versions(connection))
        for number, host in enumerate(hosts):
            farm.run(job.frames[number * 3 : number * 3 + 3], host)
        cluster = cluster_of(farm)
    recompute(engine, here.runner.ledger, age_seconds=60, write_tables=False)

    # when one may hold it, then one takes more frames, and no booking was refused.
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET int_max_value = 1"))
    load_caps(engine, here.runner.ledger, [keys.limit(limit)])
    (done,) = here.run([cluster])
    with engine.connect() as connection:
        counted = {row.pk_host: row.frames for row in connection.execute(FRAMES_ON_HOSTS)}
    first, *others = sorted(host.id for host in hosts)
    assert (counted, done.refusals) == ({first: 4} | dict.fromkeys(others, 3), {})


@contextmanager
def changed_after_booking(here: Passes, change: str) -> Iterator[None]:
    """A limit changes once bookings are in the ledger and before they are committed, and nobody hears of that."""
    booked_before, changed = here.client.get(keys.SEQ), False

    def before_each(*_: object) -> None:
        nonlocal changed
        if not changed and here.client.get(keys.SEQ) != booked_before:
            changed = True
            execute(here.engine, change)

    with listening(here.engine, "before_cursor_execute", before_each):
        yield
    assert changed


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE limit_record SET int_max_value = 1",
        "UPDATE limit_record SET int_max_value = 9",
        "UPDATE limit_record SET b_host_limit = false",
        "UPDATE limit_record SET str_type = 'FRAME'",
        "UPDATE limit_record SET str_enforcement = 'DISABLED'",
        "UPDATE limit_record SET int_soft_value = 1",
        "UPDATE limit_record SET ts_reported = now()",
    ],
)
def test_what_a_limit_of_machines_has_accepted_otherwise_than_it_counts_now_is_not_committed(
    here: Passes, engine: Engine, change: str
) -> None:
    # given a pass whose bookings a limit of two machines has accepted
    with engine.begin() as connection:
        farm = Farm(connection)
        if has_types(connection) == ("b_host_limit" in change):
            pytest.skip("of the other schema")
        limit = farm.limit("houdini", 2)
        set_type(connection, limit, "HOST")
        farm.hosts([HostSpec(cores=8, memory_gb=64) for _ in range(3)])
        farm.job([LayerSpec(frames=30, limits=[limit])])
        cluster = cluster_of(farm)

    # when it commits, then all is lost, and nothing stays booked
    with changed_after_booking(here, change):
        (report,) = here.run([cluster])
    assert (report.frames_booked, report.losses) == (0, {CapChanging.reason: 16})
    assert here.client.zcount(keys.MACHINES_PREFIX + limit, "(0", "+inf") == 0

    # and the next pass books under what it is now.
    assert here.run([cluster])[0].frames_booked


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE limit_record SET ts_reported = now()",
        "UPDATE limit_record SET int_report_ttl = 1, ts_reported = now() - interval '1 minute'",
        "UPDATE limit_record SET str_type = 'HOST'",
        "UPDATE limit_record SET str_enforcement = 'ADVISORY'",
        "UPDATE limit_record SET int_max_value = 30",
    ],
)
def test_what_a_reported_limit_of_frames_has_accepted_otherwise_than_it_counts_now_is_not_committed(
    here: Passes, engine: Engine, change: str
) -> None:
    # given a pass whose bookings a limit of eight frames has accepted beside a report
    with engine.begin() as connection:
        farm = Farm(connection)
        if not has_types(connection):
            pytest.skip("no reports before V49")
        limit = farm.limit("houdini", 8)
        report(connection, limit, "artist", seconds_ago=5)
        farm.hosts([HostSpec(cores=8, memory_gb=64) for _ in range(3)])
        farm.job([LayerSpec(frames=30, limits=[limit])])
        cluster = cluster_of(farm)

    # when it commits, then all is lost, though nobody heard of the change, and nothing stays booked
    with changed_after_booking(here, change):
        (lost,) = here.run([cluster])
    assert (lost.frames_booked, lost.losses) == (0, {CapChanging.reason: 7})
    assert here.client.hget(keys.limit(limit), "int_running") == "0"

    # and the next pass books under what it is now.
    assert here.run([cluster])[0].frames_booked
