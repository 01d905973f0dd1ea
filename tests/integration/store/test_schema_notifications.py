"""What our triggers tell listeners: releases, cap changes, new work and flips, on our schema and on Cuebot's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store.schema import check_schema
from tests.kit.limits import has_types
from tests.kit.notifications import Listener

_CHANNELS = ("opencue_sched_release", "opencue_sched_caps", "opencue_sched_work", "opencue_sched_handed_back")


@pytest.fixture
def listener(database_url: str) -> Iterator[Listener]:
    listener = Listener(database_url, _CHANNELS)
    try:
        yield listener
    finally:
        listener.close()


def test_a_released_proc_is_told_with_its_host(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        hosts = [farm.host(), farm.host()]
        job = farm.job([LayerSpec(frames=3)])
        procs = [*farm.run(job.frames[:2], hosts[0]), *farm.run(job.frames[2:], hosts[1])]
    listener.heard(engine)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc WHERE pk_proc = ANY(:procs)"), {"procs": procs[:2]})
    assert listener.heard(engine) == {"release": [{"procs": sorted(procs[:2]), "hosts": [hosts[0].id]}]}


def test_a_thousand_procs_released_by_one_statement_arrive_in_several_payloads(
    engine: Engine, listener: Listener
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        hosts = [farm.host(cores=10) for _ in range(100)]
        job = farm.job([LayerSpec(frames=1000)])
        procs = []
        for number, host in enumerate(hosts):
            procs += farm.run(job.frames[10 * number : 10 * number + 10], host, memory_gb=0.1)
    listener.heard(engine)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc"))
    told = listener.heard(engine)["release"]
    assert sorted(proc for payload in told for proc in payload["procs"]) == sorted(procs)
    assert {host for payload in told for host in payload["hosts"]} == {host.id for host in hosts}
    assert 1 < len(told) < 20


def test_a_rolled_back_release_is_not_told(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.run(farm.job().frames, farm.host())
    listener.heard(engine)
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM proc"))
        connection.rollback()
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc WHERE pk_proc = 'nobody'"))
    assert listener.heard(engine) == {}


def test_ids_that_need_escaping_still_fit(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host, job = farm.host(cores=200), farm.job([LayerSpec(frames=100)])
        farm.run(job.frames, host, memory_gb=0.1)
        connection.execute(
            text(
                "UPDATE proc SET pk_proc = lpad(n::text, 3, '0') || repeat(chr(1), 33)"
                " FROM (SELECT pk_proc AS id, row_number() OVER () AS n FROM proc) named WHERE pk_proc = id"
            )
        )
    listener.heard(engine)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc"))
    told = listener.heard(engine)["release"]
    assert sum(len(payload["procs"]) for payload in told) == 100


def _vertices(heard: dict[str, list[dict[str, Any]]]) -> list[str]:
    return sorted(vertex for payload in heard.get("caps", []) for vertex in payload["vertices"])


def test_only_a_cap_that_changed_is_told(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show(), farm.default_alloc()
        sub = farm.subscription(show, alloc, size=1, burst=2)
        limit = farm.limit("nuke", 3)
        job = farm.job(show=show)
        other = farm.job(show=show)
    listener.heard(engine)
    ids = {"sub": sub, "job": job.id, "other": other.id, "folder": show.folder_id, "limit": limit}
    # Use, tiers and statements that write a cap again are not changes of a cap,
    same = [
        "UPDATE subscription SET int_cores = 100, int_gpus = 1, int_burst = int_burst WHERE pk_subscription = :sub",
        "UPDATE folder_resource SET int_cores = 100 WHERE pk_folder = :folder",
        "UPDATE job_resource SET int_cores = 100, int_max_rss = 5, int_max_cores = int_max_cores",
        "UPDATE limit_record SET str_name = 'nukex'",
    ]
    with engine.begin() as connection:
        for statement in same:
            connection.execute(text(statement), ids)
    assert listener.heard(engine) == {}
    # these are.
    changes = {
        "UPDATE subscription SET int_burst = 300 WHERE pk_subscription = :sub": f"sub:{show.id}:{alloc.id}",
        "UPDATE subscription SET int_size = 300 WHERE pk_subscription = :sub": f"sub:{show.id}:{alloc.id}",
        "UPDATE folder_resource SET int_max_cores = 5 WHERE pk_folder = :folder": f"folder:{show.folder_id}",
        "UPDATE folder_resource SET int_max_gpus = 5 WHERE pk_folder = :folder": f"folder:{show.folder_id}",
        "UPDATE job_resource SET int_max_cores = 700 WHERE pk_job = :job": f"job:{job.id}",
        "UPDATE job_resource SET int_max_gpus = 7 WHERE pk_job = :job": f"job:{job.id}",
        "UPDATE job_resource SET int_priority = CASE WHEN pk_job = :other THEN 9 ELSE 100 END": f"job:{other.id}",
        "UPDATE limit_record SET int_max_value = 4 WHERE pk_limit_record = :limit": f"limit:{limit}",
        "UPDATE limit_record SET int_max_value = NULL WHERE pk_limit_record = :limit": f"limit:{limit}",
        "UPDATE limit_record SET b_host_limit = true WHERE pk_limit_record = :limit": f"limit:{limit}",
        "DELETE FROM limit_record WHERE pk_limit_record = :limit": f"limit:{limit}",
        "DELETE FROM subscription WHERE pk_subscription = :sub": f"sub:{show.id}:{alloc.id}",
    }
    for statement, vertex in changes.items():
        with engine.begin() as connection:
            connection.execute(text(statement), ids)
        assert _vertices(listener.heard(engine)) == [vertex], statement


def test_what_is_reported_of_a_limit_is_told_and_a_soft_value_of_one_of_frames_is_not(
    engine: Engine, listener: Listener
) -> None:
    with engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
        limit = Farm(connection).limit("nuke", 3)
    reported = ("ts_reported = now()", "int_report_ttl = 5", "str_enforcement = 'ADVISORY'")

    def told(change: str) -> list[str]:
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE limit_record SET {change}"))  # noqa: S608
        return _vertices(listener.heard(engine))

    listener.heard(engine)
    assert [told(change) for change in reported] == [[f"limit:{limit}"]] * 3
    assert told("int_soft_value = 1") == []
    assert told("str_type = 'HOST'") == [f"limit:{limit}"]
    assert told("ts_reported = now(), int_soft_value = 2") == [f"limit:{limit}"]
    assert told("str_type = 'FRAME'") == [f"limit:{limit}"]
    assert told("int_max_value = 4") == [f"limit:{limit}"]


def test_new_subscriptions_folders_jobs_and_limits_are_told(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show(), farm.default_alloc()
        farm.subscription(show, alloc)
        limit = farm.limit("nuke", 3)
        job = farm.job(show=show)
    expected = [f"folder:{show.folder_id}", f"job:{job.id}", f"limit:{limit}", f"sub:{show.id}:{alloc.id}"]
    assert sorted(set(_vertices(listener.heard(engine)))) == expected


def test_a_cap_lifted_and_put_back_quietly_is_not_told(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        Farm(connection).job(max_cores=5)
    listener.heard(engine)
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL opencue_sched.quiet_caps = 'on'"))
        connection.execute(text("UPDATE job_resource SET int_max_cores = 900, int_cores = 900"))
        connection.execute(text("UPDATE job_resource SET int_max_cores = 500"))
    assert listener.heard(engine) == {}
    # The next transaction of the same session speaks again.
    with engine.begin() as connection:
        connection.execute(text("UPDATE job_resource SET int_max_cores = 600"))
    assert len(_vertices(listener.heard(engine))) == 1


def test_two_thousand_cap_changes_arrive_in_several_payloads(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show()
        folders = [farm.folder(show, f"f{number}") for number in range(20)]
        connection.execute(
            text(
                "INSERT INTO limit_record (pk_limit_record, str_name, int_max_value)"
                " SELECT gen_random_uuid()::text, 'limit' || n, 1 FROM generate_series(1, 2000) n"
            )
        )
    listener.heard(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET int_max_value = 2"))
        connection.execute(
            text("UPDATE folder_resource SET int_max_cores = 100 WHERE pk_folder = ANY(:folders)"),
            {"folders": folders},
        )
    told = _vertices(listener.heard(engine))
    assert len(told) == len(set(told)) == 2000 + len(folders)


def test_new_work_of_managed_shows_is_told_once(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        managed, unmanaged = farm.show(), farm.show(managed=False)
        jobs = [farm.job([LayerSpec(), LayerSpec()], show=show, activate=False) for show in (managed, unmanaged)]
        paused = farm.job(show=managed, paused=True, activate=False)
    listener.heard(engine)
    # A job that is activated,
    with engine.begin() as connection:
        Farm(connection).activate(jobs)
    assert listener.heard(engine)["work"] == [{"shows": [managed.id]}]
    # a paused one is not news until it is unpaused,
    with engine.begin() as connection:
        Farm(connection).activate([paused])
    assert listener.heard(engine) == {}
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = false WHERE pk_job = :job"), {"job": paused.id})
    assert listener.heard(engine) == {"work": [{"shows": [managed.id]}]}
    # the last waiting frame starting is not, its retry is.
    change = text("UPDATE frame SET str_state = :state WHERE pk_frame = :frame")
    with engine.begin() as connection:
        connection.execute(change, {"state": "RUNNING", "frame": paused.frames[0]})
    assert listener.heard(engine) == {}
    with engine.begin() as connection:
        connection.execute(change, {"state": "WAITING", "frame": paused.frames[0]})
    assert listener.heard(engine) == {"work": [{"shows": [managed.id]}]}


def test_a_start_time_that_is_set_anew_is_new_work(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        if not check_schema(connection).has_start_after:
            pytest.skip("a Cuebot before V47 knows no start times")
        job = Farm(connection).job()
    listener.heard(engine)
    for change in ("now() + interval '12 s'", "NULL"):
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE layer SET ts_start_after = {change}"))  # noqa: S608
        assert listener.heard(engine) == {"work": [{"shows": [job.show.id]}]}
    # the same again is not, nor is anything else that is written to a layer
    with engine.begin() as connection:
        connection.execute(text("UPDATE layer SET ts_start_after = NULL, int_mem_min = 5"))
    assert listener.heard(engine) == {}


def test_a_satisfied_dependency_is_new_work(engine: Engine, listener: Listener) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(), LayerSpec()], activate=False)
        farm.frame_by_frame((job, 1), (job, 0))
        farm.activate([job])
    listener.heard(engine)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE frame SET int_depend_count = 0 WHERE pk_layer = :layer"), {"layer": job.layers[1].id}
        )
    assert listener.heard(engine) == {"work": [{"shows": [job.show.id]}]}


def test_a_show_that_may_be_booked_again_is_told_and_one_that_may_not_is_not(
    engine: Engine, listener: Listener
) -> None:
    with engine.begin() as connection:
        show = Farm(connection).show("flipped", managed=False)
    listener.heard(engine)

    def heard_after(change: str) -> dict[str, list[dict[str, Any]]]:
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE show SET {change} WHERE pk_show = :show"), {"show": show.id})  # noqa: S608
        return listener.heard(engine)

    told = {"work": [{"shows": [show.id]}]}
    assert heard_after("b_booking_enabled = false, b_scheduler_managed = true") == {}
    assert heard_after("b_booking_enabled = true") == told
    assert heard_after("str_name = 'renamed'") == {}
    assert heard_after("b_paused = true") == {}
    assert heard_after("b_paused = false") == told
    assert heard_after("b_scheduler_managed = false") == {"handed_back": [{"shows": [show.id]}]}
    assert heard_after("b_scheduler_managed = false") == {}
    assert heard_after("b_scheduler_managed = true") == told


def test_hosts_whose_lock_state_or_hardware_changed_are_told_and_reports_and_bookings_are_not(
    engine: Engine, listener: Listener
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host()
        farm.host()
    listener.heard(engine)
    # What bookings and host reports write of a host is not news, nor is what is written again as it was,
    same = [
        "UPDATE host SET int_cores_idle = int_cores_idle - 100, int_mem_idle = int_mem_idle - 1, int_gpus_idle = 0",
        "UPDATE host SET str_lock_state = str_lock_state, int_cores = int_cores, str_lock_source = 'me'",
        "UPDATE host_stat SET ts_ping = now(), int_load = 3, int_mem_free = 1, str_state = str_state, str_os = 'x'",
    ]
    with engine.begin() as connection:
        for statement in same:
            connection.execute(text(statement))
    assert listener.heard(engine) == {}
    # these are.
    changes = [
        "UPDATE host SET str_lock_state = 'LOCKED' WHERE pk_host = :host",
        "UPDATE host SET str_lock_state = 'OPEN' WHERE pk_host = :host",
        "UPDATE host SET int_cores = int_cores + 100 WHERE pk_host = :host",
        "UPDATE host SET int_mem = int_mem + 1 WHERE pk_host = :host",
        "UPDATE host SET int_gpus = int_gpus + 1 WHERE pk_host = :host",
        "UPDATE host SET int_gpu_mem = int_gpu_mem + 1 WHERE pk_host = :host",
        "UPDATE host_stat SET str_state = 'DOWN' WHERE pk_host = :host",
        "UPDATE host_stat SET str_state = 'UP' WHERE pk_host = :host",
    ]
    for statement in changes:
        with engine.begin() as connection:
            connection.execute(text(statement), {"host": host.id})
        assert listener.heard(engine) == {"release": [{"hosts": [host.id]}]}, statement


def test_a_new_host_and_a_new_tag_are_told_once_and_tags_written_as_they_were_are_not(
    engine: Engine, listener: Listener
) -> None:
    """So too by Cuebot's first report of a host, by CueGUI and by ``cueadmin``."""
    with engine.begin() as connection:
        host = Farm(connection).host(tags=["a", "b"])
    told = {"release": [{"hosts": [host.id]}]}
    assert listener.heard(engine) == told
    for change in (
        "INSERT INTO host_tag (pk_host_tag, pk_host, str_tag, str_tag_type, b_constant)"
        " VALUES ('tag', :host, 'new', 'MANUAL', false)",
        "UPDATE host_tag SET str_tag = 'newer' WHERE str_tag = 'new' AND pk_host = :host",
    ):
        with engine.begin() as connection:
            connection.execute(text(change), {"host": host.id})
        assert listener.heard(engine) == told
    with engine.begin() as connection:
        connection.execute(text("UPDATE host_tag SET str_tag = str_tag"))
        connection.execute(text("DELETE FROM host_tag WHERE str_tag = 'newer'"))
    assert listener.heard(engine) == {}
