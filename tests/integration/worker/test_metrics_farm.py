"""What the leading beat shows of hosts, shows, caps, licences and events, and what reading that costs."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.worker import fleet_metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from tests.integration.worker.metered import Gate, sample, series
from tests.kit.failed_runs import failed_on
from tests.kit.gathering import counted_statements
from tests.kit.limits import has_types, report_held, set_type


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
