"""Checks, tiers and the rows that come and go with their owner, on our schema and on Cuebot's."""
# ruff: noqa: S608 - the names put into statements are written here

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import InternalError

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec


@contextmanager
def _refused(connection: Connection, message: str) -> Iterator[None]:
    """Expect exactly this text from a trigger, leaving the transaction usable."""
    with pytest.raises(InternalError) as refusal, connection.begin_nested():
        yield
    assert str(refusal.value.orig).splitlines()[0] == message
    assert refusal.value.orig.pgcode == "P0001"  # type: ignore[union-attr]


def _one(connection: Connection, query: str, **parameters: Any) -> tuple[Any, ...]:
    return tuple(connection.execute(text(query), parameters).one())


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("int_cores_idle", "unable to allocate additional core units"),
        ("int_mem_idle", "unable to allocate additional memory"),
        ("int_gpus_idle", "unable to allocate additional GPU units"),
        ("int_gpu_mem_idle", "unable to allocate additional GPU memory"),
    ],
)
def test_a_host_never_has_less_than_nothing_idle(engine: Engine, column: str, message: str) -> None:
    with engine.begin() as connection:
        Farm(connection).host(gpus=1, gpu_memory_gb=1)
        connection.execute(text(f"UPDATE host SET {column} = 0"))
        with _refused(connection, message):
            connection.execute(text(f"UPDATE host SET {column} = -1"))


def test_a_job_cannot_grow_over_its_caps_but_caps_can_be_lowered_below_the_use(engine: Engine) -> None:
    with engine.begin() as connection:
        Farm(connection).job(max_cores=5, max_gpus=2)
        with _refused(connection, "job has exceeded max cores"):
            connection.execute(text("UPDATE job_resource SET int_cores = 600"))
        with _refused(connection, "job has exceeded max GPU units"):
            connection.execute(text("UPDATE job_resource SET int_gpus = 3"))
        connection.execute(text("UPDATE job_resource SET int_cores = 500, int_gpus = 2"))
        connection.execute(text("UPDATE job_resource SET int_max_cores = 100, int_max_gpus = 0"))
        connection.execute(text("UPDATE job_resource SET int_cores = 400, int_gpus = 1"))


def test_a_job_cap_of_minus_one_refuses_any_growth_so_recompute_must_lift_it(engine: Engine) -> None:
    with engine.begin() as connection:
        Farm(connection).job(max_cores=-1, max_gpus=-1)
        with _refused(connection, "job has exceeded max cores"):
            connection.execute(text("UPDATE job_resource SET int_cores = 100"))
        connection.execute(text("UPDATE job_resource SET int_cores = 100, int_max_cores = 100, int_max_gpus = 0"))
        connection.execute(text("UPDATE job_resource SET int_max_cores = -1, int_max_gpus = -1"))
        assert _one(connection, "SELECT int_cores, int_max_cores FROM job_resource") == (100, -1)


def test_a_subscription_cannot_grow_over_its_burst(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        sub = farm.subscription(farm.show(), farm.default_alloc(), size=1, burst=2)
        change = "UPDATE subscription SET int_cores = :cores WHERE pk_subscription = :sub"
        with _refused(connection, "subscription has exceeded burst size"):
            connection.execute(text(change), {"cores": 201, "sub": sub})
        connection.execute(text(change), {"cores": 200, "sub": sub})
        connection.execute(text("UPDATE subscription SET int_burst = 0 WHERE pk_subscription = :sub"), {"sub": sub})
        connection.execute(text(change), {"cores": 100, "sub": sub})


@pytest.mark.parametrize("cores", [0, -100])
def test_a_proc_reserves_cores(engine: Engine, cores: int) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host, job = farm.host(), farm.job()
        with _refused(connection, "failed to allocate proc, tried to allocate 0 cores"):
            connection.execute(
                text(
                    "INSERT INTO proc (pk_proc, pk_host, pk_frame, int_cores_reserved, int_mem_reserved)"
                    " VALUES ('p', :host, :frame, :cores, 1)"
                ),
                {"host": host.id, "frame": job.frames[0], "cores": cores},
            )


def test_a_proc_that_takes_more_memory_takes_it_from_its_host(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host, job = farm.host(memory_gb=4), farm.job()
        farm.run(job.frames, host, memory_gb=1)
        idle = "SELECT int_mem_idle FROM host WHERE pk_host = :host"
        assert _one(connection, idle, host=host.id) == (3 * 1024**2,)
        connection.execute(text("UPDATE proc SET int_mem_reserved = int_mem_reserved * 3"))
        assert _one(connection, idle, host=host.id) == (1024**2,)
        with _refused(connection, "unable to allocate additional memory"):
            connection.execute(text("UPDATE proc SET int_mem_reserved = int_mem_reserved * 3"))


def test_a_proc_that_changes_layer_takes_its_cores_along(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host, job = farm.host(gpus=1), farm.job([LayerSpec(), LayerSpec()])
        farm.run(job.layers[0].frames, host, cores=3, gpus=1)
        first, second = (layer.id for layer in job.layers)
        connection.execute(
            text("UPDATE layer_resource SET int_cores = 300, int_gpus = 1 WHERE pk_layer = :layer"), {"layer": first}
        )
        connection.execute(text("UPDATE proc SET pk_layer = :layer"), {"layer": second})
        used = "SELECT int_cores, int_gpus FROM layer_resource WHERE pk_layer = :layer"
        assert _one(connection, used, layer=first) == (0, 0)
        assert _one(connection, used, layer=second) == (300, 1)


@pytest.mark.parametrize(("cores", "due", "tier"), [(50, 200, 0.25), (0, 200, -200), (150, 0, 2.5), (400, 200, 2)])
def test_tiers_of_jobs_and_subscriptions(engine: Engine, cores: int, due: int, tier: float) -> None:
    with engine.begin() as connection:
        Farm(connection).job()
        values = {"cores": cores, "due": due}
        connection.execute(text("UPDATE job_resource SET int_cores = :cores, int_min_cores = :due"), values)
        connection.execute(text("UPDATE subscription SET int_cores = :cores, int_size = :due"), values)
        assert float(_one(connection, "SELECT float_tier FROM job_resource")[0]) == tier
        assert {float(row[0]) for row in connection.execute(text("SELECT float_tier FROM subscription"))} == {tier}


@pytest.mark.parametrize(("cores", "due", "tier"), [(50, 200, 0.25), (0, 200, -200), (150, 0, 1), (400, 200, 1)])
def test_soft_tiers_of_folders_and_points(engine: Engine, cores: int, due: int, tier: float) -> None:
    with engine.begin() as connection:
        show = Farm(connection).show()
        values = {"cores": cores, "due": due, "show": show.id, "folder": show.folder_id}
        for table, where in (("folder_resource", "pk_folder = :folder"), ("point", "pk_show = :show")):
            connection.execute(
                text(f"UPDATE {table} SET int_cores = :cores, int_min_cores = :due WHERE {where}"), values
            )
            found = connection.execute(
                text(f"SELECT {table}.float_tier FROM {table} WHERE {where}"), values
            ).scalar_one()
            assert float(found) == tier


def test_rows_that_come_with_a_job_and_its_layers(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(), LayerSpec()])
        for table in ("job_stat", "job_resource", "job_usage", "job_mem", "job_history"):
            key = "pk_job" if table == "job_history" else f"pk_{table}"
            assert _one(connection, f"SELECT {key}, pk_job FROM {table}") == (job.id, job.id)
        for table in ("layer_stat", "layer_resource", "layer_usage", "layer_mem", "layer_history"):
            rows = connection.execute(text(f"SELECT pk_layer FROM {table} WHERE pk_job = :job"), {"job": job.id})
            assert set(rows.scalars()) == {layer.id for layer in job.layers}


def test_rows_that_come_with_a_folder(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show()
        child = farm.folder(show, "child", parent=show.folder_id)
        grandchild = farm.folder(show, "grandchild", parent=child)
        rows = connection.execute(
            text(
                "SELECT pk_folder, int_level, b_default FROM folder JOIN folder_level USING (pk_folder)"
                " JOIN folder_resource USING (pk_folder) WHERE pk_show = :show ORDER BY int_level"
            ),
            {"show": show.id},
        ).all()
        assert [tuple(row) for row in rows] == [(show.folder_id, 0, True), (child, 1, False), (grandchild, 2, False)]
        connection.execute(
            text("UPDATE folder SET pk_parent_folder = :root WHERE pk_folder = :folder"),
            {"root": show.folder_id, "folder": grandchild},
        )
        connection.execute(
            text("SELECT recurse_folder_parent_change(:folder, :root)"),
            {"folder": grandchild, "root": show.folder_id},
        )
        level = "SELECT int_level FROM folder_level WHERE pk_folder = :folder"
        assert _one(connection, level, folder=grandchild) == (1,)
        connection.execute(text("DELETE FROM folder WHERE pk_folder = :folder"), {"folder": grandchild})
        assert _one(connection, "SELECT count(*) FROM folder_resource WHERE pk_folder = :f", f=grandchild) == (0,)


def test_a_deleted_job_takes_everything_but_its_history_along(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 3)
        layers = [LayerSpec(frames=2, limits=[limit], env={"A": "1"}), LayerSpec(frames=2)]
        job, other = farm.job(layers, env={"B": "2"}), farm.job()
        farm.frame_by_frame((job, 1), (job, 0))
        farm.job_on_job(other, job)
        connection.execute(
            text(
                "INSERT INTO comments (pk_comment, pk_job, str_user, str_subject, str_message)"
                " VALUES ('c', :job, 'u', 's', 'm')"
            ),
            {"job": job.id},
        )
        connection.execute(text("DELETE FROM job WHERE pk_job = :job"), {"job": job.id})
        for table in ("frame", "layer", "layer_stat", "layer_env", "job_env", "job_stat", "job_resource", "comments"):
            assert _one(connection, f"SELECT count(*) FROM {table} WHERE pk_job = :job", job=job.id) == (0,)
        assert _one(connection, "SELECT count(*) FROM depend") == (0,)
        assert _one(connection, "SELECT count(*) FROM layer_limit") == (0,)
        archived = "SELECT b_archived, int_ts_stopped > 0 FROM job_history WHERE pk_job = :job"
        assert _one(connection, archived, job=job.id) == (True, True)
        assert _one(connection, "SELECT bool_and(b_archived) FROM layer_history WHERE pk_job = :j", j=job.id) == (True,)


def test_a_deleted_host_takes_its_tags_and_report_along(engine: Engine) -> None:
    with engine.begin() as connection:
        host = Farm(connection).host(tags=["a"])
        connection.execute(text("DELETE FROM host WHERE pk_host = :host"), {"host": host.id})
        assert _one(connection, "SELECT count(*) FROM host_tag") == (0,)
        assert _one(connection, "SELECT count(*) FROM host_stat") == (0,)


def test_a_finished_job_closes_its_layers_history(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=3, cores=2)])
        connection.execute(text("UPDATE layer_usage SET int_core_time_success = 42, int_core_time_fail = 7"))
        connection.execute(text("UPDATE layer_mem SET int_max_rss = 9"))
        connection.execute(text("UPDATE job SET str_state = 'FINISHED' WHERE pk_job = :job"), {"job": job.id})
        assert _one(
            connection,
            "SELECT int_core_time_success, int_core_time_fail, int_frame_count, int_waiting_count, int_max_rss,"
            " int_cores_min FROM layer_history WHERE pk_job = :job",
            job=job.id,
        ) == (42, 7, 3, 3, 9, 200)


def test_a_job_takes_its_use_along_to_another_folder_and_department(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show()
        folder, dept = farm.folder(show, "other"), farm.dept("Lighting")
        connection.execute(
            text("INSERT INTO point (pk_point, pk_dept, pk_show) VALUES ('p', :dept, :show)"),
            {"dept": dept, "show": show.id},
        )
        job = farm.job(show=show)
        connection.execute(text("UPDATE job_resource SET int_cores = 300, int_gpus = 2"))
        connection.execute(text("UPDATE folder_resource SET int_cores = 300, int_gpus = 2"))
        connection.execute(
            text("UPDATE point SET int_cores = 300, int_gpus = 2 WHERE pk_dept <> :dept"), {"dept": dept}
        )
        connection.execute(
            text("UPDATE folder_resource SET int_cores = 0, int_gpus = 0 WHERE pk_folder = :f"), {"f": folder}
        )
        connection.execute(
            text("UPDATE job SET pk_folder = :folder, pk_dept = :dept WHERE pk_job = :job"),
            {"folder": folder, "dept": dept, "job": job.id},
        )
        used = "SELECT int_cores, int_gpus FROM folder_resource WHERE pk_folder = :folder"
        assert _one(connection, used, folder=show.folder_id) == (0, 0)
        assert _one(connection, used, folder=folder) == (300, 2)
        used = "SELECT int_cores, int_gpus FROM point WHERE pk_show = :show AND pk_dept = :dept"
        assert _one(connection, used, show=show.id, dept=show.dept_id) == (0, 0)
        assert _one(connection, used, show=show.id, dept=dept) == (300, 2)


def test_recalculate_subs_repairs_unmanaged_shows_and_leaves_managed_ones(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        alloc, host = farm.default_alloc(), farm.host(cores=32, gpus=4)
        shows = [farm.show(managed=managed) for managed in (False, False, True)]
        subs = [farm.subscription(show, alloc, size=1, burst=2) for show in shows]
        # Given wrong figures everywhere, a show over its burst, and one without procs
        for show in (shows[0], shows[2]):
            job = farm.job([LayerSpec(frames=4)], show=show)
            farm.run(job.frames, host, cores=2, gpus=1 if show is shows[0] else 0)
        connection.execute(text("UPDATE proc SET b_local = true WHERE pk_frame = :frame"), {"frame": job.frames[0]})
        connection.execute(
            text("UPDATE subscription SET int_cores = 77, int_gpus = 7 WHERE pk_subscription = ANY(:subs)"),
            {"subs": subs},
        )
        # when the maintenance runs
        connection.execute(text("SELECT recalculate_subs()"))
        # then unmanaged shows have what their procs hold, and every burst is what it was.
        found = "SELECT int_cores, int_gpus, int_burst FROM subscription WHERE pk_subscription = :sub"
        assert _one(connection, found, sub=subs[0]) == (800, 4, 200)
        assert _one(connection, found, sub=subs[1]) == (0, 0, 200)
        assert _one(connection, found, sub=subs[2]) == (77, 7, 200)


def test_recalculate_tags_orders_by_kind_and_name(engine: Engine) -> None:
    with engine.begin() as connection:
        host = Farm(connection).host(name="wk1", tags=["zebra", "apple"], hardware_tags=["linux"])
        connection.execute(text("UPDATE host SET str_tags = '' WHERE pk_host = :host"), {"host": host.id})
        connection.execute(text("SELECT recalculate_tags(:host)"), {"host": host.id})
        found = _one(connection, "SELECT str_tags FROM host WHERE pk_host = :host", host=host.id)
        assert found == ("general linux wk1 apple zebra",)


def test_filters_are_numbered_in_their_order(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show()
        rows = [("c", 9.5), ("a", 0.0), ("b", 3.25)]
        farm.insert(
            "filter",
            [
                {
                    "pk_filter": name,
                    "pk_show": show.id,
                    "str_name": name,
                    "str_type": "MATCH_ALL",
                    "f_order": order,
                    "b_enabled": True,
                }
                for name, order in rows
            ],
        )
        connection.execute(text("SELECT reorder_filters(:show)"), {"show": show.id})
        found = connection.execute(text("SELECT pk_filter, f_order FROM filter ORDER BY f_order")).all()
        assert [(name, int(order)) for name, order in found] == [("a", 1), ("b", 2), ("c", 3)]


def test_the_waiting_view_hides_jobs_without_a_cap(engine: Engine) -> None:
    # Cuebot's view takes a cap of -1 for "no room". Our queries must not rely on it; this pins why.
    with engine.begin() as connection:
        farm = Farm(connection)
        capped, uncapped = farm.show(), farm.show()
        farm.job(show=capped, max_cores=1)
        farm.job(show=uncapped, max_cores=-1)
        assert connection.execute(text("SELECT pk_show FROM vs_waiting")).scalars().all() == [capped.id]


def test_functions_that_cuebot_calls(engine: Engine) -> None:
    with engine.connect() as connection:
        assert _one(
            connection,
            "SELECT epoch(timestamptz '1970-01-01 00:01:00Z'), interval_to_seconds(interval '1 day 2 seconds'),"
            " find_duration(timestamptz '2026-01-01 00:00:00Z', timestamptz '2026-01-02 00:00:01Z'),"
            " find_duration(NULL, now()), find_duration(now(), NULL)",
        ) == (60, 86402, 86401, 0, 0)
